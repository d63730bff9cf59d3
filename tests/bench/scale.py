"""The server with 10, 100 and 1,000 clients: what collecting, the server stage and the scores take, a process per row.

Run as a program, ``python scale.py METHOD CLIENTS SHARDS``, it is the child that goes through one of these runs and
prints its figures as one JSON object.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from local_shards import local_shards
from measure import row, say
from resources import peak_mib
from torch import Tensor

from fl_app.data import ImageData
from fl_app.models import build
from server_app.report.evaluation import evaluate
from server_app.settings.held_out import HeldOut
from strategies.client import upload_facts
from strategies.co_boosting import CoBoostingConfig
from strategies.compute import choose
from strategies.core.facts import UploadFacts
from strategies.flower.collect import Collector
from strategies.flower.messages import Request
from strategies.method import METHODS, Job, Normalization, Silent, Upload
from strategies.run.run_folder import RoundFolder, RunFolder
from strategies.run.stage import keep_outcome, run_stage
from strategies.teacher.sharded import ShardedMembers
from strategies.uploads.checks import Signatures

MIB = 2**20
SHAPE, CLASSES, BATCH, HELD_OUT = (1, 32, 32), 10, 128, 1000
COUNTS = (10, 100, 1000)
BUILDERS = {"lenet5": partial(build, "lenet5", num_classes=CLASSES, input_shape=SHAPE)}
# Two generator steps and two of the student per epoch, on one batch each.
CONFIG = CoBoostingConfig(
    epochs=2, generator_steps=2, synthesis_batch_size=BATCH, batch_size=BATCH, steps_per_epoch=2, pool_cap=2 * BATCH
)


def weights(number: int) -> dict[str, Tensor]:
    """Return untrained weights of a client."""
    rng = torch.Generator().manual_seed(number)
    state = BUILDERS["lenet5"]().state_dict()
    return {name: torch.randn(value.shape, generator=rng) * value.std() for name, value in state.items()}


class Nodes:
    """A grid in memory; an answer is made when it is fetched, so that no two are in memory at once.

    Args:
        count: How many nodes.
    """

    pull_interval = 0.0

    def __init__(self, count: int) -> None:
        self._count = count
        self._asked: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(range(1, self._count + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take questions."""
        ids = []
        for message in messages:
            name = str(message.metadata.dst_node_id)
            message.metadata.__dict__["_message_id"] = name
            self._asked[name] = message
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        """Return the answers to some questions."""
        return (self._answer(self._asked.pop(name)) for name in list(message_ids) if name in self._asked)

    def _answer(self, message: Message) -> Message:
        number = message.metadata.dst_node_id
        facts = upload_facts(client=f"client-{number:06d}", architecture="lenet5", label_counts=[10] * CLASSES)
        content = {"arrays": ArrayRecord(weights(number)), "metrics": MetricRecord({"num-examples": 100})}
        return Message(RecordDict({**content, "upload": facts}), reply_to=message)


def collected(folder: RoundFolder, count: int) -> tuple[Collector, float]:
    """Collect the uploads of all nodes; return the collector, and CPU seconds without the making of the answers."""
    made = timed(lambda: [weights(number) for number in range(min(count, 100))]) * count / min(count, 100)
    collector = Collector(folder, Signatures(BUILDERS), num_classes=CLASSES, max_bytes=MIB)
    request = Request(ArrayRecord(), {}, 1, "scale", 0)
    seconds = timed(lambda: collector.collect(Nodes(count), request, timeout=36000, min_uploads=count))
    return collector, seconds - made


