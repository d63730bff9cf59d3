"""The page of a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.compare.sources import info_of
from server_app.compare.table import COLUMNS, TEXTS, Line, headline, notes_of
from server_app.report.page import Page, Table, known_facts, plots_of, software_facts
from server_app.report.setting_line import setting_line
from server_app.settings.text import to_toml


def comparison_setting(facts: Mapping[str, Any]) -> str:
    """Return the line below the titles of a comparison: data, split and clients of its runs, seeds of its results."""
    infos = [info_of(Path(run)) for run in facts["runs"]]
    seeds = [cell["seed"] for cell in (*facts["cells"], *facts["own"])]
    return setting_line(
        [info.get("settings", {}) for info in infos], [info.get("num-supernodes") or 0 for info in infos], seeds
    )


def comparison_page(facts: Mapping[str, Any], lines: Sequence[Line]) -> Page:
    """Return the page of a comparison.

    Args:
        facts: The content of compare.json, whose plots lie in its folder.
        lines: The lines of its table.
    """
    folder, notes = Path(facts["compare_dir"]), notes_of(facts)
    scored = [line for line in lines if line.accuracy is not None]
    best = max(scored, key=lambda line: line.accuracy or 0.0, default=None)
    rows = [line.shown() for line in lines]
    table = Table(
        "Results", COLUMNS, rows, texts=TEXTS, note=" ".join(notes[1:]),
        strong=frozenset(place for place, line in enumerate(lines) if line is best),
    )  # fmt: skip
    figures = [] if best is None else [(best.accuracy_text + " %", f"{best.name}, the best here")]
    figures += [(str(len(facts["methods"])), "methods"), (str(len(facts["cells"])), "results computed")]
    settings = " ".join(f"{key}={to_toml(value)}" for key, value in facts["settings"].items())
    own = {"runs": ", ".join(facts["runs"]), "changed settings": settings, "folder": facts["compare_dir"]}
    return Page(
        kind="Comparison",
        title=headline(facts).partition(":")[0],
        setting=comparison_setting(facts),
        figures=figures,
        facts=[*known_facts(own), *software_facts(info_of(Path(facts["runs"][0])))],
        warnings=[facts["error"]] if "error" in facts else [],
        tables=[table],
        plots=plots_of(folder, [facts["plot"], facts["communication_plot"], facts["cost_plot"]]),
        commands=_commands(facts, best),
    )


def _commands(facts: Mapping[str, Any], best: Line | None) -> list[tuple[str, str]]:
    again, more = facts["command"], facts["seeds"] + 2
    found = [("The same with more seeds", again.replace(_seeds(facts["seeds"]), _seeds(more)))]
    if best is not None and best.method in facts["methods"]:
        words = shlex.split(again)
        shared = words[words.index("--seeds") + 2 : words.index("--out")]  # the settings, and a foreign run's own code
        alone = ["oneshot", "replay", facts["runs"][0], "--method", best.method, *shared]
        found.append(("The best of them alone", shlex.join(alone)))
    options = [("All options of a method", f"oneshot methods {name}") for name in facts["methods"][:1]]
    return [*found, *options]


def _seeds(count: int) -> str:
    return f" --seeds {count}"
