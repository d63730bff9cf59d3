"""Compares server methods on the same stored uploads, the same held-out images and the same seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server_app.compare.cell import Cell, facts_of, run_cell
from server_app.compare.report import Line, best_of, comparison_page, differing_line, draw_comparison, lines_of
from server_app.compare.sources import data_of, differing, own_results, scored_alike, with_rows, with_uploads
from server_app.launch.console import oneshot
from server_app.launch.guard import guarded, sigterm_as_interrupt
from server_app.replay.stored import check_replay, unmet_need
from server_app.report.client_scores import chosen_of
from server_app.report.evaluation import StoredAnswers, read_answers
from server_app.report.page import PAGE_FILE, report_folder, write_page
from server_app.settings.catalogue import to_toml
from server_app.settings.choices import CHOICES, options_of
from server_app.settings.read import default_settings, overridden
from strategies.core.durable import make_folder, read_json, store_errors
from strategies.core.errors import OptionError
from strategies.core.gpu import resolve_device
from strategies.core.options import QUICK, Scalar, listed, parse
from strategies.core.processor import all_cores
from strategies.run.files import write_json
from strategies.run.journal import ProgressFile
from strategies.run.results import COMPARISON_FILE
from strategies.run.run_folder import default_run_dir, info_of
from strategies.scores.values import as_json, compared_scores, differences

Log = Callable[[str], None]
Effects = Mapping[str, npt.NDArray[np.float64]]


def jobs_for(cells: Sequence[Cell]) -> int:
    """Return how many cells can run at once: a cell per core, or per ``threads`` cores if given; one with a GPU.

    Each cell keeps its own number of threads, so its figures are those that it has alone.

    Raises:
        ComputeError: A cell needs a GPU that this machine lacks.
    """
    cores, settings = all_cores(), [_settings_of(cell) for cell in cells]
    on_gpu = any(resolve_device(str(each["device"])).partition(":")[0] != "cpu" for each in settings)
    threads = (int(each["threads"]) or 1 for each in settings)
    return 1 if on_gpu else max(1, min(len(cells), cores // max(threads, default=cores)))


def _settings_of(cell: Cell) -> Mapping[str, Any]:
    """Return a cell's settings; a run of another project works on the CPU, with all cores."""
    stored = info_of(cell.run).get("settings")
    begun = {**default_settings(), **stored} if isinstance(stored, dict) else {"device": "cpu", "threads": 0}
    return {**begun, **cell.overrides}


def run_cells(cells: Sequence[Cell], jobs: int, log: Log) -> list[tuple[str, str]]:
    """Run the unfinished cells.

    Returns:
        Title and reason of every failed cell; two may have the same title.
    """
    todo = [(number, cell) for number, cell in enumerate(cells, start=1) if facts_of(cell) is None]
    if jobs > 1:  # a bar would jump from cell to cell
        os.environ.pop(ProgressFile.VARIABLE, None)
    if done := len(cells) - len(todo):
        log(f"{done} cell{'s have' if done > 1 else ' has'} finished before")

    def run(number: int, cell: Cell) -> str:
        log(f"cell {number} of {len(cells)}: {'resumed: ' if cell.begun else ''}{cell.title}")
        name = "" if jobs == 1 else f"{cell.method}, {cell.run_name}: "
        reason = run_cell(cell, token, lambda line: log(f"{name}{line}"))
        if reason:
            log(f"{cell.title} failed: {reason}")
        return reason

    with ThreadPoolExecutor(jobs) as pool, guarded() as (_, token):
        futures = {pool.submit(run, number, cell): cell for number, cell in todo}
        try:
            reasons = [(futures[future].title, future.result()) for future in as_completed(futures)]
        except BaseException:
            # The guardian ends the cells' processes; those that wait must not start.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [(title, reason) for title, reason in reasons if reason]


CELLS_FOLDER = "cells"
_WITH_CLIENTS = "it trains with its clients after their upload; the table has its own runs if they are named"
_FOREIGN = ("model", "evaluate")  # names of another project's code
ALL = "all"


