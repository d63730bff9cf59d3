"""Tally's pool where it is not Tally that distils it: as the teacher of another method, or as class shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .combiners import Mean
from .ensemble import Ensemble
from .opinion_pools import OpinionPool
from .tally_pool import TallyPoolOptions, set_tally_pool

if TYPE_CHECKING:
    from ..method import Job


def tally_teacher(job: Job, *, fold: bool = True, precision: str = "float32") -> Ensemble:
    """Return all uploads of a job under Tally's pool, with its default options.

    Args:
        job: Its uploads, builders, seed, input space and device. Label counts may be missing.
        fold: See :meth:`.ensemble.Ensemble.from_uploads`.
        precision: The same.

    Raises:
        OneShotError: An upload's weights do not fit its architecture, or its model does not end with a linear layer of
            one output per class.
    """
    ensemble = Ensemble.of_job(job, job.uploads, Mean(), fold=fold, precision=precision)
    set_tally_pool(job, ensemble, job.uploads, TallyPoolOptions())
    return ensemble


def tally_pool(job: Job) -> OpinionPool:
    """Return the pool of :func:`tally_teacher` alone: counts n_k^c, weights w_k and class shares l_k(c)."""
    pool = tally_teacher(job).combiner
    assert isinstance(pool, OpinionPool)  # noqa: S101
    return pool
