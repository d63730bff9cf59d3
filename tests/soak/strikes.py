"""The plugs that a soak pulls: for each kind of fault, its moment and its action."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from plugs import Field, kill, result_of, uploads_in

FULL_S = 12.0  # how long a disk stays full
SHORT_DEADLINE_S = 30
GONE_S = 5.0  # a ServerApp without a result


@dataclass
class Round:
    """One run of the app, from its submission to its result, however often it is cut off.

    Attributes:
        field: The deployment.
        folder: The run folder.
        config: Settings that it began with.
        seen: Client -> sha256 of every line that was ever in its index of uploads.
        struck: What happened to it, in order.
        excused: Partition -> trainings that were cut off, and so may be done again.
        heal: Repairs the fault.
        resumes: How often it was resumed.
        small_disk: Whether it has a disk of its own that can be filled.
        before: Partition -> how often its client had trained when the run began.
        absent: Since when a ServerApp that had begun has been gone; None: it is there, or has not begun.
    """

    field: Field
    folder: Path
    config: dict[str, Any]
    seen: dict[str, str] = field(default_factory=dict)
    struck: list[str] = field(default_factory=list)
    excused: dict[int, int] = field(default_factory=dict)
    heal: list[Callable[[], None]] = field(default_factory=list)
    resumes: int = 0
    small_disk: bool = False
    before: dict[int, int] = field(default_factory=dict)
    absent: float | None = None
    _begun: bool = False

    def is_over(self) -> bool:
        """Tell whether its ServerApp has ended without a word."""
        if self.field.server_app() is not None:
            self._begun, self.absent = True, None
        elif self._begun and self.absent is None:
            self.absent = time.monotonic()
        return self._begun and self.absent is not None and time.monotonic() - self.absent > GONE_S

    def submit(self) -> None:
        """Start it."""
        self._begun, self.absent = False, None
        pairs = (f"{key}={value!r}" for key, value in (self.config | {"run-dir": str(self.folder)}).items())
        self.field.submit(" ".join(pairs))

    def resume(self) -> None:
        """Go on with it, as its operator does: with the file that it left."""
        if (result := result_of(self.folder)) is not None:
            if result["status"] == "finished":
                return
            (self.folder / "result.json").unlink()
        self.resumes += 1
        file = self.folder / "resume.toml"
        if not file.exists():  # cut off before it had begun
            self.submit()
            return
        settings = file.read_text().replace(f'"deadline-s" = {SHORT_DEADLINE_S}\n', '"deadline-s" = 300\n')
        longer = self.field.folder / "resume.toml"
        longer.write_text(settings)
        self._begun, self.absent = False, None
        self.field.submit(str(longer))

    def look(self) -> None:
        """Note which uploads are accepted by now."""
        self.seen.update({client: sha for client, sha in uploads_in(self.folder).items() if client not in self.seen})

    def has(self, name: str) -> bool:
        """Tell whether a file is in its folder."""
        return (self.folder / name).exists()

    def works(self, partition: int) -> bool:
        """Tell whether a node's ClientApp is training."""
        return self.trained()[partition] > 0 and self.field.client_app(partition) is not None

    def begin(self) -> None:
        """Note what the nodes have said before."""
        self.before = self.field.trainings()

    def trained(self) -> dict[int, int]:
        """Return how often each client has trained in this run, without the trainings that were cut off."""
        counts = self.field.trainings()
        return {n: count - self.before.get(n, 0) - self.excused.get(n, 0) for n, count in counts.items()}

    def excuse(self, partition: int) -> None:
        """A client's process is cut off: unless it has kept what it trained, it may train again."""
        info = self.folder / "run.json"
        run_id = json.loads(info.read_text())["id"] if info.exists() else "none"
        kept = (self.field.folder / "clients" / run_id / f"client-{partition:03d}-1.json").exists()
        self.excused[partition] = self.field.trainings()[partition] - self.before.get(partition, 0) - int(kept)


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    moment: str
    strike: Callable[[Round, int, random.Random], None]
    settings: dict[str, Any] = field(default_factory=dict)
    before: bool = False
    small_disk: bool = False


