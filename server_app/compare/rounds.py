"""How soon runs in rounds reach a score, as in Table 2 of FLBoost (Zhang et al., CVPR 2022)."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.compare.rounds_table import RoundsLine, default_targets, line_of, table_of
from server_app.compare.runs_in_rounds import RoundsRun, read_runs, settings_of
from server_app.compare.sources import info_of
from server_app.report.drawing import new_figure, save_all
from server_app.report.page import PAGE_FILE, Page, known_facts, plots_of, report_folder, software_facts, write_page
from server_app.report.tables import setting_line, titled
from strategies.core.durable import make_folder, store_errors
from strategies.core.errors import OptionError
from strategies.core.facts import in_percent
from strategies.run.files import write_json
from strategies.scores.values import LOWER_IS_BETTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def rounds_setting(lines: Sequence[RoundsLine]) -> str:
    """Return the line below the titles of runs in rounds: data, split, clients and seeds."""
    runs = _runs(lines)
    return setting_line(
        [run.shared if "data.name" in run.shared else {} for run in runs],
        [int(run.shared.get("clients", 0)) for run in runs],
        [run.seed for run in runs],
    )


def rounds_page(facts: Mapping[str, Any], lines: Sequence[RoundsLine]) -> Page:
    """Return the page of runs in rounds."""
    table, runs = table_of(facts, lines), _runs(lines)
    name, _, unit = titled(lines[0].metric).partition(", ")
    choose = min if lines[0].metric in LOWER_IS_BETTER else max
    best = choose(lines, key=lambda line: sum(run.last for run in line.runs) / len(line.runs))
    words = ["oneshot", "rounds", *(str(run.path) for run in runs)]
    targets = ",".join(f"{target:g}" for target in facts["targets"]) or "50"
    return Page(
        kind="Rounds",
        title=table.heading.partition(":")[0],
        setting=rounds_setting(lines),
        figures=[(f"{best.last_text} {unit}".rstrip(), f"after the last round, {best.name}"), (str(len(runs)), "runs"),
                 (str(max(run.done for run in runs)), "rounds at most")],
        facts=[*known_facts({"runs": ", ".join(str(run.path) for run in runs), "folder": facts["out"]}),
               *software_facts(info_of(runs[0].path))],
        warnings=[f"unfinished: {run.path.name}, {run.done} of {run.planned} rounds"
                  for run in runs if run.done < run.planned],
        tables=[replace(table, heading=f"How soon a score is reached: {name}", strong=frozenset({lines.index(best)}))],
        plots=plots_of(Path(facts["out"]), [facts["plot"]]),
        commands=[("Other targets", shlex.join([*words, "--targets", targets, "--out", facts["out"]])),
                  ("The table for a program", shlex.join([*words, "--format", "csv"]))],
    )  # fmt: skip


def _runs(lines: Sequence[RoundsLine]) -> list[RoundsRun]:
    return [run for line in lines for run in line.runs]


STYLES = ("-", "--", ":", "-.")
LEGEND_LETTERS = 38  # letters of a name per line
SINGLE = 30  # up to this number of tested rounds, each has a mark


def plot_rounds(lines: Sequence[RoundsLine], targets: Sequence[float]) -> Figure:
    """Draw the mean score of every setting over the rounds, in a band of one sample deviation.

    If a run of a setting is unfinished, a longer run of the setting continues as a thin line.

    Args:
        lines: At least one line.
        targets: Scores in % or nats, drawn as horizontal lines.
    """
    from matplotlib import colormaps

    figure, axes = new_figure(9.5, max(4.5, 1.0 + 0.3 * len(lines)))
    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    marker = "." if max(len(run.tested) for line in lines for run in line.runs) <= SINGLE else ""
    for place, line in enumerate(lines):
        look = {
            "color": palette[place % len(palette)], "linestyle": STYLES[place // len(palette) % len(STYLES)],
        }  # fmt: skip
        _draw(axes, line, look, marker)
    for target in targets:
        axes.axhline(target, color="#9aa5b1", linestyle=":", linewidth=1.0, zorder=0)
        text = f"{target:g}{' %' * in_percent(lines[0].metric)}"
        axes.annotate(
            text, (1.0, target), xycoords=("axes fraction", "data"), xytext=(-2, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize="x-small", color="#5f6b76",
        )  # fmt: skip
    axes.locator_params(axis="x", integer=True)
    tested = [test.number for line in lines for run in line.runs for test in run.tested]
    axes.set_xlim(min(tested) if len(set(tested)) > 1 else 0, max(tested))
    axes.set_xlabel("round")
    axes.set_ylabel(titled(lines[0].metric, "held-out examples"))
    several = any(len(line.runs) > 1 for line in lines)
    axes.set_title("Round by round" + ": mean over the seeds, ± one sample deviation" * several)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
    return figure


def _draw(axes: Axes, line: RoundsLine, look: Mapping[str, Any], marker: str) -> None:
    curve = line.curve()
    numbers, means = [number for number, _, _ in curve], [mean for _, mean, _ in curve]
    seeds = f" ({len(line.runs)} seeds)" * (len(line.runs) > 1)
    name = textwrap.fill(line.name + seeds, LEGEND_LETTERS, subsequent_indent="   ")
    axes.plot(numbers, means, **look, linewidth=1.6, marker=marker, label=name, clip_on=False)
    if len(line.runs) > 1:
        low = [mean - (spread or 0.0) for _, mean, spread in curve]
        high = [mean + (spread or 0.0) for _, mean, spread in curve]
        axes.fill_between(numbers, low, high, color=look["color"], alpha=0.15, linewidth=0)
    last = numbers[-1] if numbers else 0
    for run in line.runs:
        beyond = [test for test in run.tested if test.number >= last]
        if len(beyond) > 1:
            places = [test.number for test in beyond], [test.score for test in beyond]
            axes.plot(*places, **look, linewidth=0.8, alpha=0.6)


FACTS_FILE = "rounds.json"
PLOT = "learning_curves"


def report_rounds(
    runs: Sequence[Path],
    targets: Sequence[float] = (),
    out: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> tuple[dict[str, Any], list[RoundsLine]]:
    """Compare runs in rounds, which may be unfinished; return the content of rounds.json, and the lines of the table.

    Args:
        runs: Their folders, of one data set.
        targets: Scores in % or nats; empty: :func:`server_app.compare.rounds_table.default_targets`.
        out: A folder for rounds.json, the plot of the learning curves and a page, new or of an earlier report; None
            to write nothing.

    Raises:
        OptionError: The runs cannot be compared.
        StoreError: A folder is no run folder, is damaged, or holds no report.
    """
    folder = report_folder(out, FACTS_FILE)
    data, found = read_runs(runs)
    settings = settings_of(found)
    wanted = tuple(sorted(set(targets))) or default_targets(settings)
    lines = [line_of(name, members, wanted) for name, members in settings]
    facts: dict[str, Any] = {
        "data": data,
        "metric": lines[0].metric,
        "targets": list(wanted),
        "table": [line.as_json() for line in lines],
        "runs": [_run_facts(line) for line in lines],
        "out": str(folder or ""),
        "plot": "",
        "results": FACTS_FILE if folder else "",
        "page": PAGE_FILE if folder else "",
    }
    if folder is not None:
        with store_errors(folder):
            make_folder(folder)
        drawn = save_all(folder, {PLOT: lambda: plot_rounds(lines, wanted)}, rounds_setting(lines), log)
        facts["plot"] = "".join(drawn)
        write_page(folder / PAGE_FILE, rounds_page(facts, lines))
        write_json(folder / FACTS_FILE, facts)
    return facts, lines


def _run_facts(line: RoundsLine) -> dict[str, Any]:
    """Return the runs of a line with their curves: rounds, scores in % or nats, MiB per client so far."""
    return {
        "name": line.name,
        "seeds": {
            str(run.seed): {
                "run": str(run.path),
                "rounds": run.done,
                "curve": [[test.number, test.score, test.mib] for test in run.tested],
            }
            for run in line.runs
        },
    }


def read_targets(text: str) -> tuple[float, ...]:
    """Read comma-separated scores in % or nats; an empty text has none.

    Raises:
        OptionError: One is not a number above 0 and at most 100.
    """
    try:
        found = tuple(float(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        found = (0.0,)
    if not all(0.0 < target <= 100.0 for target in found):
        raise OptionError(
            f"--targets is {text!r}: must be comma-separated scores in %, above 0 and at most 100, such as 75,80"
        )
    return found
