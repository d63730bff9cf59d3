"""A job's uploads weighted by their numbers of examples, as a teacher: the rows "DW-" of Co-Boosting's Table 4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import OptionError
from ..method import Teacher
from ..teacher.average import example_weights
from ..teacher.ensemble import Ensemble
from .combiners import Weighted

if TYPE_CHECKING:
    from ..method import Job


def build_sized_teacher(job: Job, *, fold: bool = True, precision: str = "float32") -> tuple[Ensemble, Weighted]:
    """Return the ensemble ``sum_k n_k f_k(x) / sum_k n_k`` of a job's uploads, and its combiner.

    Args:
        job: Its uploads, builders and device.
        fold: See :meth:`.ensemble.Ensemble.from_uploads`.
        precision: See :meth:`.ensemble.Ensemble.from_uploads`.

    Raises:
        OneShotError: A client does not tell its examples, or its weights do not fit its architecture.
    """
    check_sizes(job, "teacher")
    combiner = Weighted(example_weights([upload.num_examples for upload in job.uploads]) or [])
    return Ensemble.of_job(job, job.uploads, combiner, fold=fold, precision=precision), combiner


def check_sizes(job: Job, key: str) -> None:
    """Refuse uploads without their numbers of examples.

    Args:
        job: Its uploads may be missing.
        key: The setting that names the teacher.

    Raises:
        OptionError: A client does not tell its examples.
    """
    if silent := [upload.client for upload in job.uploads if upload.num_examples is None]:
        raise OptionError(
            f"{key} is {TEACHER.name!r}, which needs the numbers of examples that these clients did not send: "
            f"{', '.join(silent)}. Choose another teacher"
        )


TEACHER = Teacher("dw-fedens", build_sized_teacher, check_sizes)
