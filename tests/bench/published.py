"""Clients of 300 local epochs, and methods on their uploads: ``tests/bench/published.py --dir FOLDER --root DATA``.

The settings are those of Co-Boosting's Table 1 (conf/coboosting-rows.toml, conf/coboosting-table1-*.toml): ten LeNet-5
on all 60,000 training images. All figures are of the report half of the test images, by which nothing is chosen.

A cell is a data set, a skew and a seed. tests/bench/clients.py trains its clients, one run uploads them, and each
method is a comparison on that run. A call finishes what an earlier one left. ``--out`` receives a row per result, with
the curve of a student, also of one that is not finished. tests/bench/feature_tables.py makes the tables of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clients import train_missing
from measure import keep, say
from rivals import RESULTS, finish_run, oneshot
from run_tables import ALPHAS, HEADLINE, HEADLINE_SEEDS, SEEDS

from server_app.compare.table import WORK
from strategies.run.files import read_json

OUT = RESULTS / "published.json"
CONF = {"fashion-mnist": "fmnist", "mnist": "mnist"}
CLIENTS = 10
# Name -> method, and files and settings beside those of the run.
REPLAYS = {
    "fedens": ("fedens",),
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
QUICK = tuple(REPLAYS)[:7]
# Name -> the settings of a run with clients of its own. Those of FENS keep a tenth of their examples for its rounds:
# few long ones, or those of its Table 8 for CIFAR-10. A checkpoint has no ranges of activations, without which FENS's
# eight bits would be those of the weights alone.
RUNS = {
    "fens": ("conf/fens-deployment.toml", "fens.precision=float32"),
    "fens, 500 rounds": ("method=fens fens.rounds=500 fens.server-lr=0.001", "fens.precision=float32"),
}
KEY = ("data", "alpha", "seed", "name")  # of a row
CURVE = 10  # epochs from point to point of a stored curve


@dataclass(frozen=True)
class Cell:
    """One federation.

    Attributes:
        data: Its data set, as in settings.
        alpha: The skew of ``dirichlet-classes``.
        seed: Of its partition and its clients.
    """

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
        return ["conf/coboosting-rows.toml", f"conf/coboosting-table1-{CONF[self.data]}.toml", own]


_THREE_SEEDS = [Cell(data, alpha, seed) for alpha in ALPHAS for seed in SEEDS for data in CONF]
_TEN_SEEDS = [Cell(*HEADLINE, seed) for seed in HEADLINE_SEEDS]
CELLS = {cell.name: cell for cell in _THREE_SEEDS + _TEN_SEEDS}


def upload(cell: Cell, folder: Path, root: str, method: str = "") -> Path:
    """Train the cell's clients and upload them, as far as that is still to do; return the run's folder.

    Args:
        cell: The cell.
        folder: Keeps the clients and the run.
        root: Folder of the data sets; empty for the settings' own.
        method: A key of :data:`RUNS`; empty for the clients of all other methods.
    """
    name = f"{cell.name}-{method}" if method else cell.name
    # What stands behind a comma is no affair of the clients.
    run, clients = folder / "runs" / _file_name(name), folder / f"clients-{name.partition(',')[0]}"
    if not (run / "result.json").exists():
        given = [*cell.settings, *RUNS.get(method, ()), *([f"data.root='{root}'"] if root else [])]
        train_missing(clients, given, clients=CLIENTS)
        given.append(f"client.checkpoint='{clients}/{{client}}.safetensors'")
        settings = (part for word in given for part in ("--run-config", word))
        finish_run(run, "--clients", str(CLIENTS), *settings, root=root)
    return run


def own_row(cell: Cell, run: Path, name: str = "run") -> dict[str, Any]:
    """Return the row of a run itself: its clients, their averaged model, and the outcome of its method."""
    entries = read_json(run / "result.json")["table"]
    clients = [entry["accuracy"] for entry in entries if entry["kind"] == "client"]
    others = {entry["name"]: entry["accuracy"] for entry in entries if entry["kind"] != "client"}
    return _row(cell, name, {"clients, mean": round(sum(clients) / len(clients), 2), **others})


def replay(cell: Cell, name: str, folder: Path, root: str) -> dict[str, Any]:
    """Run a method on the cell's uploads, or with clients of its own; go on where it was cut off; return its row."""
    if name in RUNS:
        return own_row(cell, upload(cell, folder, root, name), name)
    method, *changed = REPLAYS[name]
    compared = folder / "compared" / _file_name(f"{cell.name}-{name}")
    finish(compared, folder / "runs" / cell.name, method, changed, root=root)
    return _row(cell, name, **outcome_of(compared))


