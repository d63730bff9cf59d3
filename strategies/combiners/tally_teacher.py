"""All uploads of a job under Tally's pool: what Tally distils, and the teacher or the class shares of other methods."""

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
    """Return all uploads of a job under Tally's pool, and that pool, which is the ensemble's combiner.

    In the place of a client that the pool leaves out stands another's model, see :func:`with_stand_ins`.

    Args:
        job: Its uploads, builders, seed, input space and device. Label counts may be missing.
        options: Of the pool; None for the defaults.
        fold: See :meth:`.ensemble.Ensemble.from_uploads`.
        precision: The same.

    Raises:
        OneShotError: An upload's weights do not fit its architecture, or its model does not end with a linear layer of
            one output per class; or no model answers noise with numbers to go by.
    """
    ensemble = Ensemble.of_job(job, job.uploads, Mean(), fold=fold, precision=precision)
    pool = fitted_pool(job, ensemble, options or TallyPoolOptions())
    if not bool((pool.weights > 0).all()):
        del ensemble  # two at a time may be too large
        ensemble = Ensemble.of_job(job, with_stand_ins(job.uploads, pool), Mean(), fold=fold, precision=precision)
    ensemble.combiner = pool
    return ensemble, pool


def with_stand_ins(uploads: Sequence[Upload], pool: OpinionPool) -> tuple[Upload, ...]:
    """Return a pool's members with another's upload in the place of each that it leaves out.

    The stand-in has no say either. But gradients pass through every member, and 0 times what is not finite is not 0.

    Args:
        uploads: The members, in their order.
        pool: Their combiner; not all of its weights are 0.
    """
    heard = (pool.weights > 0).tolist()
    stand_in = uploads[heard.index(True)]
    return tuple(upload if one else stand_in for upload, one in zip(uploads, heard, strict=True))
