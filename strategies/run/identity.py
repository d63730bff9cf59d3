"""The identity of a run: the facts that stay the same from its beginning to its end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import OptionError
from ..core.facts import Normalization
from ..core.options import flatten
from ..uploads.checks import Signatures
from .files import plain
from .run_folder import RunFolder

if TYPE_CHECKING:
    from ..method import Job


def open_run(path: Path, method: str, job: Job, *, identity: Mapping[str, Any], facts: Mapping[str, Any]) -> RunFolder:
    """Make the run folder of a job, or open it to resume.

    Args:
        path: The folder.
        method: The method's name.
        job: The job; everything that its result depends on must be as at the run's beginning.
        identity: Further facts that must be as at the run's beginning.
        facts: Further facts, written to run.json.

    Raises:
        OptionError: The run in this folder began with other settings.
        StoreError: The folder cannot be used.
    """
    own = {
        "method": method,
        "seed": job.seed,
        "student": job.student,
        "student-tensors": _tensors(job),
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


def stored_normalization(info: Mapping[str, Any]) -> Normalization:
    """Return the input space of a run's models, given its run.json."""
    mean, std = info["normalization"]
    return Normalization(tuple(mean), tuple(std))


def _tensors(job: Job) -> str:
    """Return the names, shapes and dtypes of the student's tensors in short: another model may have the same name."""
    signature = Signatures(job.builders)[job.student]
    digest = hashlib.sha256(repr(sorted(signature.items())).encode()).hexdigest()
    numbers = sum(math.prod(shape) for shape, _ in signature.values())
    return f"{len(signature)} tensors, {numbers} numbers, {digest[:16]}"


# The wait for clients and the quorum do not change the result that is computed from their answers.
WAITING = ("quorum", "patience-s", "ensemble-patience-s")


def _check_same_run(folder: RunFolder, asked: Mapping[str, Any]) -> None:
    """Refuse to resume a run that began as another one: its uploads, checkpoint and result would mix."""
    begun, now = folder.info, plain(asked)
    then = {**begun, **begun.get("config", {})}
    for key, value in {**now, **now["config"]}.items():
        if key not in ("config", *WAITING) and then.get(key, value) != value:
            raise OptionError(
                f"{key} is {value!r}, but the run in {folder.path} began with {then[key]!r}: "
                "resume with the same settings, or name another run_dir"
            )
