"""All uploads of a job under Tally's pool: what Tally distils, and the teacher or the class shares of other methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .combiners import Mean
from .ensemble import Ensemble
from .tally_pool import TallyPoolOptions, fitted_pool

if TYPE_CHECKING:
    from ..method import Job
    from .opinion_pools import OpinionPool


def tally_teacher(
    job: Job, options: TallyPoolOptions | None = None, *, fold: bool = True, precision: str = "float32"
) -> tuple[Ensemble, OpinionPool]:
    """Return all uploads of a job under Tally's pool, and that pool, which is the ensemble's combiner.

    In the place of a client that the pool leaves out stands another's model. It has no say either; but gradients pass
    through every member, and nothing times a number that is not finite is none.

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
    heard = (pool.weights > 0).tolist()
    if not all(heard):
        stand_in = job.uploads[heard.index(True)]
        members = [upload if one else stand_in for upload, one in zip(job.uploads, heard, strict=True)]
        ensemble = Ensemble.of_job(job, members, Mean(), fold=fold, precision=precision)
    ensemble.combiner = pool
    return ensemble, pool
