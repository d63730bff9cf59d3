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

    Args:
        job: Its uploads, builders, seed, input space and device. Label counts may be missing.
        options: Of the pool; None for the defaults.
        fold: See :meth:`.ensemble.Ensemble.from_uploads`.
        precision: The same.

    Raises:
        OneShotError: An upload's weights do not fit its architecture, or its model does not end with a linear layer of
            one output per class; or no model answers noise with finite numbers.
    """
    ensemble = Ensemble.of_job(job, job.uploads, Mean(), fold=fold, precision=precision)
    ensemble.combiner = pool = fitted_pool(job, ensemble, options or TallyPoolOptions())
    return ensemble, pool
