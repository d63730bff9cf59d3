"""The actor's and the driver's end of the wire, without Ray."""

import functools
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compute_fakes import Heard
from ray import cloudpickle

import strategies.method
from strategies.compute.task import ActorTask, dumps, pack, unpack
from strategies.compute.worker import Event, Outbox, OutboxProgress, Relay, Worker
from strategies.core.errors import ComputeError, UploadError
from strategies.core.facts import UploadFacts
from strategies.core.options import config_class, option
from strategies.method import EnsembleSpec, Job, Method, Normalization, Outcome, Progress, Snapshot


def fit_sum(job: Job, progress: Progress) -> Outcome:
    total = torch.zeros(2)
    for step, upload in enumerate(job.uploads, 1):
        total = total + upload.read()["w"]
        progress.report(step, len(job.uploads))
        progress.record({"epoch": step, "total": float(total.sum())})
        progress.checkpoint(lambda: Snapshot(step, {"total": total}))  # noqa: B023  called at once
    return Outcome({"total": total + job.start["w"]})  # type: ignore[index]


def fit_broken(job: Job, progress: Progress) -> Outcome:
    raise UploadError("it is odd", job.uploads[0].client)


def job(fit: Any = fit_sum, **changes: Any) -> tuple[Method, Job]:
    plain = Job((), {"m": torch.nn.Flatten}, "m", 2, (1, 2, 2), Normalization((0.5,), (0.5,)), {"lr": 0.1})
    return Method("toy", "Toy", "", dict, fit), Job(**{**vars(plain), "start": {"w": torch.ones(2)}, **changes})


def run(worker: Worker, task: ActorTask) -> list[Event]:
    worker.start(task, None, 0.0)
    events: list[Event] = []
    while not events or events[-1][0] not in ("done", "failed"):
        events += worker.poll(5)
    return events


def worker_with(values: list[float]) -> Worker:
    worker = Worker()
    for number, value in enumerate(values):
        worker.add_upload(UploadFacts(f"c{number}", "m", 3), lambda value=value: pack({"w": torch.full((2,), value)}))  # type: ignore[misc]
    return worker


def test_worker_with_a_task_says_everything_in_order_and_ends() -> None:
    events = run(worker_with([1.0, 2.0]), ActorTask.of(*job(), cloudpickle))
    assert [kind for kind, _ in events if kind != "report"] == ["record", "checkpoint", "record", "checkpoint", "done"]
    assert torch.equal(unpack(events[-1][1][0]).student["total"], torch.full((2,), 4.0))


def test_worker_with_a_failing_method_ends_with_its_class_and_text() -> None:
    (kind, (failure,)) = run(worker_with([1.0]), ActorTask.of(*job(fit_broken), cloudpickle))[-1]
    assert kind == "failed"
    error = failure.error("toy")
    assert type(error) is UploadError
    assert (str(error), error.reason, error.client) == ("c0: it is odd", "it is odd", "c0")
    assert "fit_broken" in failure.trace


def test_worker_with_a_pickle_it_cannot_load_ends_with_a_failure() -> None:
    task = ActorTask.of(*job(), cloudpickle)
    broken = replace(task, parts={**task.parts, "config": b"cabsent_module\nthing\n."})
    (kind, (failure,)) = run(worker_with([1.0]), broken)[-1]
    assert kind == "failed"
    with pytest.raises(ComputeError, match=r"'toy' failed in the Ray actor: ModuleNotFoundError: .*absent_module"):
        raise failure.error("toy")


def test_task_open_returns_the_servers_images_labels_and_teacher() -> None:
    images, labels = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([1, 0])
    teacher = EnsembleSpec(("a", "b"), "weighted", {"weights": torch.tensor([0.25, 0.75])}, precision="int8")
    packed = ActorTask.of(*job(proxy=images, labelled=(images, labels), teacher=teacher), cloudpickle)
    assert (packed.job.proxy, packed.job.labelled, packed.job.teacher) == (None, None, None)
    _, again = packed.open([])
    assert torch.equal(again.labelled[0], images)
    assert torch.equal(again.labelled[1], labels)
    assert torch.equal(again.teacher.weights["weights"], torch.tensor([0.25, 0.75]))
    assert replace(again.teacher, weights={}) == replace(teacher, weights={})


def test_outbox_progress_with_later_changes_sends_the_state_of_the_moment() -> None:
    outbox, weights, row = Outbox(), torch.zeros(2), {"epoch": 1}
    progress = OutboxProgress(outbox, None, interval_s=0.0)
    progress.checkpoint(lambda: Snapshot(1, {"w": weights}))
    progress.record(row)
    weights.add_(1)
    row["epoch"] = 2
    (_, (packed,)), (_, (sent,)) = outbox.take(1)
    assert not unpack(packed).state["w"].any()
    assert sent == {"epoch": 1}


def test_relay_saves_each_checkpoint_and_ticks() -> None:
    heard = Heard()
    relay = Relay(heard)
    relay.deliver("checkpoint", (pack(Snapshot(1, None, {"pool": torch.ones(1)})),))
    assert [snapshot.step for snapshot in heard.snapshots] == [1]
    assert list(relay.ticking("ab")) == ["a", "b"]
    assert (len(heard.ticks), relay.interval_s) == (2, heard.interval_s)


# Trees of tensors as trees of arrays.


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_unpack_of_pack_returns_the_same_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.5], [3.0, 0.1, 7.0]]).to(dtype)
    again = unpack(pack(tensor))
    assert again.dtype == dtype
    assert again.shape == (2, 3)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


# User code that travels by value.


loads = pickle.loads
SCALE = 3.0


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@config_class("mine")
class OwnConfig:
    rate: float = option(0.5, "a rate", above=0.0)


LOAD = """
import pickle, sys, torch
build, config = map(pickle.loads, pickle.load(sys.stdin.buffer))
print(float(build()(torch.ones(()))), config.rate)
type(config)(0.0)
"""


def test_dumps_with_a_users_classes_loads_and_checks_options_where_their_module_is_absent(tmp_path: Path) -> None:
    given = {"the builder": functools.partial(Scaled), "the method's config": OwnConfig(2.0)}
    pickled = pickle.dumps([dumps(what, value, cloudpickle) for what, value in given.items()])

    done = subprocess.run([sys.executable, "-c", LOAD], input=pickled, capture_output=True, cwd=tmp_path, timeout=60)

    assert done.stdout == b"3.0 2.0\n", done.stderr.decode()
    assert "OptionError: setting 'mine.rate' is 0.0: must be" in done.stderr.decode()


def test_dumps_with_library_and_installed_code_goes_by_reference() -> None:
    assert loads(dumps("x", strategies.method.Silent, cloudpickle)) is strategies.method.Silent
    assert loads(dumps("x", torch.nn.Linear, cloudpickle)) is torch.nn.Linear


def test_dumps_with_a_lock_in_a_closure_names_the_value_and_its_owner() -> None:
    lock = threading.Lock()

    def builder() -> Any:
        return lock

    with pytest.raises(ComputeError) as caught:
        dumps("the builder of architecture 'cnn'", functools.partial(builder), cloudpickle)
    text = str(caught.value)
    assert text.startswith("the builder of architecture 'cnn' (test_compute_worker.")
    assert "builder) cannot be sent to a Ray actor: TypeError" in text
    assert "lock" in text