@dataclass(frozen=True)
class Comparison:
    """A requested comparison.

    Attributes:
        methods: Server methods in the order of the table, comma-separated; ``"all"``: all that the uploads permit.
        seeds: Number of seeds: the run's own, the next one, and so on.
        overrides: Settings that differ from the runs'; each goes to the methods that know it.
        model: ``module:attribute`` that builds the models of runs of another project.
        evaluate: ``module:attribute`` that returns a model's accuracy, for such runs; empty for no scores.
        out: The comparison's folder, new or of a comparison to resume; None for a new one beside the first run.
        jobs: Cells at once; 0: as many as the cores hold.
    """

    runs: tuple[Path, ...]
    methods: str
    seeds: int = 1
    overrides: Mapping[str, Scalar] = field(default_factory=dict)
    model: str = ""
    evaluate: str = ""
    out: Path | None = None
    jobs: int = 0


def compare_runs(asked: Comparison, *, log: Log) -> dict[str, Any]:
    """Run every unfinished cell, each in its own process, and return the comparison.

    Returns:
        The content of compare.json. If a cell failed, its status is ``"failed"`` and ``"error"`` has the reason; the
        table still has the other cells.

    Raises:
        OptionError: A name or a setting is wrong, or the uploads do not permit a named method.
        StoreError: A folder is no run folder or no comparison, or is damaged.
        KeyboardInterrupt: SIGINT or SIGTERM came; its text has the command that resumes the comparison.
    """
    with sigterm_as_interrupt():
        parent = asked.runs[0].absolute().parent
        folder = report_folder(asked.out, COMPARISON_FILE) or default_run_dir("", "compare", parent=parent)
        asked = _with_earlier(asked, folder)
        data = data_of(asked.runs)
        own, elsewhere = scored_alike(own_results(asked.runs), asked.overrides)
        methods, left_out = _permitted(asked, folder)
        left_out |= elsewhere
        for name, reason in left_out.items():
            log(f"{name} is left out: {reason}")
        if apart := differing(with_rows(asked.runs, own), methods, asked.overrides):
            log(f"note: {differing_line(apart)}")
        cells = _cells(asked, methods, folder)
        _check(cells, own)
        facts = {
            "status": "unfinished",
            "compare_dir": str(folder),
            "runs": [str(run.absolute()) for run in asked.runs],
            "data": data,
            **{name: getattr(asked, name) for name in _FOREIGN},
            "methods": methods,
            "left_out": left_out,
            "differing": apart,
            "seeds": asked.seeds,
            "settings": dict(asked.overrides),
            "command": _command(asked, folder),
            "own": own,
        }
        with store_errors(folder):
            make_folder(folder)
        write_json(folder / COMPARISON_FILE, facts)
        log(f"comparison of {len(cells)} cells; its folder is {folder}")
        try:
            failures = run_cells(cells, asked.jobs or jobs_for(cells), log)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted. To resume: {facts['command']}") from None
        return _written(folder, facts, cells, failures, log)


def _with_earlier(asked: Comparison, folder: Path) -> Comparison:
    """Add the runs, methods, seeds, settings and code of the folder's earlier comparison."""
    if not (folder / COMPARISON_FILE).exists():
        return asked
    before = read_json(folder / COMPARISON_FILE)
    foreign = {name: before[name] for name in _FOREIGN}
    settings = {**before["settings"], **{f"--{name}": text for name, text in foreign.items() if text}}
    given = {**asked.overrides, **{f"--{name}": text for name in _FOREIGN if (text := getattr(asked, name))}}
    for key, now in sorted(given.items()):
        then = settings.get(key)
        if then != now:
            raise OptionError(
                f"{folder} compares with {key}={_shown(then)}, now it is {_shown(now)}: must be its original settings, "
                "or no settings, or a new folder"
            )
    runs = [Path(run) for run in before["runs"]]
    there = {run.resolve() for run in runs}
    named = listed(asked.methods)
    # Wrong names stay in the text, and are refused where names are checked.
    earlier = [] if ALL in named or not named else [name for name in before["methods"] if name not in named]
    return replace(
        asked,
        runs=(*runs, *(run for run in asked.runs if run.resolve() not in there)),
        methods=",".join([*earlier, asked.methods]),
        seeds=max(asked.seeds, before["seeds"]),
        overrides=before["settings"],
        **foreign,
    )


def _shown(value: Scalar | None) -> str:
    return "not set" if value is None else to_toml(value)