def finish(compared: Path, run: Path, method: str, changed: Sequence[str], *, root: str) -> None:
    """Compare one method on a run's uploads, or go on with it where it was cut off."""
    if (compared / "compare.json").exists() and read_json(compared / "compare.json")["status"] == "finished":
        return
    words = ["compare", str(run), "--methods", method, "--out", str(compared)]
    oneshot(*words, *(part for change in changed for part in ("--set", change)), root=root)


def outcome_of(compared: Path) -> dict[str, Any]:
    """Return the accuracies in %, the curve and the work of a comparison; of one that is cut off, the curve alone.

    The work has the CPU seconds of a stage without a GPU.
    """
    results, points = read_json(compared / "compare.json"), _points(compared)
    curve = [point for point in points if point[0] % CURVE == 0 or point is points[-1]]
    epochs = {"curve": curve, **_best(points), **_gpu_memory(compared)}
    if results["status"] != "finished":
        return {"accuracy": {}, **epochs}
    (found,), (line, *_) = results["cells"], results["table"]
    accuracy = {outcome["name"]: outcome["accuracy"] for outcome in found["outcomes"]}
    # A GPU's seconds are not those of the other rows, and several cells may have shared it.
    seconds = {} if "gpu_mib" in epochs else {"server_cpu_s": line["server_cpu_s"]}
    return {"accuracy": accuracy, **epochs, **seconds, **{key: line[key] for key in WORK}}


def _file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def _row(cell: Cell, name: str, accuracy: Mapping[str, float], **more: Any) -> dict[str, Any]:
    return {**asdict(cell), "name": name, "accuracy": dict(accuracy), **more}


def _best(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return the accuracy in % of the best of all epochs, as papers print it; nothing without epochs."""
    return {"best": max(accuracy for _, accuracy in points)} if points else {}


def _points(compared: Path) -> list[tuple[int, float]]:
    """Return epoch and accuracy in % of every epoch."""
    rows = _lines(compared, "metrics.jsonl")
    return [(row["epoch"], row["accuracy"]) for row in rows if "epoch" in row and "accuracy" in row]


def _gpu_memory(compared: Path) -> dict[str, float]:
    """Return the peak memory of the GPU in MiB; nothing where the server stage ran on a CPU."""
    most = max((row["gpu_mib"] for row in _lines(compared, "usage.jsonl")), default=0)
    return {"gpu_mib": round(most)} if most else {}


def _lines(compared: Path, name: str) -> list[dict[str, Any]]:
    paths = compared.glob(f"cells/*/*/{name}")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def main() -> None:
    """Measure the missing rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, help="where clients, runs and replays are kept")
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument(
        "--cells", default="", help=f"names, separated by commas, such as {next(iter(CELLS))}; default: all"
    )
    parser.add_argument("--methods", default="", help="names, separated by semicolons; default: those of seconds")
    parser.add_argument("--out", type=Path, default=OUT, help="receives all results of --dir")
    words = parser.parse_args()
    for cell in (CELLS[name] for name in words.cells.split(",")) if words.cells else CELLS.values():
        names = words.methods.split(";") if words.methods else QUICK
        rows = [own_row(cell, upload(cell, words.dir, words.root))] if {*names} - {*RUNS} else []
        for name in names:
            rows.append(replay(cell, name, words.dir, words.root))
            say(f"{cell.name}, {name}: {rows[-1]['accuracy']}")
        keep(words.out, rows, KEY)


if __name__ == "__main__":
    main()
