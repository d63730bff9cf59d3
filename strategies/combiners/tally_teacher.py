"""A job's uploads combined by Tally's pool: Tally's teacher, and the teacher or class shares of other methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import OptionError
from ..core.kinds import holds_images
from ..method import Teacher
from ..teacher.ensemble import Ensemble
from .combiners import Mean
from .opinion_pools import with_stand_ins
from .tally_pool import TallyPoolOptions, fitted_pool

if TYPE_CHECKING:
    from ..method import Job
    from .opinion_pools import OpinionPool


def tally_teacher(
    job: Job, options: TallyPoolOptions | None = None, *, fold: bool = True, precision: str = "float32"
) -> tuple[Ensemble, OpinionPool]:
    """Return the ensemble of a job's uploads under Tally's pool, and that pool, which is the ensemble's combiner.

    If the pool leaves a client out, another client's model takes its place: :func:`.opinion_pools.with_stand_ins`.

    Args:
        job: Its uploads, builders, seed, input space and device. Label counts may be missing.
        options: Of the pool; None for the defaults.
        fold: See :meth:`.ensemble.Ensemble.from_uploads`.
        precision: See :meth:`.ensemble.Ensemble.from_uploads`.

    Raises:
        OneShotError: An upload's weights do not fit its architecture, its model does not end with a linear layer of
            C outputs, or no model answers noise with finite logits.
    """
    ensemble = Ensemble.of_job(job, job.uploads, Mean(), fold=fold, precision=precision)
    pool = fitted_pool(job, ensemble, options or TallyPoolOptions())
    if not bool((pool.weights > 0).all()):
        del ensemble  # two ensembles may not fit in memory
        ensemble = Ensemble.of_job(job, with_stand_ins(job.uploads, pool), Mean(), fold=fold, precision=precision)
    ensemble.combiner = pool
    return ensemble, pool


def check_images(job: Job, key: str) -> None:
    """Refuse a job whose clients' models cannot take noise images.

    Args:
        job: Its uploads may be missing.
        key: The setting that names the teacher.

    Raises:
        OptionError: The examples are no images.
    """
    if not holds_images(job.input_shape):
        raise OptionError(
            f"{key} is {TEACHER.name!r}, and the examples' shape is {tuple(job.input_shape)}: allowed with it are "
            "images, because it runs the clients' models on noise"
        )


TEACHER = Teacher("tally", tally_teacher, check_images)
