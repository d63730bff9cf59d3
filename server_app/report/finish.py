"""The end of a run: scores, result.json, report, and the printed table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from server_app.report.card import front_matter, load_code, model_card
from server_app.report.client_scores import client_lines, client_rows, plot_clients
from server_app.report.communication import Cost, cost_of, moved_in, moved_lines, points_of, rounds_in
from server_app.report.drawing import save_all
from server_app.report.evaluation import Row, best_score, evaluate, write_answers
from server_app.report.gatekeeping import attack_facts, attack_lines, plot_verdict, verdict_facts, verdict_lines
from server_app.report.page import PAGE_FILE, write_page
from server_app.report.plots import client_weights, run_plots, score_plots
from server_app.report.run_page import run_page, run_setting
from server_app.report.tables import (
    headline,
    headline_cells,
    privacy_facts,
    privacy_lines,
    scored_on,
    unit_of,
    unscored_lines,
    worded,
)
from server_app.report.tracking import track
from server_app.settings.read import Settings, scaled_line
from server_app.settings.server_data import HeldOut, Scorer
from strategies.core.durable import atomic_write
from strategies.core.errors import OptionError
from strategies.core.facts import STATISTICS, is_head
from strategies.core.stage_options import RIDGE
from strategies.method import Job, Outcome
from strategies.run import CARD_FILE
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport, last_round, pinned_clients, result_digest
from strategies.teacher.last_layer import check_solvable
from strategies.uploads.needs import find_fitting_methods


def finish(  # noqa: PLR0913  everything that a result consists of
    folder: RunFolder,
    settings: Settings,
    report: StageReport,
    held_out: Scorer | None,
    *,
    seconds: Mapping[str, float],
    log: Callable[[str], None],
    kept: Path | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Score a finished server stage, write its result, model card and plots, and return the result.

    Args:
        held_out: The held-out images, which no client holds; None for a server without any.
        seconds: Wall time per phase; the time of this function is added to "evaluation" and "app".
        kept: The file of scores that methods on the same uploads share; None without one.
        evaluation: The scores on the clients' own examples, see :mod:`.client_scores`; None where none were asked.
    """
    began = time.monotonic()
    if held_out is not None:
        rows = evaluate(report, settings.choice.name, held_out, log=log, kept=kept, averaging=settings.averaging)
    else:
        rows = client_rows(evaluation or {}, settings.choice.titled(report.job.config), settings.choice.kind)
    if isinstance(held_out, HeldOut):
        write_answers(folder.path, rows, held_out, report.job.num_classes)
    scored = bool(rows)
    rows = rows if any(row.accuracy is not None or row.scores for row in rows) else []
    # The last row is the method's own result: the student, if it has both outcomes. Without scores there is none.
    own = rows[-1] if rows else Row(settings.choice.title, settings.choice.kind, None)
    accuracy, epochs = own.accuracy, own_epochs(report.outcome, _metrics(folder))
    metric = settings.app.metric
    if accuracy is None and own.scores and metric not in own.scores:
        metric = next(iter(own.scores))
    refused, cost = [refusal for each in rounds_in(folder) for refusal in each.refused()], cost_of(folder)
    result: dict[str, Any] = {
        **bare_result(folder, settings.choice.name, report, {}),  # the seconds are filled below, with the report's own
        **({"scaled": settings.scaled} if settings.scaled else {}),
        "accuracy": accuracy,
        "best_accuracy": best_score(epochs, accuracy),
        "best_score": best_score(epochs, headline(own.as_json(), metric), metric),
        "metric": metric,
        "scores": dict(own.scores),
        "details": dict(own.details),
        "table": [row.as_json() for row in rows],
        "uploads": len(pinned_clients(last_round(folder)) or report.job.uploads),
        "refused": len(refused),
        "refusals": refused,
        **_of_clients(settings, report, held_out, own),
        **({"evaluation": dict(evaluation)} if evaluation else {}),
        **({} if rows else {"unscored": _why_unscored(settings, scored=scored, by_clients=evaluation is not None)}),
    }
    result["plots"] = _reported(folder, settings, report, rows, result=result, cost=cost, log=log)
    spent = dict.fromkeys(("evaluation", "app"), time.monotonic() - began)
    result["seconds"] = _rounded({name: seconds.get(name, 0.0) + spent.get(name, 0.0) for name in {**seconds, **spent}})
    fitting = find_fitting_methods(report.job)
    page = run_page(folder, result, load_code(report), fitting, solvable=_is_solvable(report.job))
    write_page(folder.path / PAGE_FILE, page)
    folder.write_result(result)
    track(settings.app.tracker, folder.path, _metrics(folder), result, settings.flat, log=log)
    return result


def _why_unscored(settings: Settings, *, scored: bool, by_clients: bool) -> str:
    if scored:
        return "no score is a finite number"
    if by_clients:
        return "no client has scored the result"
    if settings.app.model.train and not settings.app.model.evaluate:
        return "'model.evaluate' names no function that scores a model"
    if settings.app.evaluate.on == "none":
        return "'evaluate.on' is 'none'"
    return "the server has no held-out examples"


def _is_solvable(job: Job) -> bool:
    """Return whether sums of its inputs can solve the last layer of a job's student."""
    try:
        check_solvable(job, "finish", RIDGE)
    except OptionError:
        return False
    return not is_head(job.student)


def _metrics(folder: RunFolder) -> list[dict[str, Any]]:
    return last_round(folder).metrics()


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {phase: round(value, 2) for phase, value in seconds.items()}


