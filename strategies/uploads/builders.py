"""The models that a user passes to a strategy, one callable or several by name, and those that clients may upload."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError, shorten_list
from ..core.facts import CLASSIFIER, MODEL_ERRORS, STATISTICS, Agreement, base_of, kind_of, run_on_blanks
from ..core.options import PRESET_NAMES, QUICK, listed, preset_of
from ..core.seeds import seeded_torch
from ..method import Job, Method, ModelBuilder

if TYPE_CHECKING:
    import torch
    from torch import nn

Model = ModelBuilder | Mapping[str, ModelBuilder]
Shape = tuple[int, int, int]


def named_builders(model: Model, input_shape: Any = None) -> dict[str, ModelBuilder]:
    """Return the models by name; a single one is called ``"model"``.

    Args:
        model: A callable that returns an nn.Module, or a dict of them.
        input_shape: Of one example, by which lazy layers find their sizes; None if it is unknown.

    Raises:
        OptionError: There is no model, the argument is of another type, or a model has lazy layers and the shape is
            unknown.
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
        if needed := _arguments(builder):
            what = getattr(builder, "__name__", type(builder).__name__).replace("<lambda>", "your function")
            raise OptionError(
                f"model is {what}, which needs {shorten_list(needed)}: must be a callable without arguments, such as "
                f"lambda: {what.replace(' ', '_')}({needed[0]}=...)"
            )
    for name in [name for name, builder in builders.items() if _makes_lazy_layers(builder)]:
        if input_shape is None:
            raise OptionError(
                f"model {name!r} has lazy layers, whose sizes follow from the examples: needs input_shape, or layers "
                "that name their sizes"
            )
        builders[name] = SizedBuilder(builders[name], check_shape(input_shape))
    return builders


@dataclass(frozen=True)
class SizedBuilder:
    """Builds another builder's modules, whose lazy layers have found their sizes by two blank examples."""

    build: ModelBuilder
    input_shape: Shape

    @property
    def __name__(self) -> str:
        """The name of the builder inside."""
        return getattr(self.build, "__name__", "model")

    def __call__(self) -> nn.Module:
        """Return a fresh module."""
        import torch

        module = self.build()
        training = module.training
        with torch.no_grad():
            if self.input_shape[1:] == (1, 1):  # a row
                try:
                    module.eval()(torch.zeros(2, self.input_shape[0]))
                    return module.train(training)
                except MODEL_ERRORS:  # it takes rows as [F, 1, 1]
                    module = self.build()
            run_on_blanks(module.eval(), self.input_shape)
        return module.train(training)


