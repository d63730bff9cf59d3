"""All methods on the same uploads, over data sets and seeds: ``python tests/bench/rivals.py --dir FOLDER --root DATA``.

A cell is a data set and a seed. Its run makes the uploads, with FENS beside; every other method is a replay of it. Each
result is a file in the folder, so that a measurement that was cut off goes on. ``--out`` receives all of them.
``--write`` measures nothing: from that file it renews the figures of docs/lab/same-uploads.md and the methods' pages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from measure import say, without_preset

from strategies.run.files import read_json, write_json

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
OUT = RESULTS / "rivals.json"
RUN = "conf/fens-deployment.toml"  # the settings of the run that makes the uploads
PAGES = (ROOT / "docs" / "lab" / "same-uploads.md", *sorted((ROOT / "docs" / "methods").glob("*.md")))
SEEDS = range(3)
DATA = {
    "digits": "",
    "Fashion-MNIST": "data.name=fashion-mnist client.epochs=20 client.batch-size=128",
    "CIFAR-10": "data.name=cifar10 model.name=cnn-torch client.epochs=20 client.batch-size=64",
}
# Name -> method and settings. All have the short schedules of conf/short.toml.
REPLAYS = {
    "fedens": ("fedens", ""),
    "mean of probabilities": ("fedens", "fedens.mean=probabilities"),
    "label-count-ensemble": ("label-count-ensemble", ""),
    "tally": ("tally", ""),
    "tally, read off": ("tally", "tally.counts=noise-rows"),
    "intactofl, predictions": ("intactofl", "intactofl.gate=predictions"),
    "intactofl": ("intactofl", ""),
    "intactofl, code": ("intactofl", "intactofl.perturbation-size=8.0"),
    "co-boosting": ("co-boosting", ""),
    "dense": ("dense", ""),
    "f-dafl": ("f-dafl", ""),
    "f-adi": ("f-adi", ""),
}
ADAM = "client.optimizer=adam client.lr=0.001 client.clip=0"
# Name -> the settings of a run whose clients train otherwise, so that it has uploads of its own; on digits alone.
# FuseFL's clients train each of two blocks for half of the epochs, or for as many.
OTHERWISE = {
    "fedov": f"method=fedov client.epochs=200 client.batch-size=64 client.weight-decay=1e-5 {ADAM}",
    "fedcvae-ens": f"method=fedcvae-ens client.epochs=60 client.batch-size=32 server.epochs=10 {ADAM}",
    "fafi": "method=fafi client.lr=0.05 client.clip=1 client.whole-batches=true client.momentum-epochs=1",
    "fusefl": "method=fusefl client.epochs=15",
    "fusefl, long": "method=fusefl",
}
FUSED = "fafi, noise"  # the uploads of "fafi", fused by noise
TRAINED = ("tally", "intactofl", "co-boosting", "dense", "f-dafl", "f-adi")
Place = tuple[str, str]  # a replay, and the start of a name in its table of results
UNCHANGED, REPORTED = "clients upload only a model", "clients also report class counts"
ASKED = "clients answer again"
REPORTED_AND_ASKED = f"{REPORTED}, and answer again"
TRAIN = "clients train differently"
# Group -> row -> its place.
GROUPS: dict[str, dict[str, Place]] = {
    f"{UNCHANGED}: ensembles": {
        "FedENS": ("fedens", "FedENS"),
        "mean of probabilities": ("mean of probabilities", "FedENS"),
        "Co-Boosting ensemble": ("co-boosting", "Co-Boosting ensemble"),
        "IntactOFL": ("intactofl", "IntactOFL"),
        "IntactOFL, images moved by 8, as in its code": ("intactofl, code", "IntactOFL"),
        "IntactOFL's experts, gate on predictions": ("intactofl, predictions", "IntactOFL"),
        "**Tally ensemble, estimated counts**": ("tally, read off", "Tally ensemble"),
    },
    f"{UNCHANGED}: one model": {
        "FedAvg": ("fedens", "FedAvg (one shot)"),
        "F-ADI": ("f-adi", "F-ADI"),
        "F-DAFL": ("f-dafl", "F-DAFL"),
        "DENSE": ("dense", "DENSE"),
        "Co-Boosting": ("co-boosting", "Co-Boosting"),
        "**Tally, estimated counts**": ("tally, read off", "Tally"),
    },
    f"{REPORTED}: ensembles": {
        "Label-count ensemble": ("label-count-ensemble", "Label-count ensemble"),
        "Tally ensemble": ("tally", "Tally ensemble"),
    },
    f"{REPORTED}: one model": {"Tally": ("tally", "Tally")},
    f"{TRAIN}: ensembles": {
        "FAFI": ("fafi", "FAFI"),
        "FAFI, `fafi.fusion=noise`": ("fafi, noise", "FAFI"),
        "FedOV": ("fedov", "FedOV"),
    },
    f"{TRAIN}: one model": {"FedCVAE-Ens": ("fedcvae-ens", "FedCVAE-Ens")},
    # The weights of conf/fens-deployment.toml start from label counts.
    f"{REPORTED_AND_ASKED}: ensemble": {"FENS, 20 rounds with the clients": ("run", "FENS")},
    f"{ASKED}: ensemble": {
        "FuseFL, 15 + 15 local epochs in three exchanges": ("fusefl", "FuseFL"),
        "FuseFL, 30 + 30 local epochs": ("fusefl, long", "FuseFL"),
    },
}
HEADLINE = {"ensembles": "**Tally ensemble, estimated counts**", "one model": "**Tally, estimated counts**"}


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


def oneshot(*words: str, root: str, until: float = math.inf) -> tuple[dict[str, Any], float]:
    """Run a command of the app, see :func:`run_until`; return its result, and its CPU seconds."""
    before = _children()
    out = run_until([sys.executable, "-m", "server_app", *words, "--format", "json"], root=root, until=until)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result, _children() - before


def finish_run(run: Path, *words: str, root: str, until: float = math.inf) -> None:
    """Begin a run with the words of ``oneshot run``; resume one that was cut off, and leave a finished one alone."""
    if not (run / "result.json").exists():
        begun = (run / "run.json").exists()
        command = ("resume", str(run)) if begun else ("run", *words, "--run-config", f"run-dir='{run}'")
        oneshot(*command, root=root, until=until)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def names(data: str) -> tuple[str, ...]:
    """Return the names of the results on a data set."""
    return ("run", *REPLAYS, *((*OTHERWISE, FUSED) if data == "digits" else ()))


def command(cell: Path, data: str, seed: int, name: str) -> tuple[str, ...]:
    """Return the command that measures a result."""
    shared = f"{DATA[data]} data.alpha=0.1 seed={seed} threads=1"
    if name == "run":
        return ("run", "--clients", "10", "--run-config", RUN, "--run-config", f"{shared} run-dir='{cell}'")
    if name in OTHERWISE:
        of_own = f"{cell}-{name.replace(', ', '-')}"
        return ("run", "--clients", "10", "--run-config", f"{shared} {OTHERWISE[name]} run-dir='{of_own}'")
    if name == FUSED:
        return ("replay", f"{cell}-fafi", "--set", "fafi.fusion=noise")
    method, changed = REPLAYS[name]
    return ("replay", str(cell), "--method", method, "--set", "conf/short.toml", "--set", f"threads=1 {changed}")


def measured(folder: Path, data: str, seed: int, name: str, *, root: str) -> dict[str, Any]:
    """Return one result, from its file or measured now."""
    cell = folder / f"{data.lower()}-{seed}"
    path = folder / f"{cell.name}-{name.replace(', ', '-').replace(' ', '-')}.json"
    if path.exists():
        found: dict[str, Any] = read_json(path)
        return found
    result, seconds = oneshot(*command(cell, data, seed, name), root=root)
    row = {
        "data": data,
        "seed": seed,
        "name": name,
        "cpu_s": round(seconds, 1),
        "accuracy": {
            without_preset(entry["name"]): entry["accuracy"] for entry in result["table"] if entry["kind"] != "client"
        },
    }
    write_json(path, row)
    say(f"{data}, seed {seed}, {name}: {row['accuracy']}, {seconds:.0f} CPU s")
    return row


def accuracies(rows: Iterable[Mapping[str, Any]], data: str, place: Place) -> pd.Series[float]:
    """Return the accuracies in % of a row of the tables, by the seed."""
    name, entry = place
    found = {row["seed"]: row["accuracy"][entry] for row in rows if (row["data"], row["name"]) == (data, name)}
    return pd.Series(found, dtype=float)


def spread(values: pd.Series[float], sign: str = "") -> str:
    """Return mean and sample standard deviation, as ``82.2 ± 2.6``; with a star for fewer than three values."""
    average = round(values.mean(), 9)  # a tie at the last digit is one, whatever the order of the sum
    if len(values) < len(SEEDS):
        return "" if values.empty else f"{average:{sign}.1f}*"
    return f"{average:{sign}.1f} ± {values.std():.1f}"


def server_seconds(rows: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the CPU seconds of a replay on CIFAR-10, seed 0, beyond those of a method that trains nothing."""
    taken = {row["name"]: row["cpu_s"] for row in rows if (row["data"], row["seed"]) == ("CIFAR-10", 0)}
    trains = REPLAYS.get(name, ("",))[0] in TRAINED and name in taken
    return f"{taken[name] - taken['label-count-ensemble']:.0f}" if trains else ""


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of accuracies, a group for each assumption."""
    lines = [f"| | {' | '.join(DATA)} | CPU s |", f"|---{'|---:' * len(DATA)}|---:|"]
    for group, members in GROUPS.items():
        lines.append(f"| *{group}* |{' |' * len(DATA)} |")
        for name, place in members.items():
            cells = [spread(accuracies(rows, data, place)) for data in DATA]
            lines.append(f"| {name} | {' | '.join(cells)} | {server_seconds(rows, place[0])} |")
    return "\n".join(lines)


def differences(rows: list[dict[str, Any]]) -> str:
    """Return the table of paired differences: Tally with estimated counts, less each rival of its group."""
    lines = [f"| Tally less | {' | '.join(DATA)} |", f"|---{'|---:' * len(DATA)}|"]
    for kind, headline in HEADLINE.items():
        members = GROUPS[f"{UNCHANGED}: {kind}"]
        lines.append(f"| *{kind}* |{' |' * len(DATA)}")
        for name, place in members.items():
            if name != headline:
                cells = [paired(rows, data, members[headline], place) for data in DATA]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def paired(rows: list[dict[str, Any]], data: str, own: Place, rival: Place) -> str:
    """Return :func:`apart` of two rows of the tables."""
    return apart(accuracies(rows, data, own), accuracies(rows, data, rival))


def apart(own: pd.Series[float], rival: pd.Series[float]) -> str:
    """Return the difference of two rows over the seeds that both have, and in how many of them it is positive."""
    found = (own - rival).dropna()  # by the seed
    return "" if found.empty else f"{spread(found, '+')} ({int((found > 0).sum())} of {len(found)})"


def written(text: str, tables: Iterable[str]) -> str:
    """Return a page in whose tables with the same head the rows of the same names are those of these tables."""
    for lines in (table.splitlines() for table in tables):
        rows = {name_of(line): line for line in lines[2:]}
        old, inside, new = text.split("\n"), False, []
        for line in old:
            inside = line == lines[0] or (inside and line.startswith("|"))
            new.append(rows.get(name_of(line), line) if inside else line)
        text = "\n".join(new)
    return text


def name_of(line: str) -> str:
    """Return the name of a row of a table."""
    return line.split("|")[1].strip() if line.startswith("|") else ""


def main() -> None:
    """Measure the missing results, or renew the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, help="where runs and single results are kept")
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument("--data", default="", help="names, separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=OUT, help="receives all results of --dir")
    parser.add_argument("--write", action="store_true", help="renew the pages from --out, measure nothing")
    words = parser.parse_args()
    if words.write:
        rows = read_json(words.out)["rows"]
        for page in PAGES:
            page.write_text(written(page.read_text(), (table(rows), differences(rows))))
        return
    for data in words.data.split(",") if words.data else DATA:
        for seed in SEEDS:
            for name in names(data):
                measured(words.dir, data, seed, name, root=words.root)
                rows = [read_json(path) for path in sorted(words.dir.glob("*-[0-9]-*.json"))]
                write_json(words.out, {"rows": rows})


if __name__ == "__main__":
    main()
