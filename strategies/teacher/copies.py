"""Many fresh modules of one architecture: drawing the initial weights of each takes longer than copying one.

A copy is as good as a second call of the builder where all that the module holds is copied with it. What would still
belong to the first module - a function that closes over it, say - is looked for before, and then every module is built.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from ..method import ModelBuilder

# Going through a module runs its own __reduce__ and __getstate__, so that any of these may come of it.
_REFUSALS = (pickle.PicklingError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class FreshModules:
    """Fresh modules by architecture, whose weights are to be overwritten.

    Args:
        builders: Architecture -> a module with fresh weights; as a rule each is called once only.
    """

    def __init__(self, builders: Mapping[str, ModelBuilder]) -> None:
        self._builders = builders
        self._models: dict[str, nn.Module | None] = {}

    def __call__(self, architecture: str) -> nn.Module:
        """Return a module that shares nothing with those before it; the caller's random state does not move.

        Raises:
            KeyError: There is no such architecture.
        """
        if (model := self._models.get(architecture)) is not None:
            return copy.deepcopy(model)
        module = built(self._builders[architecture])
        if architecture not in self._models:
            self._models[architecture] = copy.deepcopy(module) if copies_whole(module) else None
        return module


def built(builder: ModelBuilder) -> nn.Module:
    """Return a module whose weights are to be overwritten; the caller's random state does not move for them."""
    with seeded_torch(0, "member"):
        return builder()


def copies_whole(module: nn.Module) -> bool:
    """Say whether ``copy.deepcopy`` yields a module that works on its own weights alone; if in doubt, no."""
    try:
        _Visitor(io.BytesIO()).dump(module)
    except _REFUSALS:
        return False
    return True


class _Visitor(pickle.Pickler):
    """Goes through all that an object holds, and refuses what a deep copy would share with it or lose."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._storages: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, Tensor):
            self._visit_tensor(value)
        elif isinstance(value, FunctionType):
            held = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            if value.__closure__ or any(isinstance(item, nn.Module | Tensor) for item in held):
                raise pickle.PicklingError(f"{value.__qualname__} may hold the module")
        elif not isinstance(value, type | BuiltinFunctionType | ModuleType):
            return None
        elif isinstance(getattr(value, "__self__", None), nn.Module | Tensor):
            raise pickle.PicklingError("a method of a tensor")
        return 0

    def _visit_tensor(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        # A copied parameter has a storage of its own; a view of the old one would no longer follow it.
        if not tensor.is_leaf or (storage and self._storages.setdefault(storage, id(tensor)) != id(tensor)):
            raise pickle.PicklingError("a tensor that is made of another")
