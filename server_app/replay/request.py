"""The options of a replay, as the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.config import AppConfig
from strategies.core.errors import OptionError, StoreError, shorten_list
from strategies.core.options import Scalar
from strategies.core.places import expand_user
from strategies.method import TEACHERS, Job, Upload
from strategies.run.run_folder import RunFolder, StoredWeights, load_ensemble
from strategies.run.stage import last_round, usable_uploads
from strategies.uploads.tensors import weights_sha256

if TYPE_CHECKING:
    from strategies.method import State


@dataclass(frozen=True)
class ReplayRequest:
    """The options of a replay.

    Attributes:
        method: The server method; empty for the run's own.
        model: ``module:attribute`` that builds the models of another project's run.
        evaluate: ``module:attribute`` that returns a model's accuracy, for another project's run; empty for no scores.
        folder: The run folder of a new replay; None for one beside the run.
        kept: The file of the scores that replays of the same uploads share; None for no file.
    """

    run: Path
    method: str
    overrides: Mapping[str, Scalar]
    resume: Path | None = None
    model: str = ""
    evaluate: str = ""
    compute: str = "in-process"
    folder: Path | None = None
    kept: Path | None = None


def stored_uploads(run: Path) -> tuple[Upload, ...]:
    """Return the uploads that a replay of a run works with.

    Raises:
        StoreError: The folder is no run folder, or an upload is damaged.
    """
    with RunFolder.open(run, write=False) as folder:
        return usable_uploads(last_round(folder))


def upload_of_each(run: Path) -> dict[str, State]:
    """Return the weights of one stored upload per architecture; all of one have the same names and shapes.

    Raises:
        StoreError: The folder is no run folder, or one of these uploads is damaged.
    """
    with RunFolder.open(run, write=False) as folder:
        # To read and compare all of them takes long, and the server stage does it anyway.
        found = last_round(folder).one_of_each()
    return {upload.architecture: upload.read() for upload in found}


def taught(job: Job, app: AppConfig, info: Mapping[str, Any]) -> Job:
    """Return the job of a replay with the teacher that its settings name.

    Raises:
        OptionError: The run ended without an ensemble, or the named one is of other models.
    """
    if app.teacher != "run":
        return replace(job, teacher=app.teacher if app.teacher in TEACHERS else None)
    run = Path(info["replay-of"])
    try:
        spec, members = load_ensemble(expand_user(app.teacher_run) if app.teacher_run else run, job.builders)
    except StoreError as error:
        raise OptionError(f"setting 'teacher' is 'run': needs a run that ended with an ensemble; {error}") from error
    if app.teacher_run:
        _check_members(app.teacher_run, members, run)
    return replace(job, teacher=spec)


def _check_members(named: str, members: tuple[Upload, ...], run: Path) -> None:
    """Refuse an ensemble of other models than a run's."""
    own = {upload.client: upload for upload in stored_uploads(run)}
    # The head of a client that uploaded sums has weights of its own.
    others = [
        one.client
        for one in members
        if one.client not in own
        or (own[one.client].architecture == one.architecture and _digest(own[one.client]) != _digest(one))
    ]
    if others:
        raise OptionError(
            f"setting 'teacher-run' is {named!r}, whose ensemble has models that {run} does not hold, of "
            f"{shorten_list(others)}: must be a replay of that run"
        )


def _digest(upload: Upload) -> str:
    return upload.read.sha256 if isinstance(upload.read, StoredWeights) else weights_sha256(upload.read())
