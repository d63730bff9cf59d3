"""The end of a run: scores, result.json, report, and the table that is printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from server_app.build import Settings
from server_app.evaluation import HeldOut, Row, best_accuracy, evaluate
from server_app.report import client_weights, model_card, plot_all
from strategies.options import flatten
from strategies.stage import TRAFFIC_FILE, StageReport, kept_digest, kept_round
from strategies.store.files import atomic_write, read_json
from strategies.store.run_folder import RoundFolder, RunFolder

KIB, MIB = 2**10, 2**20


def finish(
    folder: RunFolder,
    settings: Settings,
    report: StageReport,
    held_out: HeldOut,
    *,
    seconds: Mapping[str, float],
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Score a finished server stage and write everything that people read about it.

    Args:
        folder: The run folder, open for writing.
        settings: The run's settings.
        report: The server stage.
        held_out: The images that were kept from every client.
        seconds: Wall time per phase; what is spent here is added to "evaluation" and "app".
        log: Takes a line for the user.

    Returns:
        The result, as written to result.json.
    """
    began = time.monotonic()
    rows = evaluate(report, settings.method.name, held_out, log=log)
    metrics = folder.round(kept_round(folder)).metrics() if report.outcome.student is not None else []
    # A method's own result is the last row; with both outcomes that is the student.
    accuracy = rows[-1].accuracy
    refused = [refusal for each in _rounds(folder) for refusal in each.refused()]
    result: dict[str, Any] = {
        "status": "finished",
        "run_dir": str(folder.path),
        "method": settings.method.name,
        "seed": settings.app.seed,
        **({"scaled": settings.scaled} if settings.scaled else {}),
        "accuracy": accuracy,
        "best_accuracy": best_accuracy(metrics, accuracy),
        "table": [row.as_json() for row in rows],
        "uploads": len(report.job.uploads),
        "refused": len(refused),
        "refusals": refused,
        "mib_up_per_client": _mib_per_client(folder, "up"),
        "mib_down_per_client": _mib_per_client(folder, "down"),
        "seconds": {},  # with those of the report, below
        "weights_sha256": kept_digest(folder),
        **({"client_weights": weights} if (weights := client_weights(report.outcome)) else {}),
        "resumed_at": report.resumed_at,
    }
    _write_report(folder, settings, report, rows, metrics, result)
    spent = time.monotonic() - began
    phases = {**seconds, **{phase: seconds.get(phase, 0.0) + spent for phase in ("evaluation", "app")}}
    result["seconds"] = {phase: round(value, 2) for phase, value in phases.items()}
    folder.write_result(result)
    return result


def _write_report(
    folder: RunFolder,
    settings: Settings,
    report: StageReport,
    rows: list[Row],
    metrics: list[dict[str, Any]],
    result: dict[str, Any],
) -> None:
    options = flatten(settings.method_config, settings.method.name)
    facts = {"weights_sha256": result["weights_sha256"], "options": options}
    atomic_write(folder.path / "model_card.md", model_card(settings.method, report, rows, facts).encode())
    result["plots"] = plot_all(folder.path, report, rows, metrics)


def _rounds(folder: RunFolder) -> list[RoundFolder]:
    return [folder.round(n) for n in range(1, 2 + len(list(folder.path.glob("round-*"))))]


def _mib_per_client(folder: RunFolder, way: str) -> float:
    """Return what a client sent ("up") or got ("down") on average, over all rounds and restarts; a replay moves none.

    Six digits, about a byte: a request is a few hundred of them.
    """
    moved: dict[str, int] = {}
    for file in (each.path / TRAFFIC_FILE for each in _rounds(folder)):
        for client, amount in (read_json(file)[way] if file.exists() else {}).items():
            moved[client] = moved.get(client, 0) + amount
    return round(sum(moved.values()) / len(moved) / MIB, 6) if moved else 0.0


def describe_failure(folder: RunFolder, settings: Settings, error: Exception) -> dict[str, Any]:
    """Return the result of a run that failed; what came is kept, and the run can be resumed."""
    return {
        "status": "failed",
        "error": str(error),
        "run_dir": str(folder.path),
        "method": settings.method.name,
        "seed": settings.app.seed,
        "uploads": len(_rounds(folder)[-1].held()),
        "refusals": _rounds(folder)[-1].refused(),
    }


def table_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as plain lines."""
    width = max((len(str(row["name"])) for row in result["table"]), default=0)
    lines = [f"{row['name']:<{width}}  {row['kind']:<8}  {row['accuracy']:6.2f} %" for row in result["table"]]
    lines += [f"scaled: {scaled_line(result['scaled'])}"] if "scaled" in result else []
    return [*lines, moved_line(result), f"run folder: {result['run_dir']}"]


def scaled_line(scaled: Mapping[str, Sequence[Any]]) -> str:
    """Return which schedules are shorter than they were set: ``client.epochs 30 instead of 300``."""
    return ", ".join(f"{key} {run} instead of {was}" for key, (was, run) in scaled.items())


def moved_line(result: Mapping[str, Any]) -> str:
    """Return what every client sent and got, in a unit that shows it: ``240.4 KiB up, 150 B down per client``."""
    return f"{_size(result['mib_up_per_client'])} up, {_size(result['mib_down_per_client'])} down per client"


def _size(mib: float) -> str:
    amount = mib * MIB
    if amount >= MIB:
        return f"{mib:.1f} MiB"
    return f"{amount / KIB:.1f} KiB" if amount >= KIB else f"{amount:.0f} B"
