"""Clients of 300 local epochs, and methods on their uploads: ``tests/bench/published.py --dir FOLDER --root DATA``.

The settings are those of Co-Boosting's Table 1 (conf/coboosting-table1-*.toml): ten LeNet-5,
or ten CNN5 on CIFAR-10, on all training images. All figures are of the report half of the test images, by which nothing
is chosen.

A cell is a data set, a skew and a seed. tests/bench/clients.py trains its clients, ``oneshot import`` makes a run of
them, and each method is a comparison on that run. So much needs neither Flower nor Ray; FENS asks its own clients,
through Flower. A call says what is done, and finishes what an earlier one left, however that ended: with ``--minutes``
in time. With ``--jobs`` several trainings and stages share the processor or the GPU. A folder that moves to another
machine needs the same path there. ``--out`` receives a row per result, with the curve of a student, also of one that is
not finished. tests/bench/run_tables.py makes the tables of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from clients import missing, write_map
from measure import keep, say, without_preset
from run_tables import ALPHAS, HEADLINE, HEADLINE_SEEDS, OUT, SEEDS

from server_app.compare.report import WORK
from server_app.launch.guard import TOKEN_KEY, guarded
from strategies.core.durable import read_json

CONF = {"fashion-mnist": "fmnist", "mnist": "mnist", "cifar10": "cifar10"}
ON_GPU = "cifar10"  # its clients alone would take a processor days
# The papers' arithmetic; by default a GPU's generators compute in bfloat16.
EXACT = "server.generator-precision=float32"
CLIENTS = 10
# Name -> method, and files and settings beside those of the run.
REPLAYS = {
    "fedens": ("fedens",),
    "dw-fedens": ("dw-fedens",),
    "mean of probabilities": ("fedens", "fedens.mean=probabilities"),
    "tally, read off": ("tally", "tally.counts=noise-rows"),
    "label-count-ensemble": ("label-count-ensemble",),
    "tally": ("tally",),
    "fedavg, merged": ("fedavg", "fedavg.linear=merged"),
    "tally, merged": ("tally", "tally.counts=noise-rows", "tally.start=merged"),
    "tally, spans": ("tally", "conf/tally-spans.toml", "tally.counts=noise-rows"),
    "intactofl": ("intactofl",),
    "dense": ("dense",),
    "co-boosting": ("co-boosting",),
}
QUICK = tuple(REPLAYS)[:8]
# Name -> the settings of a run with clients of its own. Those of FENS keep a tenth of their examples for its rounds:
# few long ones, or those of its Table 8 for CIFAR-10. A checkpoint has no ranges of activations, without which FENS's
# eight bits would be those of the weights alone.
RUNS = {
    "fens": ("conf/fens-deployment.toml", "fens.precision=float32"),
    "fens, 500 rounds": ("method=fens fens.rounds=500 fens.server-lr=0.001", "fens.precision=float32"),
}
KEY = ("data", "alpha", "seed", "name")  # of a row
CURVE = 10  # epochs from point to point of a stored curve


class OutOfTimeError(Exception):
    """A command was ended for lack of time."""


def run_until(command: Sequence[str], *, root: str = "", until: float = math.inf) -> str:
    """Run a command on one thread; return what it wrote to standard output."""
    if time.monotonic() >= until:
        raise OutOfTimeError
    environment = os.environ | {"OMP_NUM_THREADS": "1", **({"ONESHOT_DATA": root} if root else {})}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            out, said = process.communicate(timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            process.terminate()  # a server stage keeps its last checkpoint
            process.communicate()
            raise OutOfTimeError from error
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(said or out).strip()[-2000:]}")
    return out


def oneshot(*words: str, root: str, until: float = math.inf) -> None:
    """Run a command of the app, see :func:`run_until`."""
    run_until([sys.executable, "-m", "server_app", *words, "--format", "json"], root=root, until=until)


def finish_run(run: Path, *words: str, root: str, until: float = math.inf) -> None:
    """Begin a run with the words of ``oneshot run``; resume one that was cut off, and leave a finished one alone."""
    if not (run / "result.json").exists():
        begun = (run / "run.json").exists()
        command = ("resume", str(run)) if begun else ("run", *words, "--run-config", f"run-dir='{run}'")
        oneshot(*command, root=root, until=until)


@dataclass(frozen=True)
class Cell:
    """One federation."""

    data: str
    alpha: float
    seed: int

    @property
    def name(self) -> str:
        """Its name in file names."""
        return f"{self.data}-{self.alpha:g}-{self.seed}"

    @property
    def settings(self) -> list[str]:
        """The settings of its clients: two files, and what the cell adds."""
        own = f"data.alpha={self.alpha:g} seed={self.seed} threads=1 method=fedens data.held-out=report"
        exact = [EXACT] if self.data == ON_GPU else []
        return [f"conf/coboosting-table1-{CONF[self.data]}.toml", own, *exact]


_THREE_SEEDS = [Cell(data, alpha, seed) for alpha in ALPHAS for seed in SEEDS for data in CONF]
_TEN_SEEDS = [Cell(*HEADLINE, seed) for seed in HEADLINE_SEEDS]
CELLS = {cell.name: cell for cell in _THREE_SEEDS + _TEN_SEEDS}


@dataclass(frozen=True)
class Slice:
    """Where a measurement lies, and how much of it is done now.

    Attributes:
        folder: Keeps the clients, the runs and the comparisons.
        root: Folder of the data sets; empty for the settings' own.
        changed: Settings on top of those of a cell, to try a command out.
        until: When it ends, by ``time.monotonic()``.
    """

    folder: Path
    root: str = ""
    changed: tuple[str, ...] = ()
    until: float = math.inf

    def settings(self, cell: Cell, method: str = "") -> list[str]:
        """Return the settings of a cell's clients; ``method`` is a key of :data:`RUNS`, or empty for all others."""
        at = [f"data.root='{self.root}'"] if self.root else []
        return [*cell.settings, *RUNS.get(method, ()), *at, *self.changed]

    def clients(self, cell: Cell, method: str = "") -> Path:
        """Return the folder of a cell's clients."""
        return self.folder / f"clients-{_joined(cell.name, _kind(method))}"

    def run(self, cell: Cell, method: str = "") -> Path:
        """Return the folder of a cell's uploads."""
        return self.folder / "runs" / _joined(cell.name, method)

    def compared(self, cell: Cell, name: str) -> Path:
        """Return the folder of the comparison that has a method alone."""
        return self.folder / "compared" / _joined(cell.name, name)

    def missing(self, cell: Cell, method: str = "") -> list[int]:
        """Return the numbers of the cell's clients that are not trained."""
        if not method and self.uploaded(cell):
            return []
        return missing(self.clients(cell, method), self.settings(cell, method), clients=CLIENTS)

    def train(self, cell: Cell, method: str, numbers: Sequence[int]) -> None:
        """Train some clients of a cell, in a process of their own."""
        command = [sys.executable, str(Path(__file__).with_name("clients.py")), str(self.clients(cell, method))]
        command += [*self.settings(cell, method), "--clients", str(CLIENTS), "--only", *map(str, numbers)]
        run_until(command, root=self.root, until=self.until)

    def uploaded(self, cell: Cell) -> bool:
        """Return whether there is a run of the cell's clients."""
        return (self.run(cell) / "run.json").exists()

    def upload(self, cell: Cell) -> None:
        """Make a run of the cell's trained clients."""
        trained, settings = self.clients(cell), self.settings(cell)
        architecture, told = write_map(trained, settings, clients=CLIENTS)
        words = ["import", str(trained), "--architecture", architecture, "--map", str(told)]
        oneshot(*words, "--out", str(self.run(cell)), *_given(settings), root=self.root, until=self.until)

    def replay(self, cell: Cell, name: str) -> None:
        """Run a method on the cell's uploads, or with clients of its own; go on where it was cut off."""
        if name in RUNS:
            checkpoint = f"client.checkpoint='{self.clients(cell, name)}/{{client}}.safetensors'"
            words = ("--clients", str(CLIENTS), *_given([*self.settings(cell, name), checkpoint]))
            finish_run(self.run(cell, name), *words, root=self.root, until=self.until)
        else:
            method, *changed = REPLAYS[name]
            words = ("compare", str(self.run(cell)), "--methods", method, "--out", str(self.compared(cell, name)))
            oneshot(*words, *_given(changed), root=self.root, until=self.until)

    def rows(self, cell: Cell, name: str) -> list[dict[str, Any]]:
        """Return the row of a method as far as it is; the plain ensemble also gives the row of the clients."""
        place = {**asdict(cell), **({"settings": " ".join(self.changed)} if self.changed else {})}
        if name in RUNS:
            result = self.run(cell, name) / "result.json"
            return [{**place, "name": name, "accuracy": _with_clients(result)}] if result.exists() else []
        compared = self.compared(cell, name)
        if not (compared / "compare.json").exists():
            return []
        found = outcome_of(compared)
        rows = [{**place, "name": name, **found}] if found["accuracy"] or found["curve"] else []
        if name == "fedens" and found["accuracy"]:
            (result,) = compared.glob("cells/*/*/result.json")
            rows.append({**place, "name": "run", "accuracy": _with_clients(result)})
        return rows

    def state(self, cell: Cell, name: str) -> str:
        """Return how far a method is, in words."""
        if name in RUNS:
            return "finished" if (self.run(cell, name) / "result.json").exists() else "to do"
        compared = self.compared(cell, name)
        if _finished(compared):
            return "finished"
        usage = [row for row in _lines(compared, "usage.jsonl") if isinstance(row["step"], int)]
        if not usage:
            return "to do"
        (info,) = compared.glob("cells/*/*/run.json")
        epochs, epoch = read_json(info)["settings"].get(f"{REPLAYS[name][0]}.epochs", 0), usage[-1]["step"]
        # Each epoch makes as many images as the one before, and passes over all of them.
        spent = usage[-1]["wall_s"] / 60
        left = f" of {epochs}, about {spent * ((epochs / epoch) ** 2 - 1):.1f} minutes left" if epochs else ""
        return f"epoch {epoch}{left}, {spent:.1f} spent"


