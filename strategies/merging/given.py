"""What a user gives to a merge: models in any form, and values per model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core import refusals
from ..core.errors import OptionError
from ..core.facts import CLIENT_NAME

if TYPE_CHECKING:
    from typing import TypeVar

    from ..core.facts import State

    Value = TypeVar("Value")
    PerModel = Sequence[Value] | Mapping[str, Value]
    Trained = nn.Module | Mapping[str, torch.Tensor] | str | Path


def named_models(models: object) -> dict[str, Trained]:
    """Return client -> its model, whatever holds them.

    Raises:
        OptionError: There is no model, one of another type, or a name that no client may have.
    """
    # A module may yield its layers, and a text its letters.
    alone = isinstance(models, str | nn.Module) and not isinstance(models, nn.ModuleList)
    if alone or not isinstance(models, Iterable):
        raise OptionError(f"models is {_kind(models)}: must be a list of models, or a mapping of client name -> model")
    named = dict(models) if isinstance(models, Mapping) else {f"client-{k:03}": one for k, one in enumerate(models)}
    if not named:
        raise OptionError("models is empty: must hold at least one model")
    for client, one in named.items():
        if not (isinstance(client, str) and CLIENT_NAME.fullmatch(client)):
            raise OptionError(f"client name is {client!r}: must be up to 64 letters, digits, '.', '_' and '-'")
        if not isinstance(one, nn.Module | Mapping | str | Path):
            raise OptionError(f"model {client!r} is {_kind(one)}: must be a module, a state dict or a checkpoint file")
    return named


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def by_name(values: PerModel[Value] | None, named: Mapping[str, Trained], what: str) -> dict[str, Value]:
    """Return client -> its value; empty if none are given.

    Args:
        values: In the order of the models, or by client name; numbers of numpy and torch become Python's.
        named: Client -> its model.
        what: The argument's name in messages.

    Raises:
        OptionError: There are more or fewer than models.
    """
    if values is None:
        return {}
    if isinstance(values, Mapping):
        if odd := sorted(set(values) ^ set(named), key=str):
            raise OptionError(f"{what} and models differ in {odd[0]!r}: must have the same names")
        return {client: _plain(value) for client, value in values.items()}
    if len(values) != len(named):
        raise OptionError(f"{what} has {len(values)} entries: must have one per model, {len(named)}")
    return dict(zip(named, map(_plain, values), strict=True))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def kept_weights(client: str, trained: Trained) -> State | str | Path:
    """Return a file's name, or a copy of the tensors, which their owner may train further.

    Raises:
        UploadError: An entry of a state dict is no tensor, or has no values.
    """
    if isinstance(trained, str | Path):
        return trained
    state = trained.state_dict() if isinstance(trained, nn.Module) else trained
    for key, value in state.items():
        if not (isinstance(key, str) and isinstance(value, torch.Tensor)):
            raise refusals.no_tensor(f"{key!r} of its state dict", _kind(value)).of(f"model {client!r}")
        if value.is_meta or is_lazy(value):
            raise refusals.no_tensor(f"tensor {key!r}", "without values yet").of(f"model {client!r}")
    return {key: value.detach().to("cpu", copy=True) for key, value in state.items()}
