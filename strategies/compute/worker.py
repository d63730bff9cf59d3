"""Both ends of the wire between the driver and its actors. Imports no Ray.

A :class:`Worker` runs jobs in a thread of its actor and queues their events; a :class:`Relay` replays these on the
driver's Progress. :func:`open_shard` makes a shard, to which :func:`add_member` adds the members that the driver sends.
"""

from __future__ import annotations

import gc
import hashlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..core import errors
from ..core.errors import ComputeError, OneShotError, UploadError
from ..core.gpu import resolve_device
from ..method import Part, Progress, Snapshot, Upload
from .in_process import InProcess
from .task import ActorTask, loads, pack, unpack

if TYPE_CHECKING:
    from ..core.facts import UploadFacts
    from ..method import State
    from ..teacher.shard import HeldShard
    from ..teacher.sharded import Shard, ShardedMembers


# Kinds of events. A call on the driver's Progress: "report", "record", "checkpoint". A question that the driver answers
# by Worker.reply: "ask". The end: "done", "failed".
Event = tuple[str, tuple[Any, ...]]

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """An exception in the form that travels.

    Attributes:
        kind: The nearest class of this library's errors; empty if there is none.
    """

    kind: str
    origin: str
    message: str
    trace: str
    fields: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception."""
        kinds = [base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base]
        trace = "".join(traceback.format_exception(error))
        fields = (error.reason, error.client) if isinstance(error, UploadError) else (str(error),)
        return cls(kinds[0] if kinds else "", type(error).__name__, str(error), trace, fields)

    def error(self, method: str) -> OneShotError:
        """Return the exception to raise on the driver: of the same class if it is one of ours, else a ComputeError."""
        if self.kind:
            ours: OneShotError = getattr(errors, self.kind)(*self.fields)
            return ours
        return ComputeError(f"method {method!r} failed in the Ray actor: {self.origin}: {self.message}")


class Outbox:
    """Events from the method's thread to the driver, in order."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._filled = threading.Condition()

    def put(self, kind: str, *args: Any) -> None:
        """Add an event; of consecutive reports only the last stays, with the newest of all their values."""
        with self._filled:
            if kind == "report" and self._events and self._events[-1][0] == "report":
                step, total, values, *part = args
                args = (step, total, values if values is not None else self._events[-1][1][2], *part)
                self._events.pop()
            self._events.append((kind, args))
            self._filled.notify()

    def take(self, wait_s: float) -> list[Event]:
        """Return all events as soon as there is one; none after ``wait_s`` seconds without any."""
        with self._filled:
            self._filled.wait_for(lambda: self._events, wait_s)
            events, self._events = self._events, []
            return events


class OutboxProgress:
    """The Progress of a method in an actor.

    Args:
        interval_s: Least seconds between two checkpoints. Only this clock decides: every checkpoint is then written.
    """

    def __init__(self, outbox: Outbox, snapshot: Snapshot | None, interval_s: float) -> None:
        self._outbox = outbox
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._taken = time.monotonic()

    def resume(self) -> Snapshot | None:
        """Return the snapshot from the driver."""
        return self._snapshot

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, part: Part = (0, 0)) -> None:
        """Queue a report."""
        self._outbox.put("report", step, total, None if values is None else dict(values), part)

    def record(self, row: Mapping[str, Any]) -> None:
        """Queue a row."""
        self._outbox.put("record", dict(row))

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        """Queue a copy of the state, if one is due."""
        if time.monotonic() - self._taken >= self._interval_s:
            self._outbox.put("checkpoint", pack(take()))
            self._taken = time.monotonic()


@dataclass(frozen=True)
class AskedShards:
    """Has the driver load members into shards, see :class:`strategies.core.shards.Shards`.

    Attributes:
        ask: Sends the driver a question and waits for its answer.
        connect: Makes a shard from the driver's name for it.
        share: Makes an array ready to be sent to all shards at once.
    """

    ask: Callable[..., Any]
    connect: Callable[[Any], Shard]
    share: Callable[[Any], Any]

    def hold(self, clients: Sequence[str], *, fold: bool, precision: str) -> ShardedMembers:
        """Load some clients' uploads, in this order."""
        from ..teacher.sharded import LoadedShard, ShardedMembers

        loaded = self.ask("load", list(clients), fold, precision)
        parts = [LoadedShard(self.connect(shard), members, statistics) for shard, members, statistics in loaded]
        return ShardedMembers(parts, self.share)


