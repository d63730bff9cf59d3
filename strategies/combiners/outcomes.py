"""Builds predicting modules from an outcome or a job."""

from __future__ import annotations

from torch import nn

from ..core.errors import OneShotError
from ..core.seeds import seeded_torch
from ..method import EnsembleSpec, Job, Outcome, Upload
from ..teacher.ensemble import Ensemble
from .combiners import build_combiner


def load_model(outcome: Outcome, job: Job) -> nn.Module:
    """Return a method's result as a module in eval mode: the student, else the ensemble.

    Returns:
        A module from normalised images [B, ch, H, W] to logits [B, C], on the job's device.

    Raises:
        OneShotError: The outcome holds neither, or an ensemble with clients that the job lacks.
    """
    if outcome.student is not None:
        with seeded_torch(job.seed, "load"):
            model = job.builders[job.student]()
        model.load_state_dict(outcome.student)
        return model.to(job.device).eval()
    if outcome.ensemble is None:
        raise OneShotError("the outcome holds neither a student nor an ensemble: nothing to load")
    return build_ensemble(job, outcome.ensemble)


def find_members(job: Job, spec: EnsembleSpec) -> tuple[Upload, ...]:
    """Return the uploads that a spec names, in its order.

    Raises:
        OneShotError: The job lacks a member's upload.
    """
    uploads = {upload.client: upload for upload in job.uploads}
    if missing := [client for client in spec.clients if client not in uploads]:
        raise OneShotError(f"ensemble members without an upload: {', '.join(missing)}; there are {', '.join(uploads)}")
    return tuple(uploads[client] for client in spec.clients)


def build_ensemble(job: Job, spec: EnsembleSpec) -> Ensemble:
    """Build a spec's ensemble from a job's uploads, reading one at a time.

    Raises:
        OneShotError: The job lacks a member's upload.
    """
    members = find_members(job, spec)
    combiner = build_combiner(spec.combiner, spec.weights, job.builders[members[0].architecture])
    return Ensemble.of_job(job, members, combiner, precision=spec.precision)
