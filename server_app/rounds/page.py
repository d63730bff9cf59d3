"""The page of runs in rounds."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.compare.sources import info_of
from server_app.report.page import Page, Table, known_facts, plots_of, software_facts
from server_app.report.setting_line import setting_line
from server_app.rounds.runs import RoundsRun
from server_app.rounds.table import RoundsLine, columns_of, notes_of


def rounds_setting(lines: Sequence[RoundsLine]) -> str:
    """Return the line below the titles of runs in rounds: data, split, clients and seeds."""
    runs = _runs(lines)
    return setting_line(
        [run.shared if "data.name" in run.shared else {} for run in runs],
        [int(run.shared.get("clients", 0)) for run in runs],
        [run.seed for run in runs],
    )


def rounds_page(facts: Mapping[str, Any], lines: Sequence[RoundsLine]) -> Page:
    """Return the page of runs in rounds.

    Args:
        facts: The content of rounds.json, whose plot lies in its folder.
        lines: The lines of its table.
    """
    notes, runs = notes_of(facts["data"], lines), _runs(lines)
    best = max(lines, key=lambda line: sum(run.last for run in line.runs) / len(line.runs))
    table = Table(
        "How soon an accuracy is reached", columns_of(facts["targets"]), [line.shown() for line in lines],
        strong=frozenset({lines.index(best)}), note=" ".join(notes[1:]),
    )  # fmt: skip
    words = ["oneshot", "rounds", *(str(run.path) for run in runs)]
    targets = ",".join(f"{target:g}" for target in facts["targets"]) or "50"
    return Page(
        kind="Rounds",
        title=notes[0].partition(":")[0],
        setting=rounds_setting(lines),
        figures=[(f"{best.last_text} %", f"after the last round, {best.name}"), (str(len(runs)), "runs"),
                 (str(max(run.done for run in runs)), "rounds at most")],
        facts=[*known_facts({"runs": ", ".join(str(run.path) for run in runs), "folder": facts["out"]}),
               *software_facts(info_of(runs[0].path))],
        warnings=[f"unfinished: {run.path.name}, {run.done} of {run.planned} rounds"
                  for run in runs if run.done < run.planned],
        tables=[table],
        plots=plots_of(Path(facts["out"]), [facts["plot"]]),
        commands=[("Other targets", shlex.join([*words, "--targets", targets, "--out", facts["out"]])),
                  ("The table for a program", shlex.join([*words, "--format", "csv"]))],
    )  # fmt: skip


def _runs(lines: Sequence[RoundsLine]) -> list[RoundsRun]:
    return [run for line in lines for run in line.runs]
