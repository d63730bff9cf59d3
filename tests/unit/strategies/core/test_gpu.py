"""Graphs of a GPU's kernels, in part with a torch whose graphs are only noted."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strategies.core.errors import ComputeError
from strategies.core.gpu import WARM, Graphed, adam, eager, resolve_device, set_rate, sgd
from strategies.core.work import Work, count_work, work
from strategies.distillation.distill import Distillation

ONE = torch.ones(2)


class NotedGraph:
    """A graph that runs nothing when it is replayed."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


class NoStream:
    device = "cuda"

    def wait_stream(self, _: object) -> None:
        """Wait for nothing."""


@dataclass
class Captures:
    """The captured graphs, the calls of torch that follow, and whether the next capture fails."""

    graphs: list[NotedGraph] = field(default_factory=list)
    fails: bool = False
    streams: list[object] = field(default_factory=list)
    modes: list[object] = field(default_factory=list)
    devices: list[object] = field(default_factory=list)
    cleared: int = 0

    def clear(self) -> None:
        self.cleared += 1

    @contextmanager
    def capture(self, graph: NotedGraph, **_: Any) -> Iterator[None]:
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs.append(graph)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Replace what captures graphs: functions run, and graphs are noted."""
    found = Captures()

    @contextmanager
    def same(_: object) -> Iterator[None]:
        yield

    fakes = {
        "Stream": lambda _: NoStream(), "current_stream": lambda _: NoStream(), "stream": same,
        "CUDAGraph": NotedGraph, "graph": found.capture, "graph_pool_handle": object,
        "get_sync_debug_mode": lambda: 0, "set_sync_debug_mode": found.modes.append,
        "set_stream": found.streams.append, "current_device": lambda: 3, "set_device": found.devices.append,
    }  # fmt: skip
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", found.clear, raising=False)
    monkeypatch.setattr("strategies.core.gpu._failed", [])
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return found


def noting(seen: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def doubled(x: Tensor) -> Tensor:
        seen.append(x)
        return 2 * x

    return doubled


def repeat(step: Graphed, x: Tensor = ONE) -> None:
    for _ in range(WARM + 2):
        step(x)


def test_on_a_cpu_the_function_is_called_each_time() -> None:
    seen: list[Tensor] = []
    step = Graphed(noting(seen), "cpu")
    assert [step(x) is not x for x in (ONE, ONE, ONE, ONE)] == [True] * 4
    assert all(x is ONE for x in seen)
    assert len(seen) == 4


def test_calls_of_one_shape_are_replayed_with_the_values_of_each(captures: Captures) -> None:
    seen: list[Tensor] = []
    step = Graphed(noting(seen), "cuda")
    for call in range(WARM + 3):
        value = step(ONE * call)
    assert len(seen) == WARM + 1  # the last one was the capture
    (graph,) = captures.graphs
    assert graph.replays == 3
    assert seen[-1].tolist() == [WARM + 2] * 2  # the graph reads the last call's argument
    again = step(ONE)
    assert again.data_ptr() != value.data_ptr()  # a value stays what it was
    step(torch.ones(3))
    assert len(seen) == WARM + 2  # another shape starts again


@pytest.mark.parametrize("capture", [True, False])
def test_what_cannot_or_must_not_be_captured_is_called_each_time(captures: Captures, capture: bool) -> None:
    captures.fails = True
    seen: list[Tensor] = []
    step = Graphed(noting(seen), "cuda", capture=capture)
    values = [step(ONE * call).tolist() for call in range(WARM + 4)]
    assert values == [[2.0 * call] * 2 for call in range(WARM + 4)]
    assert len(seen) == WARM + 4 + capture  # one more for the attempt
    assert not captures.graphs
    assert len(captures.streams) == capture  # the stream is the caller's again
    assert captures.devices == [3] * capture


def test_function_that_waits_for_the_gpu_is_never_captured_and_other_warnings_are_passed_on(captures: Captures) -> None:
    said: list[str] = []

    def warning(x: Tensor) -> Tensor:
        for text in said:
            warnings.warn(text, UserWarning, stacklevel=1)
        return x + 0

    waiting, loud = Graphed(warning, "cuda"), Graphed(warning, "cuda")
    said[:] = ["called a synchronizing CUDA operation (Triggered internally)"]
    with pytest.warns(UserWarning, match="synchronizing"):  # of the calls that are not watched
        repeat(waiting)
    assert not captures.graphs
    assert captures.modes == ["warn", 0]
    said[:] = ["something else"]
    with pytest.warns(UserWarning, match="something else"):
        repeat(loud)
    assert len(captures.graphs) == 1


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(1)])
def test_function_that_draws_on_the_host_is_never_captured(captures: Captures, draw: Callable[[], object]) -> None:
    def drawing(x: Tensor) -> Tensor:
        draw()
        return x + 0

    repeat(Graphed(drawing, "cuda"))
    assert not captures.graphs


def test_after_a_capture_that_failed_no_graph_is_captured_or_replayed(captures: Captures) -> None:
    seen: list[Tensor] = []
    good = Graphed(noting(seen), "cuda")
    repeat(good)
    captures.fails = True
    repeat(Graphed(lambda x: x + 0, "cuda"))
    captures.fails = False
    before = len(seen)
    repeat(good)
    repeat(Graphed(noting(seen), "cuda"))
    assert len(seen) == before + 2 * (WARM + 2)


@pytest.mark.parametrize("fails", [True, False])
def test_capture_meets_no_garbage_collector_and_no_workspace_of_another_graph(captures: Captures, fails: bool) -> None:
    captures.fails = fails
    seen: list[tuple[bool, int]] = []

    def noted(x: Tensor) -> Tensor:
        seen.append((gc.isenabled(), captures.cleared))
        return x + 0

    repeat(Graphed(noted, "cuda"))
    assert seen[: WARM + 1] == [(True, 0)] * WARM + [(False, 1)]
    assert captures.cleared == 2
    assert gc.isenabled()


def test_each_replay_counts_the_work_of_the_function_and_the_capture_none(captures: Captures) -> None:
    def working(x: Tensor) -> Tensor:
        work().teacher_forward += 5
        return x + 0

    step = Graphed(working, "cuda")
    with count_work(Work()) as counts:
        for _ in range(WARM + 4):
            step(ONE)
    assert captures.graphs
    assert counts.teacher_forward == 5 * (WARM + 4)


@pytest.mark.parametrize("make", [sgd, adam])
def test_rate_of_an_optimizer_is_set_as_a_number_or_in_its_tensor(make: Callable[..., torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = make([weight], 0.5, 0.0)
    set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = 1  # a user may write an int
    set_rate(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    held = optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == 0.25


def test_resolve_device_with_an_absent_gpu_says_how_many_there_are() -> None:
    with pytest.raises(ComputeError, match=rf"'cuda:99' .* sees {torch.cuda.device_count()} GPUs"):
        resolve_device("cuda:99")
    if not torch.backends.mps.is_available():
        with pytest.raises(ComputeError, match="'mps' is missing"):
            resolve_device("mps")
    assert resolve_device("cpu") == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [sgd, adam])
def test_step_of_a_student_is_captured_on_a_gpu(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """That its results are those without a graph is asked of every method in test_methods.py."""
    monkeypatch.setattr("strategies.core.gpu._failed", [])
    model = nn.Linear(4, 3).cuda()
    one = Distillation(model, make(model.parameters(), 0.05, 0.9), clip=1.0)
    one.learn([(torch.randn(8, 4).cuda(), torch.randn(8, 3).cuda()) for _ in range(9)])
    assert one._step._graphs


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {"fused": True, "betas": (0.5, 0.9)}),
        (torch.optim.AdamW, {}),
    ],
)
def test_eager_optimisers_step_as_torchs_and_tell_their_hooks(kind: Any, options: dict[str, Any]) -> None:
    steps = list[str]()
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(type(optimizer).__name__))

    def stepped(made: Any) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))]
        optimizer, twin = made(weights, 0.1, **options), made(weights, 0.1, **options)
        for number in range(4):
            optimizer.zero_grad()
            sum((weight.sin() * weight).sum() for weight in weights).backward()  # type: ignore[union-attr]
            optimizer.step()
            if number == 1:
                twin.load_state_dict(optimizer.state_dict())
                optimizer = twin
        return [weight.detach() for weight in weights]

    try:
        theirs = stepped(kind)
        assert all(torch.equal(ours, other) for ours, other in zip(stepped(eager(kind)), theirs, strict=True))
    finally:
        hook.remove()
    assert steps == [kind.__name__] * 8
    assert issubclass(eager(kind), kind)


@pytest.mark.slow
def test_a_training_does_not_load_torchs_compiler() -> None:
    code = (
        "import sys, torch; from strategies.core.gpu import adam, sgd\n"
        "for kind, options in ((sgd, (0.1, 0.9)), (adam, (0.1,))):\n"
        "    weights = list(torch.nn.Linear(2, 2).parameters())\n"
        "    made = kind(weights, *options)\n"
        "    sum(weight.sum() for weight in weights).backward()\n"
        "    torch.nn.utils.clip_grad_norm_(weights, 1.0)\n"
        "    torch.optim.lr_scheduler.CosineAnnealingLR(made, 3)\n"
        "    made.step(); made.zero_grad(); made.load_state_dict(made.state_dict())\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
