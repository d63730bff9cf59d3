"""Rules that turn a cohort's measures into findings of suspected harm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .evidence import TRIGGER_SIZE, Evidence
from .measures import UsualDistance, distance_of, mapping, median, nearest_distances
from .verdicts import BACKDOOR, COPY, LABEL_FLIP, RANDOM, SCALED, Finding, some_pairs

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
    near = {(k, j) for (k, j), usual in pairs.items() if _are_copies(distances[k][j], usual)}
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


def _are_copies(apart: float, usual: float) -> bool:
    """Return whether two models are copies; without a usual distance only equal ones are."""
    return apart == 0 or apart < COPY_DISTANCE * usual


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
