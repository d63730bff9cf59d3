"""The device of a process, and steps that a GPU replays as one graph.

Launching the kernels of small models takes longer than running them.
"""

from __future__ import annotations

import gc
import inspect
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .errors import ComputeError, OptionError
from .work import Work, count_work, work

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# Plain calls before a step is captured: an optimiser makes its state in the first, a module decides on its layout.
WARM = 2
# The most shapes of one function that are captured.
MOST = 16
# What torch warns of where code waits for a GPU.
_WAITS = "called a synchronizing CUDA operation"
# Graphs whose capture failed. torch's allocator goes on asking them, and no other graph is captured or replayed then.
_failed: list[object] = []
Kind = TypeVar("Kind", bound="torch.optim.Optimizer")
_eager: dict[type, Any] = {}


def resolve_device(name: str, setting: str = "'device'") -> str:
    """Return the torch device of this process for a name; ``"auto"``: a GPU if one is visible.

    Args:
        name: ``"auto"``, or an argument of ``torch.device``.

    Raises:
        OptionError: The name is not that of a torch device.
        ComputeError: The device is a GPU that this process does not see.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"setting {setting} is {name!r}: must be 'auto' or a torch device such as 'cpu'") from error
    there = int(torch.backends.mps.is_available()) if device.type == "mps" else torch.cuda.device_count()
    if device.type in ("cuda", "mps") and (device.index or 0) >= there:
        raise ComputeError(
            f"device {name!r} is missing: this process sees {there} GPUs; set {setting} to 'auto' or 'cpu'"
        )
    return name


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which a graph or another form of it would not call."""
    return any(layer._forward_pre_hooks or layer._forward_hooks for layer in module.modules())


def eager(kind: type[Kind]) -> type[Kind]:
    """Return the class of an optimiser without torch's compiler, which takes a second or two of a process to load.

    torch wraps the methods of its optimisers for the compiler, and the wrappers load it. All else is the same.
    """
    import torch

    if kind not in _eager:
        named = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
        methods = {name: inspect.unwrap(getattr(kind, name)) for name in named}
        methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
        _eager[kind] = type(kind.__name__, (kind,), methods)
    made: type[Kind] = _eager[kind]
    return made


def sgd(weights: Iterable[nn.Parameter], rate: float, momentum: float, decay: float = 0.0) -> torch.optim.SGD:
    """Return SGD; on a GPU in the form of which :class:`Graphed` makes a graph, with the rate in a tensor."""
    import torch

    weights = list(weights)
    if not weights[0].is_cuda:
        return eager(torch.optim.SGD)(weights, rate, momentum, weight_decay=decay)
    held = torch.tensor(rate, device=weights[0].device)
    return eager(torch.optim.SGD)(weights, held, momentum, weight_decay=decay, fused=True)


def adam(weights: Iterable[nn.Parameter], rate: float, decay: float = 0.0) -> torch.optim.Adam:
    """Return Adam, in the form of :func:`sgd`."""
    import torch

    weights = list(weights)
    if not weights[0].is_cuda:
        return eager(torch.optim.Adam)(weights, rate, weight_decay=decay)
    held = torch.tensor(rate, device=weights[0].device)
    return eager(torch.optim.Adam)(weights, held, weight_decay=decay, capturable=True)