def _of_clients(settings: Settings, report: StageReport, held_out: Scorer | None, own: Row) -> dict[str, Any]:
    """Return a result's entries on classes, attackers and privacy, without the empty ones."""
    if held_out is not None:
        classes = list(held_out.classes)
    else:  # the clients' scores have the names, or numbers where there are none
        classes = [row["class"] for row in own.details.get("classes", ())]
    found = {
        "classes": [] if classes == [str(label) for label in range(len(classes))] else classes,
        "attack": attack_facts(settings.app.attack, report, held_out) if isinstance(held_out, HeldOut) else {},
        "privacy": privacy_facts(settings.app.privacy, sums=settings.choice.uploads == STATISTICS),
    }
    return {key: facts for key, facts in found.items() if facts}


def _reported(
    folder: RunFolder,
    settings: Settings,
    report: StageReport,
    rows: Sequence[Row],
    *,
    result: Mapping[str, Any],
    cost: Cost | None,
    log: Callable[[str], None],
) -> list[str]:
    """Write the model card and the plots; return the names of the plots."""
    setting, metrics, where = run_setting(folder.info, result), _metrics(folder), scored_on(result)
    facts = {
        "weights_sha256": result["weights_sha256"],
        "options": settings.options,
        "notes": [*attack_lines(result.get("attack", {})), *privacy_lines(result.get("privacy", {}))],
        "where": where,
        "gatekeeper": result.get("gatekeeper", {}),
        "classes": result.get("classes", ()),
        "metrics": metrics,
        "setting": setting,
    }
    head = front_matter(settings.choice, report.job, folder.info, rows, where)
    atomic_write(
        folder.path / CARD_FILE,
        f"{head}{model_card(settings.choice, report, rows, facts)}".encode(errors="backslashreplace"),
    )
    points = points_of(settings.choice, rows, metrics, cost, result["metric"]) if rows and cost is not None else []
    own = own_epochs(report.outcome, metrics)
    plots = run_plots(report, rows, own, points, classes=facts["classes"], metric=result["metric"], where=where)
    plots |= score_plots(report.job, result["details"])
    if (evaluation := result.get("evaluation", {})).get("clients"):
        plots["clients"] = partial(plot_clients, evaluation)
    plots["gatekeeper"] = partial(plot_verdict, facts["gatekeeper"])
    return save_all(folder.path / "report", plots, setting, log)


def _moved(folder: RunFolder, cost: Cost | None) -> dict[str, Any]:
    """Return the traffic of a run's messages, and the cost of its result, if known."""
    moved = Cost(moved_in(folder)).as_json()["total"]
    means = {key: moved[key] for key in ("mib_up_per_client", "mib_down_per_client")}
    return {**means, **({"communication": cost.as_json()} if cost is not None else {})}


def own_epochs(outcome: Outcome, metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of the metrics whose accuracies are the result's own.

    Rounds with the clients, whose rows have their traffic, train the ensemble if the method has one, else the student.
    The epochs of a server stage train the student.
    """
    rounds = [row for row in metrics if "mib_per_client" in row]
    if outcome.student is None:
        return rounds
    return list(metrics) if outcome.ensemble is None else [row for row in metrics if "mib_per_client" not in row]


def bare_result(target: RunFolder, name: str, report: StageReport, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the result of a foreign run's replay, without scores, because its held-out images are missing."""
    return {
        "status": "finished",
        "run_dir": str(target.path),
        "method": name,
        "seed": report.job.seed,
        "accuracy": None,
        "best_accuracy": None,
        "best_score": None,
        "table": [],
        "uploads": len(report.job.uploads),
        "refused": 0,
        "refusals": [],
        **_moved(target, cost_of(target)),
        "seconds": _rounded(seconds),
        "work": dict(report.outcome.work),
        "threads": {str(epoch): count for epoch, count in report.outcome.threads.items()},
        "weights_sha256": result_digest(target),
        **({"client_weights": weights} if (weights := client_weights(report.outcome)) else {}),
        "resumed_at": report.resumed_at,
        **verdict_facts(last_round(target)),
        "plots": [],
    }


def describe_failure(folder: RunFolder, settings: Settings, error: Exception) -> dict[str, Any]:
    """Return the result of a failed run; its uploads are kept, and it can be resumed."""
    last = rounds_in(folder)[-1]
    return {
        "status": "failed",
        "error": str(error),
        "run_dir": str(folder.path),
        "method": settings.choice.name,
        "seed": settings.app.seed,
        "uploads": len(last.held()),
        "refusals": last.refused(),
        **verdict_facts(last),
    }


def table_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as plain lines."""
    width = max((len(str(row["name"])) for row in result["table"]), default=0)
    metric = result.get("metric", "accuracy")
    lines = [f"{worded(metric)} on {scored_on(result)}"] if result["table"] else []
    lines += [f"{row['name']:<{width}}  {row['kind']:<8}  {_headline_text(row, metric)}" for row in result["table"]]
    lines += [*unscored_lines(result), *(client_lines(result["evaluation"]) if "evaluation" in result else ())]
    lines += [f"scaled: {scaled_line(result['scaled'])}"] if "scaled" in result else []
    lines += attack_lines(result.get("attack", {})) + privacy_lines(result.get("privacy", {}))
    lines += verdict_lines(result.get("gatekeeper", {}))
    return [*lines, *moved_lines(result), f"run folder: {result['run_dir']}"]


def _headline_text(row: Mapping[str, Any], metric: str) -> str:
    value, interval = headline_cells(row, metric)
    return f"{value:>6} {unit_of(metric) or metric}" + ("" if interval == "-" else f"  ({interval})")
