"""What a run is: the facts that it may not change between its beginning and its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError
from ..core.options import flatten
from .files import plain
from .retired import without_retired
from .run_folder import RunFolder

if TYPE_CHECKING:
    from ..method import Job


def open_run(path: Path, method: str, job: Job, *, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> RunFolder:
    """Make the run folder of a job, or open it to go on.

    Args:
        path: The folder.
        method: Its name.
        job: Its job; what its result depends on must be what the run began with.
        identity: Further facts that must be what the run began with.
        facts: Further facts, written to run.json.

    Raises:
        OptionError: The run there began with other settings.
        StoreError: The folder cannot be used.
    """
    own = {
        "method": method,
        "seed": job.seed,
        "student": job.student,
        "num-classes": job.num_classes,
        "input-shape": job.input_shape,
        "normalization": [job.normalization.mean, job.normalization.std],
        "teacher": job.teacher if isinstance(job.teacher, str) else "method",
        **identity,
        "config": flatten(job.config),
    }
    folder = RunFolder.open_or_create(path, {**own, "threads": job.threads, **facts})
    try:
        _check_same_run(folder, own)
    except OptionError:
        folder.close()
        raise
    return folder


# How long clients are waited for, and for how many, says nothing about what is computed of their answers.
WAITING = ("quorum", "patience_s", "ensemble_patience_s")


def _check_same_run(folder: RunFolder, asked: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that began as another one: its uploads, checkpoint and result would be mixed up."""
    begun, now = folder.info, plain(asked)
    own = {f"{begun.get('method')}.{key}": value for key, value in begun.get("config", {}).items()}
    without_retired({**begun, **own})
    then = {**begun, **begun.get("config", {})}
    for key, value in {**now, **now["config"]}.items():
        if key not in ("config", *WAITING) and then.get(key, value) != value:
            raise OptionError(
                f"{key} is {value!r}, but the run in {folder.path} began with {then[key]!r}: "
                "go on with the same settings, or name another run_dir"
            )