def _arguments(builder: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a callable needs, as far as it tells them."""
    try:
        known = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return []
    further = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in known if each.default is each.empty and each.kind not in further]


def _makes_lazy_layers(builder: ModelBuilder) -> bool:
    import torch
    from torch.nn.parameter import is_lazy

    try:
        with torch.device("meta"), seeded_torch(0, "lazy"):  # without memory for weights
            module = builder()
    except Exception:  # noqa: BLE001  the user's own code, which says more where its model is needed
        return False
    return isinstance(module, torch.nn.Module) and any(map(is_lazy, (*module.parameters(), *module.buffers())))


def choose_student(student: str | None, builders: Mapping[str, ModelBuilder]) -> str:
    """Return the architecture of the result; a single model leaves no choice.

    Raises:
        OptionError: It is missing or unknown.
    """
    if student is None and len(builders) == 1:
        return next(iter(builders))
    if student is None or student not in builders:
        raise OptionError(f"student is {student!r}: must be one of {', '.join(builders)}")
    return student


def check_task(num_classes: Any, classes: Sequence[str] = ()) -> Agreement:
    """Refuse a number of classes that is none, and names that do not fit it.

    Args:
        num_classes: C; None where a method merges weights alone.
        classes: The names of the classes in the order of their numbers; empty for unnamed ones.

    Returns:
        What every upload that names its classes must share.

    Raises:
        OptionError: The number is not a whole one above 0, or there is not one name per class.
    """
    if num_classes is None and not classes:
        return Agreement.of(classes)
    if isinstance(num_classes, bool) or not isinstance(num_classes, Integral) or int(num_classes) < 1:
        raise OptionError(f"num_classes is {num_classes!r:.80}: must be a whole number, one per class")
    named = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
    if not named or len(classes) not in (0, num_classes) or len(set(classes)) < len(classes):
        raise OptionError(
            f"classes is {str(classes)[:200]!r}: must be {num_classes} different names, one per class, in the order of "
            "their numbers"
        )
    return Agreement.of(classes)


def check_shape(input_shape: Any) -> Shape:
    """Return the shape of one example as a tuple.

    Raises:
        OptionError: It is not three whole numbers above 0.
    """
    sizes = input_shape if isinstance(input_shape, tuple | list) else ()
    sizes = (*sizes, 1, 1) if len(sizes) == 1 else sizes  # a row
    if len(sizes) != 3 or not all(isinstance(size, Integral) and size > 0 for size in sizes):  # type: ignore[operator]
        raise OptionError(
            f"input_shape is {input_shape!r:.80}: must be three whole numbers above 0, (channels, height, width); rows "
            "are (F, 1, 1), and texts are (1, 1, L)"
        )
    return int(sizes[0]), int(sizes[1]), int(sizes[2])


def check_described(method: Method, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
    """Refuse missing classes and shapes of examples, unless the method merges weights alone.

    Raises:
        OptionError: The method needs them, only one of the two is given, or the number is none.
    """
    if num_classes is not None and input_shape is not None:
        check_task(num_classes)
        return
    missing = " and ".join(
        name for name, value in (("num_classes", num_classes), ("input_shape", input_shape)) if value is None
    )
    if not method.any_model:
        raise OptionError(f"method {method.name!r} needs {missing}: the classes and the shape of one example")
    if num_classes is not None or input_shape is not None:
        raise OptionError(f"{missing} is missing: give num_classes and input_shape, or neither of them")


def check_student(job: Job, *, trained: bool = True, classifies: bool = True, trained_by_clients: bool = False) -> None:
    """Refuse a student that does not map images to logits, before the clients train in vain.

    Args:
        trained: Whether the server trains it.
        classifies: Whether its outputs are used; an average of weights needs none.
        trained_by_clients: Whether other processes build and train it too.

    Raises:
        OptionError: It does not take images of the input shape, or its outputs are not one per class. Also: there is
            one class alone, its builder makes no new module, it cannot be trained as it is, or a buffer outside of its
            ``state_dict`` is drawn at random or changes in training, and would be lost with every upload and file.
    """
    import torch

    if classifies and job.num_classes < 2:
        raise OptionError(f"num_classes is {job.num_classes}: must be at least 2; a single logit z is the pair [0, z]")
    if torch.get_default_dtype() != torch.float32:
        raise OptionError(f"torch's default dtype is {torch.get_default_dtype()}: must be torch.float32 here")
    channels, sizes = job.input_shape[0], {len(job.normalization.mean), len(job.normalization.std)}
    if sizes != {channels}:
        raise OptionError(f"normalization is {job.normalization}: must be one mean and one std per channel, {channels}")
    with torch.inference_mode(False), torch.no_grad(), seeded_torch(job.seed, "check"):
        model, other = job.builders[job.student](), job.builders[job.student]()
        if _storages(model) & _storages(other):
            raise OptionError(f"model {job.student!r} is made of the same parameters each time: must be a new module")
        if trained and not any(value.requires_grad for value in model.parameters()):
            raise OptionError(f"model {job.student!r} has no parameter that requires grad: must have one to train")
        if trained and (half := [name for name, value in model.named_parameters() if value.dtype == torch.float16]):
            raise OptionError(f"model {job.student!r} has {half[0]!r} of float16: must be float32 or bfloat16 to train")
        if extra := [name for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)]:
            raise OptionError(f"model {job.student!r} has {extra[0]!r} in its state_dict: must have tensors alone")
        _check_buffers(model, other, job, trained=trained or trained_by_clients)
        if classifies:
            _check_outputs(model.eval(), job, "")
        if trained:
            _check_outputs(other.train(), job, " in training mode")


def _check_buffers(model: nn.Module, other: nn.Module, job: Job, *, trained: bool) -> None:
    """Refuse buffers that no upload and no file would have, from two modules of one builder."""
    missing = "and its state_dict lacks it, as uploads and files do: must be registered with persistent=True"
    if lost := _differing_buffer(_unstored(model), _unstored(other)):
        raise OptionError(
            f"model {job.student!r} has buffer {lost!r} with other values each time it is built, {missing}, or be "
            "drawn from a torch.Generator of its own with a fixed seed"
        )
    if trained and (lost := _changing_buffer(other, job)):
        raise OptionError(f"model {job.student!r} has buffer {lost!r}, which changes in training, {missing}")


def _unstored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the buffers that a module's state_dict lacks."""
    names = model.state_dict().keys()
    return {name: value.clone() for name, value in model.named_buffers() if name not in names and not value.is_meta}


def _differing_buffer(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str:
    """Return the first buffer of equal shapes and other values; one that grows is a cache."""
    import torch

    for name, value in one.items():
        if name not in other or value.shape != other[name].shape:
            continue
        if not torch.equal(value.nan_to_num(), other[name].nan_to_num()):
            return name
    return ""


def _changing_buffer(model: nn.Module, job: Job) -> str:
    """Return a buffer outside of the state_dict that training examples change and evaluation does not, as a cache."""
    import torch

    if not _unstored(model):
        return ""
    draw = torch.Generator().manual_seed(job.seed)
    examples = torch.randn(2, *job.input_shape, generator=draw)
    try:
        model.eval()(examples)
        before = _unstored(model)
        model.train()(examples)
    except MODEL_ERRORS:  # what it takes is checked on its own
        return ""
    return _differing_buffer(before, _unstored(model))


def _storages(model: nn.Module) -> set[int]:
    """Return where the values of a module's parameters lie."""
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if parameter.numel()}


def _check_outputs(model: nn.Module, job: Job, mode: str) -> None:
    from torch import Tensor

    who = f"model {job.student!r}{mode}"
    try:
        found = run_on_blanks(model, job.input_shape)
    except MODEL_ERRORS as error:
        raise OptionError(f"input_shape is {job.input_shape}, and {who} does not take such images: {error}") from error
    if not isinstance(found, Tensor):
        raise OptionError(f"{who} returns a {type(found).__name__}: must return logits alone, a tensor [B, C]")
    if tuple(found.shape) != (2, job.num_classes):
        raise OptionError(
            f"num_classes is {job.num_classes}, but {who} maps 2 images of shape {job.input_shape} to "
            f"{list(found.shape)}: must be {[2, job.num_classes]}"
        )


def choose_config(config: Any, method: Method, preset: str = QUICK) -> Any:
    """Return a method's config; None: that of a preset.

    Raises:
        OptionError: It is another method's, or the preset is unknown.
    """
    if config is not None and not isinstance(config, method.config):
        raise OptionError(f"config is {type(config).__name__}: must be {method.config.__name__}")
    if preset not in PRESET_NAMES:
        raise OptionError(f"preset is {str(preset)[:80]!r}: must be one of {', '.join(PRESET_NAMES)}")
    return preset_of(method.config, preset) if config is None else config


def builders_of_kind(builders: Mapping[str, ModelBuilder], kind: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a client may send; all of them where no name says that it is of this kind.

    Sums of features join an ensemble of classifiers as heads.
    """
    kinds = (kind, STATISTICS) if kind == CLASSIFIER else (kind,)
    return {name: builder for name, builder in builders.items() if kind_of(name) in kinds} or builders


def accepted_builders(builders: Mapping[str, ModelBuilder], accepted: str) -> Mapping[str, ModelBuilder]:
    """Return the models that a run accepts.

    Args:
        accepted: Their names with commas between, without the suffix of a kind; empty for all of them.

    Raises:
        OptionError: A name is not one of them.
    """
    names = listed(accepted)
    bases = {name: base_of(name) for name in builders}
    if unknown := sorted(set(names) - set(bases.values())):
        raise OptionError(f"accepted names {', '.join(unknown)}: must be of {', '.join(sorted(bases.values()))}")
    return {name: builders[name] for name, base in bases.items() if base in names} if names else builders
