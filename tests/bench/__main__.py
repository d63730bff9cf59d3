"""The benchmark: ``make bench``, ``make bench ARGS=--quick``.

One process, one thread, whole runs excepted. It ends with a table of every ratio, and the machine's load beside it; the
last line is one JSON object: {part: {case: ratio}}, where larger is better. ``--write`` renews the rows of the parts
that were measured in the table of docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import feature_speed
import local_training
import torch
import whole_runs
from measure import row, say
from resources import memory, teacher_speed
from server_stage import TARGETS, Scale, speed

from strategies.core.processor import ARITHMETICS

PAGE, HEAD = (
    Path(__file__).parents[2] / "docs" / "scale.md",
    "| part | case | ratio | target | load |\n|---|---|---:|---:|---:|\n",
)
PARTS = ("speed", "teachers", "memory", "local-training", "features", "whole-runs")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure the shipped code against plain loops of the published work.")
    parser.add_argument("--quick", action="store_true", help="about two minutes: half the teachers, half the batch")
    parser.add_argument("--pool", type=int, default=16, help="batches in the pool of the epoch that is reported")
    parser.add_argument("--repetitions", type=int, default=0, help="of which medians are taken; 0: 3, quick 1")
    parser.add_argument(
        "--precision", choices=ARITHMETICS, default="auto", help="of the shipped generator and teachers"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part (may be given again)")
    parser.add_argument("--write", action="store_true", help="renew these parts' rows in docs/scale.md")
    return parser.parse_args()


def main() -> None:
    """Run the measurements that the command line names."""
    given = arguments()
    torch.set_num_threads(1)
    quick, parts = given.quick, given.only or PARTS
    repetitions = given.repetitions or (1 if quick else 3)
    scale = Scale(pool=given.pool, repetitions=repetitions, precision=given.precision)
    if quick:
        scale = replace(scale, clients=5, batch=64)
    ratios, begun = dict[str, dict[str, float]](), os.getloadavg()[0]
    if "speed" in parts:
        ratios |= speed(scale)
        say()
    if "teachers" in parts:
        teacher_speed(scale)
        say()
    if "memory" in parts:
        memory((5, 10, 20) if quick else (5, 10, 20, 50, 100), batch=16 if quick else 64)
        say()
    if "local-training" in parts:
        ratios["local-training"] = local_training.main()
        say()
    if "features" in parts:
        ratios |= feature_speed.ratio(repetitions)
        say()
    if "whole-runs" in parts:
        ratios["whole-runs"] = whole_runs.main()
        say()
    table(ratios, begun)
    if given.write:
        PAGE.write_text(with_rows(PAGE.read_text(), ratios, max(begun, os.getloadavg()[0])))
    say(json.dumps(ratios))


def table(ratios: Mapping[str, Mapping[str, float]], begun: float) -> None:
    """Print every ratio beside its target, and the load that the machine had."""
    say(f"Every ratio. Load: {begun:.1f} before, {os.getloadavg()[0]:.1f} at the end (1 is the benchmark).")
    widths = (16, 34, 8, 6)
    row(["part", "case", "ratio", "target"], widths)
    for part, cases in ratios.items():
        for case, ratio in cases.items():
            row([part, case, f"{ratio:.2f}x", f"{TARGETS[part]}x" if part in TARGETS else ""], widths)


def with_rows(page: str, ratios: Mapping[str, Mapping[str, float]], load: float) -> str:
    """Return the page with new rows for these parts in its table of ratios; the others stay.

    Args:
        page: Has the table's head.
        ratios: Part -> case -> ratio.
        load: Of the machine, the benchmark included.
    """
    before, after = page.split(HEAD)
    rows = re.match(r"(?:\|.*\n)*", after)[0]  # type: ignore[index]  # it matches always
    kept = [line for line in rows.splitlines() if line.split(" | ")[0].removeprefix("| ") not in ratios]
    new = [
        f"| {part} | {case} | {ratio:.2f} | {TARGETS.get(part, '')} | {load:.1f} |"
        for part, cases in ratios.items()
        for case, ratio in cases.items()
    ]
    return before + HEAD + "".join(f"{line}\n" for line in sorted([*kept, *new])) + after[len(rows) :]


if __name__ == "__main__":
    main()
