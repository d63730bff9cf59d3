"""Pickling what a user wrote, so that a process can load it that cannot import the user's modules."""

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

# The name of this library, which is another one where it is vendored.
LIBRARY = (__package__ or "").rpartition(".")[0]

_REFUSALS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


def dumps(what: str, value: Any, cloudpickle: Any, modules: Sequence[ModuleType] | None = None) -> bytes:
    """Pickle ``value``: code of user modules by value, of installed packages and of this library by reference.

    Args:
        what: What it is to the user, for the error.
        value: What is pickled.
        cloudpickle: The pickler, ``ray.cloudpickle``.
        modules: What :func:`user_modules` returns, for callers who pickle much; None to look for them.

    Raises:
        ComputeError: It cannot be pickled; names ``what``.
    """
    refusal: Exception | None = None
    # Second try, all by reference: a module may hold what no pickle takes, a lock say, and yet be importable there.
    for by_value in (user_modules() if modules is None else modules, []):
        try:
            with _by_value(by_value, cloudpickle):
                return bytes(cloudpickle.dumps(value))
        except _REFUSALS as error:
            refusal = error
    raise ComputeError(
        f"{what} ({_name(value)}) cannot be sent to a Ray actor: {type(refusal).__name__}: {refusal}; "
        "leave out what cannot be pickled, or set 'compute' to 'in-process'"
    ) from refusal


def user_modules() -> list[ModuleType]:
    """Return the loaded modules that are neither Python's, nor installed, nor part of this library."""
    installed = _installed_folders()
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module.__name__ != name or _holds_library(name):
            continue
        # vars(): some modules import others when asked for an attribute.
        file = vars(module).get("__file__")
        # As it is written first: there are thousands of modules, and nearly all are installed.
        if not isinstance(file, str) or file.startswith(installed):
            continue
        if not str(Path(file).absolute()).startswith(installed):
            found.append(module)
    return found


def _holds_library(name: str) -> bool:
    # Parents too, for to register a package is to register all below it.
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
