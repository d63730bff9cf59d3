"""Pickles a user's code by value, so that a process without the user's modules can load it."""

from __future__ import annotations

import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.errors import ComputeError

# The name of this library; a vendored copy has another one.
LIBRARY = (__package__ or "").rpartition(".")[0]

_REFUSALS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


def dumps(what: str, value: Any, cloudpickle: Any, modules: Sequence[ModuleType] | None = None) -> bytes:
    """Pickle ``value``: code of user modules by value, of installed packages and of this library by reference.

    Args:
        what: The value's description for the error.
        value: The value to pickle.
        cloudpickle: The pickler, ``ray.cloudpickle``.
        modules: The result of :func:`user_modules`, for callers who pickle often; None to search again.

    Raises:
        ComputeError: The value cannot be pickled; the error names ``what``.
    """
    refusal: Exception | None = None
    # Second try, all by reference: a module may hold a lock or the like, yet be importable in the other process.
    for by_value in (user_modules() if modules is None else modules, []):
        try:
            with _by_value(by_value, cloudpickle):
                return bytes(cloudpickle.dumps(value))
        except _REFUSALS as error:
            refusal = error
    raise ComputeError(
        f"{what} ({_name(value)}) cannot be sent to a Ray actor: {type(refusal).__name__}: {refusal}; "
        "leave out the part that cannot be pickled, or set 'compute' to 'in-process'"
    ) from refusal


def user_modules() -> list[ModuleType]:
    """Return the loaded modules that belong neither to Python, nor to an installed package, nor to this library."""
    installed = _installed_folders()
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module.__name__ != name or _holds_library(name):
            continue
        # vars(): some modules import others on attribute access.
        file = vars(module).get("__file__")
        # The unresolved path first: there are thousands of modules, and nearly all are installed.
        if not isinstance(file, str) or file.startswith(installed):
            continue
        if not str(Path(file).absolute()).startswith(installed):
            found.append(module)
    return found


def _holds_library(name: str) -> bool:
    # Parents too: registering a package registers everything below it.
    return f"{name}.".startswith(f"{LIBRARY}.") or LIBRARY.startswith(f"{name}.")


def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    names = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    names += [*site.getsitepackages(), site.getusersitepackages()]
    folders = {folder for name in names for folder in (Path(name).absolute(), Path(name).resolve())}
    return tuple(f"{folder}{os.sep}" for folder in folders)


@contextmanager
def _by_value(modules: Sequence[ModuleType], cloudpickle: Any) -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    ours = [module for module in modules if module.__name__ not in already]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


def _name(value: Any) -> str:
    while hasattr(value, "func"):  # functools.partial
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