class Worker:
    """Runs tasks, one after another; off the network if the driver is."""

    def __init__(
        self, connect: Callable[[Any], Any] = lambda shard: shard, share: Callable[[Any], Any] = lambda array: array
    ) -> None:
        self._outbox = Outbox()
        self._shards = AskedShards(self._ask, connect, share)
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._uploads: list[Upload] = []
        self._parts: Mapping[str, Any] = {}
        # A thread of its own: the actor's main thread has to answer polls.
        self._thread = ThreadPoolExecutor(1)

    def add_upload(self, facts: UploadFacts, read_packed: Callable[[], Any] | None) -> None:
        """Add an upload to the next task.

        Args:
            read_packed: Returns its packed weights, anew at each call; None to fetch them from the driver.
        """
        number = len(self._uploads)
        read = partial(self._ask, "read", number) if read_packed is None else read_packed
        self._uploads.append(Upload(facts, lambda: unpack(read())))

    def reply(self, answer: Any) -> None:
        """Answer the question that the method's thread waits on."""
        self._answers.put(answer)

    def _ask(self, what: str, *args: Any) -> Any:
        self._outbox.put("ask", what, *args)
        return self._answers.get()

    def start(self, task: ActorTask, snapshot: Any, interval_s: float, *, sharded: bool = False) -> None:
        """Start a task and return at once.

        Args:
            task: The task; a part that it leaves out equals that of the task before.
            snapshot: The packed snapshot to resume from, or None.
            interval_s: Least seconds between two checkpoints.
            sharded: Whether shards hold its teachers.
        """
        progress = OutboxProgress(self._outbox, unpack(snapshot), interval_s)
        # Uploads belong to this task alone: a later holder would keep them in Ray's object store.
        uploads, self._uploads = self._uploads, []
        self._parts = {**self._parts, **task.parts}
        task = replace(task, parts=self._parts)
        shards = self._shards if sharded else None
        self._thread.submit(_work, task, uploads, progress, shards).add_done_callback(self._end)

    def poll(self, wait_s: float) -> list[Event]:
        """Return the events since the last call; wait up to ``wait_s`` seconds for the first."""
        return self._outbox.take(wait_s)

    def _end(self, work: Future[Any]) -> None:
        error = work.exception()
        if error is None:
            self._outbox.put("done", work.result())
        else:
            self._outbox.put("failed", Failure.of(error))


def _work(task: ActorTask, uploads: list[Upload], progress: OutboxProgress, shards: AskedShards | None) -> Any:
    method, job = task.open(uploads)
    try:
        return pack(InProcess().run(method, replace(job, shards=shards), progress), copy=False)
    finally:
        _free_memory()


def _free_memory() -> None:
    """Free the memory of a finished method, and what torch keeps of a GPU's: until the next run it is the clients'."""
    gc.collect()  # a method's models and its graphs refer to each other
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def code_digest() -> tuple[str, str]:
    """Return (sha256 over the paths and bytes of this library's .py files, its folder)."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py")):
        source = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(source)}\0".encode() + source)
    return digest.hexdigest(), str(folder)


def open_shard(
    builders: Mapping[str, bytes], *, device: str, threads: int, fold: bool, precision: str
) -> HeldShard | Failure:
    """Return a shard without members in this process, or why there is none.

    Args:
        builders: Architecture -> the pickle of its builder.
        device: ``"auto"``, or a torch device of this process.
    """
    import torch

    from ..teacher.shard import HeldShard

    torch.set_num_threads(threads)
    opened = {name: loads(builder) for name, builder in builders.items()}
    try:
        return HeldShard(opened, device=resolve_device(device), fold=fold, precision=precision)
    except OneShotError as error:
        return Failure.of(error)


def add_member(shard: HeldShard, facts: UploadFacts, packed: Any) -> Failure | None:
    """Load a packed upload as one more member of a shard; return why it cannot be one."""
    try:
        shard.add(Upload(facts, lambda: unpack(packed)))
    except (OneShotError, RuntimeError) as error:
        return Failure.of(error)
    return None


class Relay:
    """A Progress with its three optional members: ``save``, ``tick`` and ``interval_s``."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._unsaved: State = {}

    @property
    def interval_s(self) -> float:
        """The least number of seconds between two checkpoints."""
        return float(getattr(self._progress, "interval_s", 20.0))

    def tick(self) -> None:
        """Let the driver do its other duties."""
        if tick := getattr(self._progress, "tick", None):
            tick()

    def ticking(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a tick before each."""
        for item in items:
            self.tick()
            yield item

    def resume(self) -> Snapshot | None:
        """Return the last checkpoint written."""
        self._unsaved = {}
        return self._progress.resume()

    def deliver(self, kind: str, args: tuple[Any, ...]) -> None:
        """Repeat a call, which the method made in the actor, on the Progress.

        Args:
            kind: ``"report"``, ``"record"`` or ``"checkpoint"``.
            args: Its arguments; for a checkpoint, the packed snapshot.
        """
        if kind == "report":
            self._progress.report(*args)
        elif kind == "record":
            self._progress.record(*args)
        else:
            self._checkpoint(unpack(*args))

    def _checkpoint(self, snapshot: Snapshot) -> None:
        if save := getattr(self._progress, "save", None):
            save(snapshot)
            return
        # A Progress without ``save`` may decline; the rows would be lost, because the method sends them only once.
        snapshot = replace(snapshot, appended=_join_snapshots(self._unsaved, snapshot.appended))
        self._unsaved = dict(snapshot.appended)

        def take() -> Snapshot:
            self._unsaved = {}
            return snapshot

        self._progress.checkpoint(take)


def _join_snapshots(old: State, new: Mapping[str, Any]) -> State:
    import torch

    return old | {name: torch.cat([old[name], rows]) if name in old else rows for name, rows in new.items()}