def _finished(compared: Path) -> bool:
    return (compared / "compare.json").exists() and read_json(compared / "compare.json")["status"] == "finished"


def _given(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _with_clients(result: Path) -> dict[str, float]:
    """Return the accuracies in % of a result: the mean of its clients, and all others."""
    entries = read_json(result)["table"]
    clients = [entry["accuracy"] for entry in entries if entry["kind"] == "client"]
    others = {without_preset(entry["name"]): entry["accuracy"] for entry in entries if entry["kind"] != "client"}
    return {"clients, mean": round(sum(clients) / len(clients), 2), **others}


def outcome_of(compared: Path) -> dict[str, Any]:
    """Return the accuracies in %, the curve and the work of a comparison; of one that is cut off, the curve alone.

    The work has the CPU seconds of a stage without a GPU, or the peak memory of the GPU in MiB.
    """
    results, points = read_json(compared / "compare.json"), _points(compared)
    curve = [point for point in points if point[0] % CURVE == 0 or point is points[-1]]
    epochs: dict[str, Any] = {"curve": curve}
    if points:  # the best of all epochs, as papers print it
        epochs["best"] = max(accuracy for _, accuracy in points)
    if most := max((row["gpu_mib"] for row in _lines(compared, "usage.jsonl")), default=0):
        epochs["gpu_mib"] = round(most)
    if results["status"] != "finished":
        return {"accuracy": {}, **epochs}
    (found,), (line, *_) = results["cells"], results["table"]
    accuracy = {without_preset(outcome["name"]): outcome["accuracy"] for outcome in found["outcomes"]}
    # A GPU's seconds are not those of the other rows, and several cells may have shared it.
    seconds = {} if "gpu_mib" in epochs else {"server_cpu_s": line["server_cpu_s"]}
    return {"accuracy": accuracy, **epochs, **seconds, **{key: line[key] for key in WORK}}


def _joined(cell: str, name: str) -> str:
    return f"{cell}-{name}".rstrip("-").replace(", ", "-").replace(" ", "-")


def _points(compared: Path) -> list[tuple[int, float]]:
    """Return epoch and accuracy in % of every epoch."""
    rows = _lines(compared, "metrics.jsonl")
    return [(row["epoch"], row["accuracy"]) for row in rows if "epoch" in row and "accuracy" in row]


def _lines(compared: Path, name: str) -> list[dict[str, Any]]:
    paths = compared.glob(f"cells/*/*/{name}")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def measure(part: Slice, cells: Sequence[Cell], names: Sequence[str], *, jobs: int, out: Path) -> bool:
    """Do what is missing, as far as the time goes; return whether nothing failed."""
    places = [*product(cells, names)]
    states = {place: part.state(*place) for place in places}
    todo = [place for place, state in states.items() if state != "finished"]
    kinds = [*dict.fromkeys((cell, _kind(name)) for cell, name in todo)]
    trainings = {_joined(cell.name, kind): (cell, kind, part.missing(cell, kind)) for cell, kind in kinds}
    for name, (*_, numbers) in trainings.items():
        say(f"{name}: {len(numbers)} of {CLIENTS} clients to train")
    for (cell, name), state in states.items():
        say(f"{cell.name}, {name}: {state}")
    well = _done(
        {
            f"{name}, clients {dealt}": partial(part.train, cell, kind, dealt)
            for name, (cell, kind, numbers) in trainings.items()
            for dealt in (numbers[first::jobs] for first in range(min(jobs, len(numbers))))
        },
        jobs,
    )
    ready = [(cell, kind) for cell, kind in kinds if not part.missing(cell, kind)]
    shared = [cell for cell, kind in ready if not kind and not part.uploaded(cell)]
    well &= _done({f"{cell.name}, import": partial(part.upload, cell) for cell in shared}, jobs)
    stages = {}
    for cell, name in todo:
        if name in RUNS and not find_spec("flwr"):
            say(f"{cell.name}, {name}: its rounds need Flower; call the command again where that is installed")
        elif (cell, _kind(name)) in ready:
            stages[f"{cell.name}, {name}"] = partial(part.replay, cell, name)
    well &= _done(stages, jobs)
    rows = {place: part.rows(*place) for place in places}
    keep(out, [row for found in rows.values() for row in found], KEY)
    for (cell, name), found in rows.items():
        accuracies = [str(row["accuracy"]) for row in found if row["accuracy"]]
        say("; ".join([f"{cell.name}, {name}: {part.state(cell, name)}", *accuracies]))
    return well


def _kind(name: str) -> str:
    """Return the kind of clients of a method: what stands behind a comma in :data:`RUNS` is no affair of them."""
    return name.partition(",")[0] if name in RUNS else ""


def _done(works: Mapping[str, Callable[[], None]], jobs: int) -> bool:
    """Do works, some at once, and say how each ends; return whether none failed."""
    well = True
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_timed, work): name for name, work in works.items()}
        for future in as_completed(futures):
            try:
                say(f"{futures[future]}: {future.result():.0f} s")
            except OutOfTimeError:
                say(f"{futures[future]}: out of time, goes on with the next call")
            except RuntimeError as error:
                well = False
                say(f"{futures[future]}: {error}")
    return well


