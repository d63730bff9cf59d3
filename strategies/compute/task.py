"""A method and its job in the form that travels to an actor.

A user's code is pickled by value, so that a process without the user's modules can load it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core.errors import ComputeError
from ..method import METHODS, Job, Method, Upload

if TYPE_CHECKING:
    import torch


# The name of this library; a vendored copy has another one.
LIBRARY = (__package__ or "").rpartition(".")[0]

_REFUSALS = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


def dumps(what: str, value: Any, cloudpickle: Any, modules: Sequence[ModuleType] | None = None) -> bytes:
    """Pickle ``value``: code of user modules by value, of installed packages and of this library by reference.

    Args:
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


# Trees of tensors as trees of numpy arrays, for the way between the driver and an actor.
#
# Ray moves numpy arrays ten times faster than torch tensors, and reads them without a copy.


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as an array of the same shape and bits.

    Attributes:
        dtype: The name of the torch dtype; numpy does not know all of them (bfloat16 travels as int16).
        array: Its values, or its bits as integers of the same width.
    """

    dtype: str
    array: npt.NDArray[Any]


def pack(value: Any, *, copy: bool = True) -> Any:
    """Copy a tree, every tensor replaced by a :class:`PackedTensor`.

    Args:
        value: Dicts, lists, tuples and dataclasses of tensors on any device, arrays, and other values, which pass
            unchanged.
        copy: Copy the memory too, so that the caller may keep changing its tensors. False for a value that goes to Ray
            at once, which copies it itself.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, copy)
    return _walk(value, partial(pack, copy=copy))


def unpack(value: Any) -> Any:
    """Return the tree given to :func:`pack`, bit for bit; its tensors are on the CPU, contiguous and writable."""
    if isinstance(value, PackedTensor):
        return _unpack_tensor(value)
    return _walk(value, unpack)


def _walk(value: Any, visit: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: visit(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [visit(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.ndarray):
        return value.copy()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{f.name: visit(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return value


def _pack_tensor(tensor: Any, copy: bool) -> PackedTensor:
    import torch

    plain = tensor.detach().to("cpu", copy=copy, memory_format=torch.contiguous_format).contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return PackedTensor(name, plain.numpy())
    except TypeError:  # numpy has no such dtype
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return PackedTensor(name, plain.view(bits).numpy())


def _unpack_tensor(packed: PackedTensor) -> Any:
    import torch

    # Arrays out of Ray's object store are read-only views: copy.
    tensor = torch.from_numpy(packed.array.copy())
    dtype = getattr(torch, packed.dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


# The fields of a job that each run sends anew.
_OF_THE_RUN = ("start", "memory", "teacher")


@dataclass(frozen=True)
class ActorTask:
    """A method and its job in the form that travels; uploads follow one by one.

    Attributes:
        job: The job without uploads and without the fields below.
        parts: The parts that seldom change from run to run, by name. Pickles: the ``method`` (None if it is in METHODS,
            where its name is enough), the ``builders`` by architecture, the ``config`` and the ``observer``. Tensors:
            the job's images ``proxy`` and ``labelled``. A missing part equals that of the run before.
        state: The job's ``start``, ``memory`` and ``teacher``.
    """

    name: str
    job: Job
    parts: Mapping[str, Any]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, method: Method, job: Job, cloudpickle: Any) -> ActorTask:
        """Pickle the user's code and values.

        Raises:
            ComputeError: A value cannot be pickled; the error names it.
        """
        modules = user_modules()

        def pickled(what: str, value: Any) -> bytes:
            return dumps(what, value, cloudpickle, modules)

        known = method.name in METHODS and METHODS[method.name] is method
        parts = {
            "method": None if known else pickled(f"method {method.name!r}", method),
            "builders": {
                name: pickled(f"the builder of architecture {name!r}", builder)
                for name, builder in job.builders.items()
            },
            "config": pickled("the method's config", job.config),
            "observer": pickled("the observer", job.observer),
            "proxy": job.proxy,
            "labelled": job.labelled,
        }
        nothing = dict.fromkeys(("config", "observer", "proxy", "labelled", *_OF_THE_RUN))
        bare: dict[str, Any] = {"uploads": (), "builders": {}, **nothing}
        # The actor sees only the GPU that Ray gave it, whatever its number.
        device = "cuda" if job.device.startswith("cuda") else job.device
        state = {name: getattr(job, name) for name in _OF_THE_RUN}
        return cls(method.name, replace(job, device=device, **bare), parts, state)

    def packed(self, sent: SentParts) -> ActorTask:
        """Return the task for an actor, without the parts that the actor already has; the tensors are shared."""
        return replace(self, parts=sent.lacks(self.parts), state=pack(self.state, copy=False))

    def open(self, uploads: Sequence[Upload]) -> tuple[Method, Job]:
        """Return the complete method and job.

        Args:
            uploads: In the order of client names.
        """
        parts = self.parts
        method = METHODS[self.name] if parts["method"] is None else loads(parts["method"])
        job = replace(
            self.job,
            uploads=tuple(uploads),
            builders={name: loads(builder) for name, builder in parts["builders"].items()},
            config=loads(parts["config"]),
            observer=loads(parts["observer"]),
            proxy=unpack(parts["proxy"]),
            labelled=unpack(parts["labelled"]),
            **unpack(self.state),
        )
        return method, job


class SentParts:
    """The parts that an actor already has."""

    def __init__(self) -> None:
        self._marks: dict[str, Any] = {}

    def lacks(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the packed parts that differ from the actor's."""
        marks = self._marks
        return {
            name: pack(part, copy=False)
            for name, part in parts.items()
            if name not in marks or marks[name] != _mark(part)
        }

    def note(self, parts: Mapping[str, Any]) -> None:
        """Record that the actor now has these parts."""
        self._marks = {name: _mark(part) for name, part in parts.items()}


class _TensorMark:
    """A tensor at a moment: equal to itself until torch writes into it.

    A tensor of inference mode does not count the writes, and so equals none.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # The tensor itself: once it is freed, another one could take its address.
        self._tensor, self._version = tensor, math.nan if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorMark) and self._tensor is other._tensor and self._version == other._version

    __hash__ = None  # type: ignore[assignment]  # it changes with its tensor


def _mark(part: Any) -> Any:
    import torch

    if isinstance(part, torch.Tensor):
        return _TensorMark(part)
    return tuple(map(_mark, part)) if isinstance(part, tuple) else part


def loads(pickled: bytes) -> Any:
    """Return the value of a pickle that :func:`dumps` made."""
    # The pickle comes from our own driver, over Ray's own channel.
    return pickle.loads(pickled)  # noqa: S301
