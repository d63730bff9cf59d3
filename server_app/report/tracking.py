"""A finished run in an experiment tracker: the rows of ``metrics.jsonl``, the table and the settings.

Everything stays on this machine: event files of TensorBoard and an offline run of Weights & Biases in the run folder,
MLflow's files in ``mlruns`` beside it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_app.config import NO_TRACKER
from fl_app.project import FAILURES, one_line

# A tracker reads these at its first import; with them it uploads nothing and sends no report of its use.
_AT_HOME = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "DO_NOT_TRACK": "true",
}
_STEPS = ("epoch", "round")
Scalars = Sequence[tuple[int, Mapping[str, float]]]


def track(
    name: str,
    folder: Path,
    metrics: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    log: Callable[[str], None],
) -> None:
    """Hand a finished run to the tracker; a failure of the tracker is a line of the log, and no failure of the run."""
    if name == NO_TRACKER:
        return
    os.environ.update(_AT_HOME)
    summary = {"accuracy": result["accuracy"], **{f"table/{row['name']}": row["accuracy"] for row in result["table"]}}
    for score, found in result.get("scores", {}).items():
        summary |= {f"scores/{score}/{end}": number for end, number in found.items() if number is not None}
    try:
        place = _WRITERS[name](folder, [*scalars_of(metrics)], summary, settings)
    except FAILURES as error:
        log(f"tracker {name}: not written, {one_line(error)}")
    else:
        log(f"tracker {name}: {place}")


def scalars_of(metrics: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, numbers) of each row of metrics; the step is its epoch or round, else its place."""
    for place, row in enumerate(metrics):
        step = next((int(row[key]) for key in _STEPS if key in row), place)
        numbers = {
            key: float(value)
            for key, value in row.items()
            if key not in _STEPS and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if numbers:
            yield step, numbers


def _tensorboard(folder: Path, scalars: Scalars, summary: Mapping[str, float], settings: Mapping[str, Any]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    place = folder / "tensorboard"
    writer: Any = SummaryWriter(str(place))  # its methods have no types
    for step, numbers in scalars:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
    for key, value in summary.items():
        writer.add_scalar(f"result/{key}", value)
    writer.add_text("settings", "\n".join(f"    {key} = {value!r}" for key, value in settings.items()))
    writer.close()
    return place


def _mlflow(folder: Path, scalars: Scalars, summary: Mapping[str, float], settings: Mapping[str, Any]) -> Path:
    import mlflow

    place = folder.parent / "mlruns"
    client = mlflow.MlflowClient(tracking_uri=place.as_uri())
    known = client.get_experiment_by_name("oneshot-fl")
    experiment = known.experiment_id if known is not None else client.create_experiment("oneshot-fl")
    run = client.create_run(experiment, run_name=folder.name).info.run_id
    for key, value in settings.items():
        client.log_param(run, key, value)
    for step, numbers in scalars:
        for key, value in numbers.items():
            client.log_metric(run, _plain(key), value, step=step)
    for key, value in summary.items():
        client.log_metric(run, _plain(f"result/{key}"), value)
    client.set_terminated(run)
    return place


def _wandb(folder: Path, scalars: Scalars, summary: Mapping[str, float], settings: Mapping[str, Any]) -> Path:
    import wandb

    run = wandb.init(project="oneshot-fl", name=folder.name, dir=str(folder), mode="offline", config=dict(settings))
    for step, numbers in scalars:
        run.log({**numbers, "step": step})
    run.summary.update({f"result/{key}": value for key, value in summary.items()})
    run.finish()
    return folder / "wandb"


def _plain(name: str) -> str:
    """Return a name in the characters that MLflow takes."""
    return re.sub(r"[^\w\-./ ]", "_", name)


_WRITERS: Mapping[str, Callable[[Path, Scalars, Mapping[str, float], Mapping[str, Any]], Path]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
