"""Turns a cohort of uploads into a verdict on each.

A client is suspect only in comparison with the others. If an honest client with other data could show a sign, further
signs are needed. A client is judged only on classes that it has examples of.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.facts import STATISTICS, Upload, kind_of
from ..core.stage_options import GatekeeperConfig
from ..method import Job, Progress, Silent
from .evidence import TRIGGER_SIZE, Evidence, can_judge_by_images, gather_evidence, usual_size
from .measures import (
    NAN,
    UsualDistance,
    distance_of,
    distances,
    extreme_ratio,
    influence,
    likeness,
    logit_size,
    mapping,
    median,
    nearest_distances,
    pair_agreement,
    ratios,
    robust_scores,
    variation,
)
from .sums import inspect_sums
from .verdicts import (
    BACKDOOR,
    COPY,
    LABEL_FLIP,
    MEASURES,
    RANDOM,
    RATIOS,
    SCALED,
    Finding,
    Inspection,
    VerdictRow,
    some_pairs,
)

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


# Rules that turn a cohort's measures into findings of suspected harm.

LEAST_PAIRS = 2  # others that share known classes with a client: with only one, either of the two may be wrong
ALIKE = 0.3  # least cosine of weights with a common start
UNLIKE = 0.1  # largest cosine of weights without a common start
NORM_RATIO = 3.0  # a layer's norm is suspect above this multiple of the others' median, or below its inverse
LOGIT_RATIO = 20.0  # the size of the logits is suspect above this multiple of the others' median
FLAT_RATIO = 0.1  # predictions are flat if they vary less than this multiple of the others' median
COPY_DISTANCE = 0.05  # two models are copies if their distance is below this multiple of the usual distance
AGREEMENT = 0.2  # a client is suspect below this agreement with the others on classes that both know
TRIGGER_LEAD = 0.7  # a trigger is suspect only below this multiple of the same client's next smallest
TRIGGER_TRANSFER = 0.1  # a trigger is suspect only if it moves at most this share of images in other models
LEAD = 0.2  # of two copies, the original fits its own label counts better by this much


@dataclass(frozen=True)
class Cohort:
    """The measures of all clients.

    Attributes:
        measures: Measure -> value of every client [M]; NaN marks a value that was not measured.
        layers: The layer whose norm is farthest from the others' [M].
        apart: Distances of the weights [M, M]; NaN where the architectures differ.
        agreed: Agreement of each pair of clients on the classes that both know [M, M].
    """

    measures: Mapping[str, Sequence[float]]
    layers: Sequence[str]
    apart: Tensor
    agreed: Tensor


def find_all(cohort: Cohort, evidence: Evidence, arrived: Sequence[str]) -> list[tuple[Finding, ...]]:
    """Return the findings on every client [M], the clearest first."""
    copies, alone = find_copies(cohort, evidence, arrived), find_disagreeing(cohort.agreed, AGREEMENT)
    found = []
    for k in range(len(evidence.clients)):
        own = [copies[k], find_scaled(k, cohort), find_strange(k, cohort, evidence, alone.get(k))]
        if not is_flat(k, cohort):  # every trigger of a flat model is small
            own.append(find_backdoor(k, cohort, evidence))
        found.append(tuple(finding for finding in own if finding is not None))
    return found


def find_scaled(k: int, cohort: Cohort) -> Finding | None:
    """Return a finding if the scale of a client's weights, statistics or logits differs from the others'."""
    norm, statistics = cohort.measures["norm"][k], cohort.measures["statistics"][k]
    logits = cohort.measures["logits"][k]
    if distance_of(norm) > math.log(NORM_RATIO):
        return Finding(SCALED, f"the norm of layer {cohort.layers[k]} is {norm:.3g} times the others'")
    if distance_of(statistics) > 2 * math.log(NORM_RATIO):  # a variance is a square
        return Finding(SCALED, f"the running variances of a layer are {statistics:.3g} times the others'")
    if logits > LOGIT_RATIO:
        return Finding(SCALED, f"the logits are {logits:.3g} times as large as the others' median")
    return None


def is_flat(k: int, cohort: Cohort) -> bool:
    """Return whether a client's predictions hardly differ from image to image."""
    return cohort.measures["variation"][k] < FLAT_RATIO


def is_unlike(k: int, cohort: Cohort) -> bool:
    """Return whether a client's weights are unlike the others', which are like one another."""
    likeness = cohort.measures["likeness"]
    others = median([value for j, value in enumerate(likeness) if j != k])
    return likeness[k] < UNLIKE and others > ALIKE


def find_disagreeing(agreed: Tensor, least: float) -> dict[int, str]:
    """Return the clients that agree too little with the others on the classes that both know, and the reasons.

    Clients are removed one at a time, starting with the one that agrees least. A removed client no longer counts in
    the agreement of the rest.

    Args:
        agreed: Agreement of each pair of clients [M, M]; NaN if they share no class.
        least: A client is a suspect if the median of its row is below this.
    """
    left, found = list(range(len(agreed))), dict[int, str]()
    while left:
        rows = {k: [v for v in agreed[k, left].tolist() if not math.isnan(v)] for k in left}
        medians = {k: median(row) for k, row in rows.items() if len(row) >= LEAST_PAIRS}
        worst = min(medians, key=lambda k: medians[k], default=-1)
        if worst < 0 or medians[worst] >= least:
            break
        found[worst] = f"its agreement with {len(rows[worst])} others on classes that both know is {medians[worst]:.2f}"
        left.remove(worst)
    return found


