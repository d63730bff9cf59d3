"""Rivals with as many epochs as their published code, on digits: ``python tests/bench/long_schedules.py --dir FOLDER``.

The uploads are those of tests/bench/rivals.py, whose table has the short schedules of conf/short.toml. Here a method
has its default settings and the epochs of its authors' code. The defaults are the published settings, but that
IntactOFL moves its images by 8 / 255 in place of 8. A call goes on where an earlier one was cut off. ``--out`` receives
a row per method and seed, with the curve of its accuracy.
tests/bench/feature_tables.py makes the table of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measure import keep, say, stored
from published import finish, outcome_of
from rivals import OUT as SHORT
from rivals import RESULTS, command, oneshot

OUT = RESULTS / "long_schedules.json"
# Name in the table, and of the result whose curve it is -> method, and its epochs.
METHODS = {"IntactOFL": ("intactofl", 200), "Co-Boosting": ("co-boosting", 200)}
DATA, SEEDS = "digits", (0,)
KEY = ("seed", "name")  # of a row
EPOCHS = (10, 20, 50, 100, 150, 200)  # the columns of the table


def measured(folder: Path, seed: int, name: str, *, root: str) -> dict[str, Any]:
    """Return the row of a method, finished or measured on from where it was cut off."""
    run, (method, epochs) = folder / f"{DATA}-{seed}", METHODS[name]
    compared = folder / f"{run.name}-{method}"
    if not (run / "result.json").exists():
        oneshot(*command(run, DATA, seed, "run"), root=root)
    finish(compared, run, method, [f"{method}.epochs={epochs}"], root=root)
    return {"seed": seed, "name": name, **outcome_of(compared)}


def table(found: dict[str, Any]) -> str:
    """Return a row per method and seed: its short schedule, its curve, its last epoch, and its CPU seconds."""
    titles = ["after 12 short epochs", *(f"{epoch}" for epoch in EPOCHS), "best tenth epoch", "CPU s"]
    lines = [f"| | {' | '.join(titles)} |", f"|---{'|---:' * len(titles)}|"]
    for row in found["rows"]:
        curve, (method, _) = dict(row["curve"]), METHODS[row["name"]]
        cells = [short(method, row["seed"], row["name"])]
        cells += [f"{curve[epoch]:.1f}" if epoch in curve else "" for epoch in EPOCHS]
        cells += [f"{max(curve.values()):.1f}", f"{row['server_cpu_s']:.0f}"]
        lines.append(f"| {row['name']}, seed {row['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short(method: str, seed: int, name: str) -> str:
    """Return the accuracy after a method's short schedule on the same uploads, as in the other table."""
    place = (DATA, seed, method)
    return "".join(
        f"{row['accuracy'][name]:.1f}" for row in stored(SHORT) if (row["data"], row["seed"], row["name"]) == place
    )


def main() -> None:
    """Measure the missing rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--dir", type=Path, default=Path("long-schedules"))
    parser.add_argument("--root", default="", help="folder of the data sets")
    parser.add_argument("--names", default=",".join(METHODS), help="names, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    words = parser.parse_args()
    for seed in SEEDS:
        for name in words.names.split(","):
            row = measured(words.dir, seed, name, root=words.root)
            keep(words.out, [row], KEY)
            say(f"seed {seed}, {name}: {row['accuracy']}, {row['server_cpu_s']:.0f} CPU s")


if __name__ == "__main__":
    main()
