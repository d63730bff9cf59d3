"""Builders of modules like those that a user has, by copies of their layers, and the import names of builders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pickle import PickleError
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.swa_utils import AveragedModel

from ..core.errors import OptionError
from ..core.facts import CLASSIFIER, CVAE, MODEL_ERRORS, STATISTICS, SUFFIXES
from ..core.seeds import seeded_torch
from ..method import ModelBuilder
from ..uploads.builders import SizedBuilder

# How an architecture of each kind is called, see :mod:`.core.kinds`.
_NAMES = {
    CLASSIFIER: "{}", CVAE: "cvae-decoder", STATISTICS: "statistics",
    **{kind: "{}" + suffix for kind, suffix in SUFFIXES.items()},
}  # fmt: skip
# What every module has beside its own attributes: tensors, layers, hooks and the mode.
_BARE = {*vars(nn.Module()), "_compiled_call_impl", "_is_torch_compile"}
_WRAPPING = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
NEEDS_MODEL = "needs model=, a callable that returns its nn.Module"
_IDENTITY: Any = object.__eq__
# Pairs that count as alike, by their identities; the values keep them alive, so that no identity is used twice.
_Pairs = dict[tuple[int, int], tuple[Any, Any]]


@dataclass(frozen=True)
class Copies:
    """The architectures of modules.

    Attributes:
        builders: Architecture -> callable that copies its layers, with fresh weights.
        architectures: Client -> the architecture of its module.
        difference: The first two clients whose architectures differ, in what, as a clause; empty if none do.
    """

    builders: dict[str, ModelBuilder]
    architectures: dict[str, str]
    difference: str


def bare_module(module: nn.Module) -> nn.Module:
    """Return a module without what wraps it or its layers; its tensors are shared.

    DataParallel, DistributedDataParallel, averaged models of ``torch.optim.swa_utils`` and compiled modules answer as
    the module inside.
    """
    inner = module
    while isinstance(inner, _WRAPPING) or (type(inner).__name__ == "OptimizedModule" and hasattr(inner, "_orig_mod")):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module  # type: ignore[assignment]
    layers = {name: None if layer is None else bare_module(layer) for name, layer in inner._modules.items()}
    if all(layers[name] is layer for name, layer in inner._modules.items()):
        return inner
    own = copy.copy(inner)
    own.__dict__["_modules"] = layers
    return own


def copies_of(named: Mapping[str, Any], kind: str) -> Copies:
    """Return builders that copy the modules' layers, one per architecture, in the order of clients' names.

    Modules that differ in more than their weights are of different architectures.

    Raises:
        OptionError: A model is no module, it cannot be copied, or there are several where the kind has one name.
    """
    firsts: dict[str, str] = {}
    builders: dict[str, partial[nn.Module]] = {}
    architectures, differences = dict[str, str](), list[str]()
    named = {client: bare_module(one) if isinstance(one, nn.Module) else one for client, one in named.items()}
    for client, module in sorted(named.items()):
        if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
            raise OptionError(f"model {client!r} is {type(module).__name__}: {NEEDS_MODEL}")
        apart = {name: difference(named[first], module) for name, first in firsts.items()}
        own = next((name for name, what in apart.items() if not what), None)
        if own is None:
            differences += [f"models {firsts[n]!r} and {client!r} differ in {what}" for n, what in apart.items()]
            title = type(module).__name__
            own = _NAMES[kind].format(title)
            own = own if own not in builders else _NAMES[kind].format(f"{title}-{len(builders) + 1}")
            if own in builders:
                raise OptionError(f"{differences[0]}: must be of one architecture, else {NEEDS_MODEL}")
            firsts[own], builders[own] = client, partial(_fresh, _copy_to_cpu(client, module))
        architectures[client] = own
    for name, builder in builders.items():
        _freeze_common(builder.args[0], [named[client] for client, own in architectures.items() if own == name])
    return Copies({**builders}, architectures, "".join(differences[:1]))


def lost_buffer(builders: Mapping[str, ModelBuilder]) -> str:
    """Return a buffer that sets two copied architectures apart and that no state_dict has; empty if there is none."""
    templates = [build.args[0] for build in builders.values() if isinstance(build, partial) and build.func is _fresh]
    for number, one in enumerate(templates):
        unstored = {repr(name) for name, _ in one.named_buffers()} - {repr(name) for name in one.state_dict()}
        for other in templates[:number]:
            if (what := difference(other, one)) in unstored:
                return what
    return ""


def difference(one: nn.Module, other: nn.Module) -> str:
    """Return the first place where two modules differ in more than their weights; empty if there is none."""
    layers, others = (dict(module.named_modules()) for module in (one, other))
    tensors, theirs = (dict(chain(module.named_parameters(), module.named_buffers())) for module in (one, other))
    if _class_of(one) != _class_of(other):
        return "their classes"
    if layers.keys() != others.keys() or tensors.keys() != theirs.keys():
        return "their layers"
    weights = {*dict(one.named_parameters()), *one.state_dict()}
    paired: _Pairs = {}
    for name in tensors:
        sizes = [list(each[name].shape) for each in (tensors, theirs)]
        if name in weights and sizes[0] != sizes[1]:
            return f"{name!r}, {sizes[0]} and {sizes[1]}"
        if sizes[0] != sizes[1] or not (name in weights or _alike(tensors[name], theirs[name], paired)):
            return repr(name)
        _pair(tensors[name], theirs[name], paired)
    for name in layers:
        _pair(layers[name], others[name], paired)
    return next(filter(None, (_differing(name, layers[name], others[name], paired) for name in layers)), "")


def _differing(name: str, layer: nn.Module, other: nn.Module, paired: _Pairs) -> str:
    """Return the first attribute in which two layers differ; empty if there is none."""
    if _class_of(layer) != _class_of(other):
        return f"the classes of layer {name!r}"
    if "_orig_mod" in dict(layer.named_children()):  # torch.compile's wrapper has caches alone
        return ""
    mine, theirs = ({key: value for key, value in vars(each).items() if key not in _BARE} for each in (layer, other))
    for key in sorted({*mine, *theirs}):
        if key not in mine or key not in theirs or not _alike(mine[key], theirs[key], paired):
            return repr(f"{name}.{key}" if name else key)
    return ""


def _class_of(module: nn.Module) -> Any:
    """Return a module's class; a parametrised layer has one of its own, made for it from the layer's class."""
    return type(module).__bases__ if is_parametrized(module) else type(module)


def _alike(one: Any, other: Any, paired: _Pairs) -> bool:
    """Say whether two values are equal, or made of equal parts; False where it cannot be found out."""
    if one is other or (id(one), id(other)) in paired:
        return True
    if type(one) is not type(other) or isinstance(one, type):
        return False
    _pair(one, other, paired)  # a value may hold itself
    try:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        parts, others = _parts(one), _parts(other)
        if parts is not None and others is not None:
            return len(parts) == len(others) and all(_alike(*pair, paired) for pair in zip(parts, others, strict=True))
        return bool(one == other)
    except MODEL_ERRORS:
        return False


def _parts(value: Any) -> Sequence[Any] | None:
    """Return what a value is made of; None if it is one piece."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, FunctionType):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, CellType):
        return [value.cell_contents]
    if isinstance(value, ref):
        return [value()]
    # An object without an equality of its own is what it holds; torch's dtypes, which hold nothing, are one piece.
    return [value.__getstate__()] if type(value).__eq__ is _IDENTITY and hasattr(value, "__dict__") else None


