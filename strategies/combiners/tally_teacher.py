"""A job's uploads combined by Tally's pool: Tally's teacher, and the teacher or class shares of other methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..teacher.ensemble import Ensemble
from .combiners import Mean
from .tally_pool import TallyPoolOptions, fitted_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..method import Job, Upload
    from .opinion_pools import OpinionPool


def tally_teacher(
    job: Job, options: TallyPoolOptions | None = None, *, fold: bool = True, precision: str = "float32"
) -> tuple[Ensemble, OpinionPool]:
    """Return the ensemble of a job's uploads under Tally's pool, and that pool, which is the ensemble's combiner.

    If the pool leaves a client out, another client's model takes its place, see :func:`with_stand_ins`.

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


def with_stand_ins(uploads: Sequence[Upload], pool: OpinionPool) -> tuple[Upload, ...]:
    """Return a pool's members, with another member's upload in the place of each that the pool leaves out.

    The stand-in's weight is 0 as well. But gradients pass through every member, and 0 times NaN or Inf is not 0.

    Args:
        uploads: The members, in their order.
        pool: Their combiner; not all of its weights are 0.
    """
    heard = (pool.weights > 0).tolist()
    stand_in = uploads[heard.index(True)]
    return tuple(upload if one else stand_in for upload, one in zip(uploads, heard, strict=True))
