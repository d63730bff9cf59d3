"""The models that a user passes to a strategy: one callable, or several by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError
from ..core.kinds import REFUSALS, tried
from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from ..method import Job, Method, ModelBuilder

    Model = ModelBuilder | Mapping[str, ModelBuilder]


def named_builders(model: Model) -> dict[str, ModelBuilder]:
    """Return the models by name; a single one is called ``"model"``.

    Raises:
        OptionError: There is no model, or the argument is of another type.
    """
    from torch import nn

    builders = dict(model) if isinstance(model, Mapping) else {"model": model}
    for builder in builders.values() or (model,):
        # A module is callable too, but calling it does not make a new one.
        if not callable(builder) or isinstance(builder, nn.Module):
            kind = f"a {type(builder).__name__}" if builders else "an empty dict"
            raise OptionError(
                f"model is {kind}: must be a callable that returns an nn.Module, as its class does, or a dict of "
                "architecture name -> callable"
            )
    return builders


def chosen_student(student: str | None, builders: Mapping[str, ModelBuilder]) -> str:
    """Return the architecture of the result; a single model leaves no choice.

    Raises:
        OptionError: It is missing or unknown.
    """
    if student is None and len(builders) == 1:
        return next(iter(builders))
    if student is None or student not in builders:
        raise OptionError(f"student is {student!r}: must be one of {', '.join(builders)}")
    return student


def check_student(job: Job) -> None:
    """Refuse a student that does not map images to logits, before the clients train in vain.

    Raises:
        OptionError: It does not take images of the input shape, or its outputs are not one per class.
    """
    import torch

    channels, sizes = job.input_shape[0], {len(job.normalization.mean), len(job.normalization.std)}
    if sizes != {channels}:
        raise OptionError(f"normalization is {job.normalization}: must be one mean and one std per channel, {channels}")
    with seeded_torch(job.seed, "check"), torch.no_grad():
        model = job.builders[job.student]().eval()
        try:
            found = tuple(tried(model, job.input_shape).shape)
        except REFUSALS as error:
            raise OptionError(
                f"input_shape is {job.input_shape}, and model {job.student!r} does not take such images: {error}"
            ) from error
    if found != (2, job.num_classes):
        raise OptionError(
            f"num_classes is {job.num_classes}, but model {job.student!r} maps 2 images of shape {job.input_shape} to "
            f"{list(found)}: must be {[2, job.num_classes]}"
        )


def chosen_config(config: Any, method: Method) -> Any:
    """Return a method's config; None: its defaults.

    Raises:
        OptionError: It is another method's.
    """
    if config is not None and not isinstance(config, method.config):
        raise OptionError(f"config is {type(config).__name__}: must be {method.config.__name__}")
    return method.config() if config is None else config
