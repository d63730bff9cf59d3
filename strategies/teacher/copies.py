"""Fresh modules of one architecture, copied from the first: drawing initial weights takes longer than copying.

A copy replaces a second call of the builder only if ``deepcopy`` copies everything that the module holds. If the copy
would share a part, such as a function that closes over the module, the builder is called for every module.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..core.seeds import build_module
from ..method import ModelBuilder

# Pickling a module runs its own __reduce__ and __getstate__, which may raise any of these.
_REFUSALS = (pickle.PicklingError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class FreshModules:
    """Fresh modules by architecture, for callers that overwrite their weights."""

    def __init__(self, builders: Mapping[str, ModelBuilder]) -> None:
        self._builders = builders
        self._models: dict[str, nn.Module | None] = {}

    def __call__(self, architecture: str) -> nn.Module:
        """Return a module that shares nothing with earlier ones; the caller's random state does not change.

        Raises:
            KeyError: There is no such architecture.
        """
        if (model := self._models.get(architecture)) is not None:
            return copy.deepcopy(model)
        module = build_module(self._builders[architecture])
        if architecture not in self._models:
            self._models[architecture] = copy.deepcopy(module) if can_deepcopy(module) else None
        return module

    def copies(self, architecture: str) -> bool:
        """Return whether all its modules are copies of the first one, and so equal in all but what is loaded later."""
        model = self._models.get(architecture)
        return model is not None and all(
            type(part).set_extra_state is nn.Module.set_extra_state for part in model.modules()
        )


def can_deepcopy(module: nn.Module) -> bool:
    """Return whether ``copy.deepcopy`` yields an independent module; false if in doubt."""
    try:
        _Visitor(io.BytesIO()).dump(module)
    except _REFUSALS:
        return False
    return True


class _Visitor(pickle.Pickler):
    """Visits everything that an object holds; raises on anything that a deep copy would share or lose."""

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
        # A copied parameter has its own storage; a view of the old storage would no longer follow it.
        if not tensor.is_leaf or (storage and self._storages.setdefault(storage, id(tensor)) != id(tensor)):
            raise pickle.PicklingError("a tensor that is computed from another")
