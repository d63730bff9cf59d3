"""Turns a cohort of uploads into a verdict on each.

A client is suspect only in comparison with the others. If an honest client with other data could show a sign, further
signs are needed. A client is judged only on classes that it has examples of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core.facts import STATISTICS, kind_of
from ..core.stage_options import GatekeeperConfig
from ..method import Silent
from .evidence import Evidence, can_judge_by_images, gather_evidence, usual_size
from .findings import Cohort, find_all
from .measures import (
    NAN,
    UsualDistance,
    distances,
    extreme_ratio,
    influence,
    likeness,
    logit_size,
    median,
    nearest_distances,
    pair_agreement,
    ratios,
    robust_scores,
    variation,
)
from .sums import inspect_sums
from .verdicts import MEASURES, RATIOS, Inspection, VerdictRow

if TYPE_CHECKING:
    from ..core.facts import Upload
    from ..method import Job, Progress

FEWEST = 3  # of two that differ, neither is known to be the outlier
# The least deviation that scores are divided by, per measure; for ratios, in doublings.
FLOORS = {"agreement": 0.1, "likeness": 0.1, "transfer": 0.1, "influence": 0.02}
FLOOR_OF_RATIOS = 0.25


def inspect(
    job: Job, config: GatekeeperConfig, *, arrived: Sequence[str] = (), progress: Progress | None = None
) -> Inspection:
    """Judge every upload of a job.

    Args:
        job: The job with its uploads; its device must belong to this process. All images follow from its seed.
        config: The numbers of images and steps.
        arrived: The clients in the order of their arrival; empty if unknown.
        progress: Receives the percentage that is done.

    Returns:
        One row per client, in the order of the job.

    Raises:
        UploadError: An upload's weights do not fit its architecture.
    """
    began, count = time.monotonic(), len(job.uploads)
    if len(cohorts := _cohorts(job.uploads)) > 1:  # sums of features are compared with sums of the same backbone
        parts = [inspect(replace(job, uploads=own), config, arrived=arrived, progress=progress) for own in cohorts]
        by_client = {row.client: row for part in parts for row in part.rows}
        notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
        return Inspection(tuple(by_client[one.client] for one in job.uploads), notes, time.monotonic() - began)
    if count < FEWEST:
        note = f"{count} upload{'s' * (count != 1)} cannot be judged: a client is compared with at least 2 others"
        return Inspection(tuple(VerdictRow(u.client, u.architecture, {}, {}) for u in job.uploads), (note,))
    if all(kind_of(upload.architecture) == STATISTICS for upload in job.uploads):
        builder = job.builders.get(job.uploads[0].architecture)
        probe = getattr(builder(), "probe", None) if builder is not None else None
        judged = inspect_sums(job.uploads, arrived, progress or Silent(), probe)
        return replace(judged, seconds=time.monotonic() - began)
    evidence = gather_evidence(job, config, progress or Silent())
    cohort = build_cohort(evidence)
    found = find_all(cohort, evidence, arrived)
    names = [name for name in MEASURES if not all(math.isnan(v) for v in cohort.measures[name])]
    scores = {name: _scores(name, cohort.measures[name]) for name in names}
    rows = tuple(
        VerdictRow(
            client,
            evidence.architectures[k],
            {name: cohort.measures[name][k] for name in names},
            {name: scores[name][k] for name in names},
            found[k],
        )
        for k, client in enumerate(evidence.clients)
    )
    return Inspection(rows, notes_of(job), time.monotonic() - began)


def _cohorts(uploads: Sequence[Upload]) -> list[tuple[Upload, ...]]:
    """Return the sums of each architecture, and all other uploads together."""
    found: dict[str, tuple[Upload, ...]] = {}
    for upload in uploads:
        key = upload.architecture if kind_of(upload.architecture) == STATISTICS else ""
        found[key] = (*found.get(key, ()), upload)
    return list(found.values())


def build_cohort(evidence: Evidence) -> Cohort:
    """Return every measure of every client; weights are compared among equal architectures, behaviour among all."""
    count = len(evidence.clients)
    apart = distances(evidence.vectors)
    kinds = torch.tensor([evidence.architectures.index(name) for name in evidence.architectures])
    apart[kinds[:, None] != kinds] = NAN
    nearest = nearest_distances(apart)
    measures = {name: [NAN] * count for name in MEASURES}
    layers = [""] * count
    for architecture in dict.fromkeys(evidence.architectures):
        members = [k for k, name in enumerate(evidence.architectures) if name == architecture]
        extremes = extreme_ratio([evidence.norms[k] for k in members])
        statistics = extreme_ratio([evidence.statistics[k] for k in members])
        alike = likeness([evidence.vectors[k] for k in members])
        usual = UsualDistance(nearest, members)
        for place, k in enumerate(members):
            measures["nearest"][k] = _nearest(k, apart, nearest, usual)
            measures["likeness"][k] = alike[place]
            if len(members) >= FEWEST:
                layers[k], measures["norm"][k] = extremes[place]
                measures["statistics"][k] = statistics[place][1]
    agreed = torch.full((count, count), NAN, dtype=torch.float64)
    if evidence.behaviour is not None:
        agreed = _behave(evidence, measures)
    return Cohort(measures, layers, apart, agreed)


def _nearest(k: int, apart: torch.Tensor, nearest: Sequence[float], usual: UsualDistance) -> float:
    """Return the distance to the nearest model of equal architecture, as a multiple of the usual nearest distance."""
    if math.isnan(nearest[k]):
        return NAN
    neighbour = apart[k].tolist().index(nearest[k])
    found = usual.without(k, neighbour)
    return nearest[k] / found if found else NAN


def _behave(evidence: Evidence, measures: dict[str, list[float]]) -> torch.Tensor:
    """Fill in the measures that need images; return the agreement of each pair of clients [M, M]."""
    behaviour = evidence.behaviour
    assert behaviour is not None  # noqa: S101  the caller has checked
    classes = evidence.known.shape[1]
    predictions = behaviour.inverted.argmax(2).clamp(max=classes - 1)
    agreed = pair_agreement(predictions, behaviour.labels, behaviour.makers, evidence.known)
    measures["agreement"] = [median(row.tolist()) for row in agreed]
    measures["logits"] = ratios([logit_size(own) for own in behaviour.logits])
    measures["variation"] = ratios([variation(own) for own in behaviour.logits])
    measures["influence"] = influence(behaviour.logits)
    sizes = [NAN if trigger is None else trigger.size for trigger in behaviour.triggers]
    measures["trigger"] = [size / usual_size(sizes, k) for k, size in enumerate(sizes)]
    measures["transfer"] = [NAN if trigger is None else trigger.transfer for trigger in behaviour.triggers]
    return agreed


def _scores(name: str, values: Sequence[float]) -> list[float]:
    if name not in RATIOS:
        return robust_scores(values, FLOORS[name])
    logarithms = [math.log2(value) if value > 0 else -32.0 if value == 0 else NAN for value in values]
    return robust_scores(logarithms, FLOOR_OF_RATIOS)


def notes_of(job: Job) -> tuple[str, ...]:
    """Return the notes on parts of a cohort that could not be judged, with the reasons."""
    notes = []
    if not can_judge_by_images(job):
        notes.append("no images can be made for these uploads: only their weights are judged, not their predictions")
    kinds = [upload.architecture for upload in job.uploads]
    if few := sorted({name for name in kinds if kinds.count(name) < FEWEST}):
        notes.append(f"fewer than {FEWEST} uploads have architecture {', '.join(few)}: their weights are not compared")
    if silent := [upload.client for upload in job.uploads if upload.label_counts is None]:
        shown = ", ".join(silent[:4]) + (f" and {len(silent) - 4} more" if len(silent) > 4 else "")
        notes.append(f"no label counts from {shown}: the classes that they predict count as known")
    return tuple(notes)