def find_strange(k: int, cohort: Cohort, evidence: Evidence, alone: str | None) -> Finding | None:
    """Return a finding if a client predicts at random, or other labels than the others for the same images."""
    flat, unlike = is_flat(k, cohort), is_unlike(k, cohort)
    if unlike and (flat or evidence.behaviour is None):
        likeness = cohort.measures["likeness"][k]
        reason = f"its weights have nothing in common with the others' (cosine {likeness:.2f})"
        return Finding(RANDOM, reason + (", and its predictions hardly differ from image to image" if flat else ""))
    if alone is not None and (flat or unlike):
        return Finding(RANDOM, f"{alone}, and its {'predictions are flat' if flat else 'weights are unlike theirs'}")
    if alone is not None:
        return Finding(LABEL_FLIP, alone + _flips(k, evidence))
    return None


def _flips(k: int, evidence: Evidence) -> str:
    behaviour = evidence.behaviour
    if behaviour is None:
        return ""
    theirs = behaviour.makers != k
    predictions = behaviour.inverted[k].argmax(1)
    found, _ = mapping(predictions[theirs], behaviour.labels[theirs], evidence.known[k])
    pairs = [(seen, label) for label, seen in found.items() if seen != label]
    return f"; it predicts {some_pairs(pairs)}" if pairs else ""


def find_backdoor(k: int, cohort: Cohort, evidence: Evidence) -> Finding | None:
    """Return a finding if an unusually small trigger turns images into one class, in this model alone."""
    trigger = evidence.behaviour.triggers[k] if evidence.behaviour is not None else None
    ratio = cohort.measures["trigger"][k]
    if trigger is None or evidence.behaviour is None or not ratio < TRIGGER_SIZE:
        return None
    # A client that knows two classes has a small trigger each way, so that neither leads.
    sizes = sorted(size for size in evidence.behaviour.sizes[k].tolist() if not math.isnan(size))
    leads = len(sizes) > 1 and sizes[0] < TRIGGER_LEAD * sizes[1]
    if not leads or not trigger.transfer <= TRIGGER_TRANSFER:
        return None
    return Finding(
        BACKDOOR,
        f"a change of {trigger.size:.1f} pixels, {ratio:.2g} times the usual, turns its predictions into class "
        f"{trigger.target}; it moves {100 * trigger.transfer:.0f} % of the others'",
    )


def find_copies(cohort: Cohort, evidence: Evidence, arrived: Sequence[str]) -> list[Finding | None]:
    """Return a finding for every client whose weights copy another client's, taken for the original [M]."""
    count, found = len(evidence.clients), list[Finding | None]()
    sound = [k for k in range(count) if find_scaled(k, cohort) is None]
    nearest, distances = nearest_distances(cohort.apart), cohort.apart.tolist()
    kinds = evidence.architectures
    usual_of = {kind: UsualDistance(nearest, [k for k in sound if kinds[k] == kind]) for kind in set(kinds)}
    pairs = {(k, j): usual_of[kinds[k]].without(k, j) for k in range(count) for j in range(count) if k != j}
    near = set()
    for (k, j), usual in pairs.items():
        if distances[k][j] == 0 or distances[k][j] < COPY_DISTANCE * usual:  # without a usual distance: equal ones
            near.add((k, j))
    for k in range(count):
        group = [j for j in range(count) if j == k or (k, j) in near]
        original, why = _original(group, cohort, evidence, arrived)
        if original == k:
            found.append(None)
            continue
        apart, name = float(cohort.apart[k, original]), evidence.clients[original]
        far = f"{100 * apart / pairs[k, original]:.1f} % of the usual distance from {name}" if apart else ""
        found.append(Finding(COPY, f"{far or f'equal to {name} in all weights'}, {why}"))
    return found


def _original(group: Sequence[int], cohort: Cohort, evidence: Evidence, arrived: Sequence[str]) -> tuple[int, str]:
    """Return the original among copies, and the reason: its fit to its own label counts, its arrival, or its name."""
    fits = {k: median([float(v) for j, v in enumerate(cohort.agreed[k]) if j not in group]) for k in group}
    ranked = sorted(group, key=lambda k: (-(-1.0 if math.isnan(fits[k]) else fits[k]), k))
    if len(group) > 1 and fits[ranked[0]] - fits[ranked[1]] > LEAD:
        return ranked[0], "whose label counts the model fits better"
    places = {client: place for place, client in enumerate(arrived)}
    if all(evidence.clients[k] in places for k in group):
        return min(group, key=lambda k: places[evidence.clients[k]]), "which arrived earlier"
    return group[0], "which of the two is the copy is not known"