def _timed(work: Callable[[], None]) -> float:
    """Do a work and return its seconds."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


def words_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command's words, read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, required=True, help="where clients, runs and replays are kept")
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument(
        "--cells",
        default=",".join(name for name, cell in CELLS.items() if cell.data != ON_GPU),
        help=f"names, separated by commas, such as {next(iter(CELLS))}; default: all but those of {ON_GPU}",
    )
    parser.add_argument(
        "--methods", default=";".join(QUICK), help="names, separated by semicolons; default: those of seconds"
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings and stages at once")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many; the next call goes on")
    parser.add_argument("--set", action="append", default=[], help="settings on top, to try the command out")
    parser.add_argument("--out", type=Path, default=OUT, help="receives the results")
    words = parser.parse_args(given)
    if words.set and words.out == OUT:
        parser.error("results under other settings need an --out of their own")
    return words


def main() -> int:
    """Measure the missing rows; return the exit status."""
    words = words_of()
    until = time.monotonic() + 60 * words.minutes
    part = Slice(words.dir.absolute(), words.root, tuple(words.set), until)
    cells, names = [CELLS[name] for name in words.cells.split(",")], words.methods.split(";")
    with guarded() as (_, token):  # no training outlives this process, however that ends
        os.environ[TOKEN_KEY] = token
        return 0 if measure(part, cells, names, jobs=words.jobs, out=words.out) else 1


if __name__ == "__main__":
    sys.exit(main())