def timed(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def job_of(uploads: tuple[Upload, ...], config: Any) -> Job:
    """Return a server's job."""
    space = Normalization((0.5,), (0.5,))
    return Job(uploads, BUILDERS, "lenet5", CLASSES, SHAPE, space, config, threads=1)


def stage(method: str, count: int) -> dict[str, float]:
    """Go through a whole server: collect, server stage, scores; return what each took."""
    logging.disable()
    for name in ("_run_id", "_node_id", "_task_id"):  # Flower stamps messages with the identity of its process
        setattr(TaskIdentity, name, 1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "run", {}) as run:
        found = {"MiB loaded": peak_mib()}
        round_folder = run.round(1)
        collector, found["collect s"] = collected(round_folder, count)
        found["MiB in"] = sum(collector.traffic.up.values()) / MIB
        found["MiB collected"] = peak_mib()
        files = [file.stat().st_size for file in (run.path / "uploads").iterdir()]
        found["MiB on disk"] = sum(files) / MIB
        found["index KiB"] = (run.path / "uploads.jsonl").stat().st_size / 1024
        found["verify s"] = timed(lambda: round_folder.uploads())
        config = CONFIG if method == "co-boosting" else METHODS[method].config()
        job = job_of(round_folder.uploads(), config)
        began = time.perf_counter(), time.process_time()
        report = run_stage(METHODS[method], job, choose("in-process"), round_folder, log=lambda _: None)
        found["MiB of the stage"] = peak_mib()
        # Other programs' share of the time, taken to be the same in each phase.
        alone = (time.process_time() - began[1]) / (time.perf_counter() - began[0])
        timings, epochs = report.outcome.timings, CONFIG.epochs
        if "synthesis" in timings:
            found["s per generator step"] = alone * timings["synthesis"] / (epochs * CONFIG.generator_steps)
            # The pool has one batch in the first epoch, two in the second.
            found["s per distillation step"] = alone * timings["distillation"] / 3
            found["s reweighting"] = alone * timings["reweighting"] / epochs
        found["keep s"] = timed(lambda: keep_outcome(run, report))
        rng = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (HELD_OUT, *SHAPE), generator=rng, dtype=torch.uint8)
        labels = torch.randint(CLASSES, (HELD_OUT,), generator=rng)
        held_out = HeldOut(ImageData(images, labels), job.normalization)
        found["scores s"] = timed(lambda: evaluate(report, method, held_out, log=lambda _: None))
        return {**found, "MiB at the end": peak_mib()}


def wire(count: int, shards: int) -> dict[str, float]:
    """Make steps of the teachers alone, in shards of this process; return seconds and bytes of a step."""
    torch.set_num_threads(1)
    uploads = tuple(Upload(UploadFacts(f"c{n}", "lenet5"), partial(weights, n)) for n in range(count))
    members = ShardedMembers(local_shards(uploads, BUILDERS, shards))
    x = torch.rand(BATCH, *SHAPE).requires_grad_()

    def step() -> None:
        members.logits(x).mean().backward()  # type: ignore[no-untyped-call]

    step()
    before = members.moved
    return {"s per step": timed(step), "MiB per step": (members.moved - before) / MIB}


def in_ray(count: int, shards: int) -> dict[str, float]:
    """Run the server stage in Ray actors; return its seconds per step."""
    from strategies.compute import RayActors

    uploads = tuple(Upload(UploadFacts(f"c{n}", "lenet5"), partial(weights, n)) for n in range(count))
    # As many steps as an epoch has where it is published, so that the start of actors is seen apart.
    config = replace(CONFIG, epochs=1, generator_steps=10)
    place = RayActors(shards=shards, fallback=False)
    began = time.perf_counter()
    outcome = place.run(METHODS["co-boosting"], job_of(uploads, config), Silent())
    whole = time.perf_counter() - began
    return {
        "s per generator step": outcome.timings["synthesis"] / 10,
        "s in all": whole,
        "MiB of the driver": peak_mib(),
    }


CHILDREN: dict[str, Callable[..., dict[str, float]]] = {
    "co-boosting": lambda count, _: stage("co-boosting", count),
    "fedens": lambda count, _: stage("fedens", count),
    "wire": wire,
    "ray": in_ray,
}


def child(kind: str, clients: int, shards: int = 1) -> dict[str, float]:
    """Return what a process of its own finds."""
    command = [sys.executable, str(Path(__file__)), kind, str(clients), str(shards)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(title: str, columns: Iterable[tuple[object, dict[str, float]]]) -> None:
    """Print figures, one column per run."""
    say(title)
    columns = list(columns)
    names = dict.fromkeys(name for _, found in columns for name in found)
    widths = (26, *([12] * len(columns)))
    row(["", *(head for head, _ in columns)], widths)
    for name in names:
        row([name, *(f"{found[name]:.3g}" if name in found else "" for _, found in columns)], widths)
    say()


def main(counts: tuple[int, ...] = COUNTS, *, with_ray: bool = True) -> None:
    """Print all tables.

    Args:
        counts: Numbers of clients.
        with_ray: Whether to start Ray for one number of clients, unsharded and in 2 shards.
    """
    what = f"LeNet-5, {'x'.join(map(str, SHAPE))}, batch {BATCH}, one thread, a process per column"
    for method in ("co-boosting", "fedens"):
        runs = ((f"n = {count}", child(method, count)) for count in counts)
        table(f"{method}: {what}, {HELD_OUT} held-out images", runs)
    most = counts[-1]
    shards = (1, 2, 8)
    table(f"n = {most}, the teachers alone: {what}", ((f"{n} shards", child("wire", most, n)) for n in shards))
    if with_ray:
        middle = counts[-2]
        table(f"n = {middle}, Ray actors: {what}", ((f"{n} shards", child("ray", middle, n)) for n in (1, 2)))


if __name__ == "__main__":
    say(json.dumps(CHILDREN[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))))