def _pair(one: Any, other: Any, paired: _Pairs) -> None:
    paired[id(one), id(other)] = one, other


def _copy_to_cpu(client: str, module: nn.Module) -> nn.Module:
    """Return a copy on the CPU, in the float32 of all uploads."""
    try:
        return copy.deepcopy(module).cpu().float()
    except (*MODEL_ERRORS, copy.Error, PickleError) as error:
        raise OptionError(f"model {client!r} cannot be copied: {error!s:.90}: {NEEDS_MODEL}") from error


def _freeze_common(template: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Freeze the parameters that all modules freeze; a module that is frozen as a whole, for inference, has no say."""
    flags = [{name: value.requires_grad for name, value in module.named_parameters()} for module in modules]
    trainable = [each for each in flags if any(each.values())]
    for name, value in template.named_parameters():
        value.requires_grad_(value.is_floating_point() and (not trainable or any(each[name] for each in trainable)))


def maker_of(builder: ModelBuilder) -> str:
    """Return the import name of a builder, or of the class that makes the modules it copies; empty if it has none."""
    if isinstance(builder, SizedBuilder):  # lazy layers take their sizes from the weights that are loaded
        builder = builder.build
    if not (isinstance(builder, partial) and builder.func is _fresh):
        return _import_name(builder)
    template = builder.args[0]
    try:
        with seeded_torch(0):
            apart = difference(type(template)(), template)
    except MODEL_ERRORS:  # it needs arguments, which only the caller knows
        return ""
    return "" if apart else _import_name(type(template))


def _fresh(template: nn.Module) -> nn.Module:
    """Return a copy of a module whose weights are drawn anew; frozen ones stay."""
    module = copy.deepcopy(template).train()
    for name, layer in module.named_modules():
        own = list(layer.parameters(recurse=False))
        if own and not any(value.requires_grad for value in own):  # its buffers stay too
            continue
        draw = getattr(layer, "reset_parameters", None) or getattr(layer, "_reset_parameters", None)
        if draw is not None:
            draw()
        elif own:
            raise OptionError(
                f"layer {name or 'at the top'!r} ({type(layer).__name__}) has no reset_parameters: needs model=, a "
                "callable that returns a fresh nn.Module"
            )
    with torch.no_grad():
        for value, kept in zip(module.parameters(), template.parameters(), strict=True):
            if not value.requires_grad:  # a layer that is frozen in part has drawn it
                value.copy_(kept)
    return module


def _import_name(builder: Callable[..., Any]) -> str:
    module, name = getattr(builder, "__module__", ""), getattr(builder, "__qualname__", "")
    return f"{module}:{name}" if module not in ("", "__main__") and name and "<" not in name else ""