def _permitted(asked: Comparison, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the methods to compare, and why others are left out; refuse a named one that is not possible."""
    names = listed(asked.methods)
    every = names == [ALL]
    if not names or (ALL in names and not every):
        raise OptionError(f"--methods is {asked.methods!r}: must name methods, or be {ALL!r} alone")
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(f"--methods names {twice[0]!r} twice: must name each method once")
    methods = [CHOICES[name].name for name in (CHOICES if every else names)]
    left_out: dict[str, str] = {}
    sources = with_uploads(asked.runs)
    if not sources:
        return [], {} if every else dict.fromkeys(methods, "the runs hold no uploads, but their own results alone")
    if every:
        found = {name: CHOICES[name].method for name in methods}
        left_out = {name: _WITH_CLIENTS for name, method in found.items() if method and method.client_phase}
    for name, run in ((name, run) for name in methods for run in sources):
        reason = "" if name in left_out else unmet_need(replace(_cell(asked, run, name, folder).request(), resume=None))
        if reason and not every:
            raise OptionError(f"{run}: {reason}")
        if reason:
            left_out[name] = reason.partition(". Choose")[0]
    if len(left_out) == len(methods):
        raise OptionError(f"the uploads permit no method: {methods[0]}: {left_out[methods[0]]}")
    return [name for name in methods if name not in left_out], left_out


def _cells(asked: Comparison, methods: Sequence[str], folder: Path) -> list[Cell]:
    """Return the cells, all methods of a seed before the next seed; methods without random draws have one seed."""
    return [
        cell
        for more in range(asked.seeds)
        for run in with_uploads(asked.runs)
        for method in methods
        if _draws(cell := _cell(asked, run, method, folder, more)) or more == 0
    ]


def _draws(cell: Cell) -> bool:
    method, options = CHOICES[cell.method], overridden(info_of(cell.run).get("settings") or {}, cell.overrides)
    random = method.plan(parse(method.config, options, method.name, str(options.get("preset", QUICK)))).random
    return method.kind == "student" if random is None else random


def _cell(asked: Comparison, run: Path, method: str, folder: Path, more: int = 0) -> Cell:
    """Return the cell of a method on a run, with the first seed plus ``more``."""
    info = info_of(run)
    # Cells do not differ by other methods' settings.
    others = options_of(CHOICES) - options_of([method])
    own = {key: value for key, value in asked.overrides.items() if key not in others}
    if "method" in own:
        raise OptionError(f"setting 'method' is {own['method']!r}: name the methods by --methods")
    seed = own.pop("seed", info["seed"])
    if type(seed) is not int:
        raise OptionError(f"setting 'seed' is {seed!r}: must be a whole number at least 0")
    name = f"{run.resolve().name}-{info['id'][:6]}"
    place = folder / CELLS_FOLDER / name / f"{method}-seed{seed + more}"
    return Cell(
        run.absolute(), method, seed + more, place, own, asked.model, asked.evaluate, _run_name(run, asked.runs)
    )


def _run_name(run: Path, runs: Sequence[Path]) -> str:
    """Return the shortest end of a run's path that no other run has, for folders of one name lie in several places."""
    own, others = run.absolute().parts, {other.absolute().parts for other in runs} - {run.absolute().parts}
    ends = (size for size in range(1, len(own)) if all(other[-size:] != own[-size:] for other in others))
    return str(Path(*own[-next(ends, len(own)) :]))


def _command(asked: Comparison, folder: Path) -> str:
    """Return the command that resumes a comparison."""
    words = ["compare", *map(str, asked.runs), "--methods", asked.methods, "--seeds", str(asked.seeds)]
    for key, value in asked.overrides.items():
        words += ["--set", f"{key}={to_toml(value)}"]
    words += ["--model", asked.model] if asked.model else []
    words += ["--evaluate", asked.evaluate] if asked.evaluate else []
    return oneshot(*words, "--out", folder)


def _written(
    folder: Path, facts: Mapping[str, Any], cells: Sequence[Cell], failures: Sequence[tuple[str, str]], log: Log
) -> dict[str, Any]:
    """Write compare.json and the plots; return the content of compare.json."""
    facts = {**facts, "cells": [found for cell in cells if (found := facts_of(cell)) is not None]}
    lines = lines_of([*facts["cells"], *facts["own"]])
    facts |= _to_best(facts, lines)
    result = {
        **facts,
        "status": "failed" if failures else "finished",
        **({"error": _failed(failures, facts["command"])} if failures else {}),
        "table": [{**line.as_json(), "to_best": facts["to_best"].get(line.name)} for line in lines],
        **draw_comparison(folder, facts, lines, log),
        "page": PAGE_FILE,
    }
    _keep(result, lines)
    return result


def with_evaluations(comparison: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a comparison with the clients' scores of its results, also written into its folder."""
    kept = ("run_dir", "method", "seed", "evaluation")
    scored = [{key: each[key] for key in kept} for each in results]
    found = {**comparison, "results": scored, "chosen": chosen_of(scored)}
    _keep(found, lines_of([*comparison["cells"], *comparison["own"]]))
    return found


def _keep(facts: Mapping[str, Any], lines: Sequence[Line]) -> None:
    folder = Path(facts["compare_dir"])
    write_page(folder / PAGE_FILE, comparison_page(facts, lines))
    write_json(folder / COMPARISON_FILE, facts)


def _to_best(facts: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """Return how much better every line is than the best one on the same held-out examples.

    Lines of other runs than the best one have no differences, nor have runs with other held-out examples.

    Returns:
        ``best``, the best line and the score that it is best by: the headline score, or the accuracy if results of
        earlier versions are among them. ``to_best``, the differences in it by line. ``differences``, those in every
        score, by line and score.
    """
    effects: dict[str, dict[str, list[Effects]]] = {}  # line -> run -> its results' effects
    stored = dict[str, StoredAnswers]()
    places = [(cell, cell["run_dir"]) for cell in facts["cells"]] + [(own, own["run"]) for own in facts["own"]]
    for entry, place in places:
        answers = read_answers(Path(place))
        if answers.num_classes or answers.digest not in stored:
            stored[answers.digest] = answers
        for row in entry["outcomes"]:
            if (found := answers.effects.get(row.get("stored", row["name"]))) is not None:
                effects.setdefault(row["name"], {}).setdefault(entry["run"], []).append(found)
    if len(stored) > 1:
        return {"to_best": {}}
    means = {name: _means(runs) for name, runs in effects.items()}
    scored = [line for line in lines if line.accuracy is not None and line.name in means]
    headline = all(line.metric in compared_scores(means[line.name].keys()) for line in scored)
    best = best_of(scored) if headline else max(scored, key=lambda line: line.accuracy or 0.0)
    if best is None:
        return {"to_best": {}}
    (held_out,) = stored.values()
    apart = {
        line.name: as_json(
            differences(
                means[best.name], means[line.name], held_out.labels, held_out.num_classes, held_out.groups
            )
        )
        for line in scored
        if line is not best and effects[line.name].keys() == effects[best.name].keys()
    }  # fmt: skip
    metric = best.metric if headline else "accuracy"
    return {
        "best": {"name": best.name, "metric": metric},
        "to_best": {name: scores[metric] for name, scores in apart.items()},
        "differences": apart,
    }


def _means(runs: Mapping[str, Sequence[Effects]]) -> Effects:
    """Return the means over the runs of the means over a run's results, of the effects that all have."""
    every = [each for found in runs.values() for each in found]
    return {
        name: np.mean([np.mean([each[name] for each in found], axis=0) for found in runs.values()], axis=0)
        for name in every[0]
        if all(name in each for each in every)
    }


def _failed(failures: Sequence[tuple[str, str]], command: str) -> str:
    (title, reason), *others = failures
    more = f" (and {len(others)} more)" if others else ""
    return f"a cell failed{more}: {title}: {reason.rstrip('.')}. To resume: {command}"


def _check(cells: Sequence[Cell], own: Sequence[Mapping[str, Any]]) -> None:
    """Refuse wrong settings, cells that began under other settings, and marked results beside others."""
    marks: dict[str, str] = {facts["method"]: "" for facts in own}
    for cell in cells:
        try:
            marks[cell.method] = check_replay(cell.request())
        except OptionError as error:
            raise OptionError(f"{cell.folder}: {error}" if cell.begun else str(error)) from error
    if len(set(marks.values())) > 1:
        method, mark = next((method, mark) for method, mark in marks.items() if mark)
        others = ", ".join(name for name in marks if name != method)
        raise OptionError(f"method {method!r} is {mark} with these options: must stand in no table with {others}")