def make_optimizer(
    name: str,
    weights: Iterable[nn.Parameter],
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """Return :func:`adam` for ``"adam"``, else :func:`sgd`, of some weights; Adam takes no momentum."""
    if name == "adam":
        return adam(weights, lr, weight_decay)
    return sgd(weights, lr, momentum, weight_decay)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all groups of :func:`sgd` or :func:`adam`."""
    import torch

    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Graphed:
    """A function of tensors; on a GPU its kernels become one graph, which is replayed for tensors of the same shapes.

    What the function does in Python, it does while the kernels are captured, and never again. It must therefore read
    and write the same tensors in place each time, such as weights and an optimiser's state. A function is called as it
    is for ever if it waits for a value, draws random numbers on the host, or replaces a tensor that it reads. Its last
    plain call tells. So is every function on another device.

    Args:
        function: Takes tensors and returns one; gradients pass neither in nor out.
        capture: False calls the function as it is on a GPU, too.
        reads: Returns tensors that the function reads and that other code may replace, such as a student's weights.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        device: torch.device | str,
        *,
        capture: bool = True,
        reads: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        import torch

        self._function, self._reads = function, reads
        self._captures = capture and torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._captures else None  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of the memory of all graphs, of which one runs at a time
        self._calls: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._known: list[int] = []  # see forget_moved()

    def forget_moved(self) -> None:
        """Forget the graphs if the tensors that the function reads have moved in memory since the last such call."""
        places = self._places() if self._captures else []
        if places != self._known:
            self._known = places
            self._graphs.clear()
            self._calls.clear()

    def _places(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._reads()]

    def __call__(self, *arguments: Tensor) -> Tensor:
        """Return the function's value, in memory of its own."""
        if not self._captures or _failed:
            return self._function(*arguments)
        kind = tuple((tensor.shape, tensor.dtype) for tensor in arguments)
        if kind in self._graphs:
            return self._graphs[kind].replayed(arguments)
        self._calls[kind] = self._calls.get(kind, 0) + 1
        if self._calls[kind] < WARM or len(self._graphs) == MOST:
            return self._plain(arguments)
        if self._calls[kind] == WARM:
            before = _host_draws(), self._places()
            with _noting_waits() as waits:
                value = self._plain(arguments)
            self._captures = not waits and before == (_host_draws(), self._places())
            return value
        self._captures = self._capture(kind, arguments)
        return self(*arguments)

    def _plain(self, arguments: tuple[Tensor, ...]) -> Tensor:
        """Call the function on the stream of the captures, where autograd may keep what the capture reads."""
        import torch

        assert self._stream is not None  # noqa: S101  there is one wherever graphs are captured
        outer = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            value = self._function(*arguments)
        outer.wait_stream(self._stream)
        return value.clone()  # the stream of the captures may use the memory of ``value`` again

    def _capture(self, kind: Any, arguments: tuple[Tensor, ...]) -> bool:
        """Capture the function for such arguments; return whether that went well. Nothing runs meanwhile."""
        import torch

        assert self._stream is not None  # noqa: S101  as above
        inputs = tuple(tensor.detach().clone() for tensor in arguments)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, counts = torch.cuda.CUDAGraph(), Work()
        # Other threads may use the GPU meanwhile.
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        outer, device = torch.cuda.current_stream(self._stream.device), torch.cuda.current_device()
        try:
            with count_work(counts), _undisturbed(), capturing:
                output = self._function(*inputs)
        except RuntimeError:  # the function does what a graph cannot
            _failed.append(graph)
            _recover(outer, device)
            return False
        self._graphs[kind] = _Graph(
            graph, inputs, output, {name: count for name, count in counts.as_dict().items() if count}
        )
        return True


@dataclass(frozen=True)
class _Graph:
    """A captured call: its graph, the tensors that it reads and writes, and the work that each replay does."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor
    counts: dict[str, int]

    def replayed(self, arguments: tuple[Tensor, ...]) -> Tensor:
        import torch

        with torch.no_grad():
            for tensor, given in zip(self.inputs, arguments, strict=True):
                tensor.copy_(given)
        self.graph.replay()
        work().include(self.counts)
        return self.output.detach().clone()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep other graphs out of a capture.

    The garbage collector could end one, which no capture survives. And cuBLAS keeps a workspace for each stream, of
    which torch has 32 in turn: the graph would read that of another one, which is freed with it. Without a workspace
    the capture takes one from the memory of its own graphs.
    """
    import torch

    collects = gc.isenabled()
    gc.disable()
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collects:
            gc.enable()


def _recover(stream: torch.cuda.Stream, device: int) -> None:
    """Undo what torch leaves of a capture that failed: its stream, its device, and generators that wait for its end."""
    import torch

    torch.cuda.set_stream(stream)
    torch.cuda.set_device(device)
    for generator in torch.cuda.default_generators:
        generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """Yield a list that holds, after the block, what torch said where the block waited for the GPU."""
    import torch

    before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in said:
        if _WAITS in str(one.message):
            waits.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _host_draws() -> tuple[Any, ...]:
    """Return the states of the random numbers that Python code draws on the host without a generator of its own."""
    import torch

    return random.getstate(), repr(np.random.get_state(legacy=False)), torch.get_rng_state().numpy().tobytes()