# Word -> whether it is so of a run and the number of the client that a fault meets.
MOMENTS: dict[str, Callable[[Round, int], bool]] = {
    "always": lambda run, partition: True,
    "training": lambda run, partition: run.works(partition),
    "uploaded": lambda run, partition: f"client-{partition:03d}" in run.seen,
    "collecting": lambda run, partition: 1 <= len(run.seen) < run.field.clients and not run.has("stage.json"),
    "in the stage": lambda run, partition: run.has("checkpoint/checkpoint.json"),
    "in the evaluation": lambda run, partition: run.has("outcome.json"),
}


def _node(run: Round, partition: int, rng: random.Random) -> None:
    run.field.kill_node(partition)
    run.excuse(partition)
    time.sleep(rng.uniform(0.0, 5.0))
    run.field.start_node(partition)


def _client_app(run: Round, partition: int, rng: random.Random) -> None:
    kill(run.field.client_app(partition))
    run.excuse(partition)


def _server_app(run: Round, partition: int, rng: random.Random) -> None:
    if kill(run.field.server_app()):
        run.resume()


def _superlink(run: Round, partition: int, rng: random.Random) -> None:
    run.field.kill_superlink()
    time.sleep(rng.uniform(0.0, 5.0))
    run.field.start_superlink()
    run.resume()


def _late(run: Round, partition: int, rng: random.Random) -> None:
    """Hold a ClientApp beyond the deadline; the run then fails for want of its quorum, and is resumed."""
    app = run.field.client_app(partition)
    if app is None:
        return
    app.suspend()

    def go_on() -> None:
        run.excuse(partition)  # Flower may have given it up
        with contextlib.suppress(psutil.NoSuchProcess):
            app.resume()

    run.heal.append(go_on)


def _full_disk(run: Round, partition: int, rng: random.Random) -> None:
    filler = run.folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    emptied = time.monotonic() + FULL_S
    while time.monotonic() < emptied and (result_of(run.folder) or {}).get("status") != "failed":
        time.sleep(0.2)
        run.look()
    filler.unlink()


def _ray_actor(run: Round, partition: int, rng: random.Random) -> None:
    for child, title in _children(run):
        if title.startswith("ray::") and not title.endswith(("Agent", "IDLE")):
            kill(child)


def _raylet(run: Round, partition: int, rng: random.Random) -> None:
    """Kill what starts Ray's workers: Ray then ends its driver, the ServerApp, too."""
    for child, title in _children(run):
        if title.endswith("/raylet"):
            kill(child)


def _children(run: Round) -> list[tuple[psutil.Process, str]]:
    """Return the processes that the ServerApp has started, with what each calls itself."""
    app, found = run.field.server_app(), []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in app.children(recursive=True) if app is not None else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [(child, title) for title in child.cmdline()[:1]]
    return found


FAULTS = [
    Fault("node killed before the question", "always", _node, before=True),
    Fault("node killed while training", "training", _node),
    Fault("node killed after its upload", "uploaded", _node),
    Fault("ClientApp killed", "training", _client_app),
    Fault("ClientApp late beyond the deadline", "training", _late, {"deadline-s": SHORT_DEADLINE_S}),
    Fault("ServerApp killed while collecting", "collecting", _server_app),
    Fault("ServerApp killed in the server stage", "in the stage", _server_app),
    Fault("ServerApp killed in the evaluation", "in the evaluation", _server_app),
    Fault("SuperLink killed while collecting", "collecting", _superlink),
    Fault("SuperLink killed in the server stage", "in the stage", _superlink),
    Fault("disk full while collecting", "collecting", _full_disk, small_disk=True),
    Fault("disk full in the server stage", "in the stage", _full_disk, small_disk=True),
    Fault("Ray actor killed in the server stage", "in the stage", _ray_actor, {"compute": "ray"}),
    Fault("raylet killed in the server stage", "in the stage", _raylet, {"compute": "ray"}),
]
