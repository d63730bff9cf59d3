"""Judges uploads of feature sums by their class means, their diagonals and the number of examples that they claim.

A client with noise in its sums is not judged: one draw of the noise is larger than any of these signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.fingerprint import probe_warning
from ..method import Progress, Upload
from .measures import NAN, median, robust_scores
from .verdicts import COPY, LABEL_FLIP, RANDOM, SCALED, Finding, Inspection, VerdictRow, some_pairs

LEAST = 10  # examples of a class that a client and the others must have, for its mean to be compared
APART = 0.05  # a client is suspect from this distance of its class means, in units of the variance within classes,
DEVIATIONS = 6.0  # beyond so many deviations of an honest client's distance by chance,
DIMENSIONS = 10.0  # if features vary within a class as in so many independent directions, which few backbones go below;
LEAD = 5.0  # which must also be this multiple of the others' median
RENAMED = 0.5  # its labels are exchanged if the nearest means of other classes bring the distance below this share
CLAIM = 20.0  # a claimed number of examples is suspect above this multiple of the others' median
EQUAL = 1e-6  # relative distance of the mean squares of features, below which two clients hold the same examples
FLOORS = {"apart": 0.01, "claim": 1.0}


@dataclass(frozen=True)
class ComparedSums:
    """The part of a client's sums that is compared, in float64.

    Attributes:
        counts: n_kc [C].
        sums: S_k [C, d].
        squares: The diagonal of G_k [d].
    """

    counts: Tensor
    sums: Tensor
    squares: Tensor

    def minus(self, other: ComparedSums) -> ComparedSums:
        """Return the sums without those of a part."""
        return ComparedSums(self.counts - other.counts, self.sums - other.sums, self.squares - other.squares)

    def scaled(self, factor: float) -> ComparedSums:
        """Return the sums with every example weighted by a factor."""
        return ComparedSums(self.counts * factor, self.sums * factor, self.squares * factor)

    @property
    def means(self) -> Tensor:
        """The mean feature of each class [C, d]; zero for a class without examples."""
        return self.sums / self.counts.clamp_min(1.0)[:, None]

    @property
    def variance(self) -> float:
        """The variance within classes, ``tr(S_w) / N``."""
        within = self.squares.sum() - (self.sums * self.means).sum()
        return float(within / self.counts.sum())


def inspect_sums(
    uploads: Sequence[Upload], arrived: Sequence[str], progress: Progress, probe: Tensor | None = None
) -> Inspection:
    """Judge uploads of feature sums.

    Args:
        uploads: At least three, of kind ``statistics``.
        arrived: The clients in the order of their arrival; empty if unknown.
        progress: Receives the percentage that is done.
        probe: The server's own features of the fixed input; None compares none.

    Returns:
        One row per client, in the order of the uploads. Another probe than the server's is a note, and no finding.
    """
    read, notes = dict[str, ComparedSums](), list[str]()
    for number, upload in enumerate(uploads):
        state = upload.read()
        if probe is not None and "probe" in state and (warning := probe_warning(state, probe)):
            notes.append(f"{upload.client}: {warning}")
        if not float(state.get("noise", torch.zeros(1))):
            read[upload.client] = _of(state)
        progress.report(100 * (number + 1) // len(uploads), 100)
    if noisy := [upload.client for upload in uploads if upload.client not in read]:
        notes.append(f"{len(noisy)} uploads carry noise and are not judged: {', '.join(noisy[:4])}")
    copies, sizes = _copies(read, arrived), {name: float(own.counts.sum()) for name, own in read.items()}
    # A client that claims more than the usual number weighs no more, else it would be the norm for the others.
    usual = median(list(sizes.values()))
    even = {name: own.scaled(min(1.0, usual / sizes[name])) for name, own in read.items() if name not in copies}
    apart, strange = _strange(even)
    claims = {name: sizes[name] / median([n for o, n in sizes.items() if o != name]) for name in sizes}
    measures = {"apart": apart, "claim": claims}
    names = [upload.client for upload in uploads]
    scores = {
        key: dict(zip(names, robust_scores([found.get(name, NAN) for name in names], FLOORS[key]), strict=True))
        for key, found in measures.items()
    }
    rows = tuple(
        VerdictRow(
            upload.client,
            upload.architecture,
            {key: found.get(upload.client, NAN) for key, found in measures.items()},
            {key: found[upload.client] for key, found in scores.items()},
            _findings(upload.client, copies, strange, claims),
        )
        for upload in uploads
    )
    return Inspection(rows, tuple(notes))


def distance(own: ComparedSums, others: ComparedSums) -> float:
    """Return the squared distance of a client's class means from the others', less its expectation for honest sums.

    ``D_k = sum_c n_kc ||mu_kc - mu_c||^2 / sum_c n_kc / v - sum_c (1 + n_kc / n_c) / sum_c n_kc`` over the classes of
    which both have at least ten examples, with the variance within classes v; NaN without such a class.
    """
    shared = (own.counts >= LEAST) & (others.counts >= LEAST)
    weights = torch.where(shared, own.counts, 0.0)
    if not bool(shared.any()):
        return NAN
    squared = (own.means - others.means).square().sum(1)
    expected = torch.where(shared, 1.0 + own.counts / others.counts.clamp_min(1.0), 0.0).sum() / weights.sum()
    return float((weights * squared).sum() / weights.sum() / max(others.variance, 1e-12) - expected)


def chance(own: ComparedSums, others: ComparedSums) -> float:
    """Return the deviation of :func:`distance` for an honest client, which is large for one of few examples.

    ``sqrt(2 / r sum_c (1 + n_kc / n_c)^2) / sum_c n_kc`` over the same classes, if features within a class vary in r
    independent directions; NaN without such a class.
    """
    shared = (own.counts >= LEAST) & (others.counts >= LEAST)
    squares = torch.where(shared, (1.0 + own.counts / others.counts.clamp_min(1.0)).square(), 0.0).sum()
    return float((2.0 / DIMENSIONS * squares).sqrt() / own.counts[shared].sum())


def _of(state: dict[str, Tensor]) -> ComparedSums:
    counts, sums = state["counts"].double(), state["sums"].double()
    if "gram" not in state:
        return ComparedSums(counts, sums, state["squares"].double().sum(0))
    features = sums.shape[1]
    row = torch.arange(features)
    diagonal = row * features - row * (row - 1) // 2  # of the upper triangle, row by row
    return ComparedSums(counts, sums, state["gram"].double()[diagonal])


def _total(parts: Sequence[ComparedSums]) -> ComparedSums:
    return ComparedSums(
        torch.stack([own.counts for own in parts]).sum(0),
        sum((own.sums for own in parts), torch.zeros_like(parts[0].sums)),
        torch.stack([own.squares for own in parts]).sum(0),
    )


def _strange(read: dict[str, ComparedSums]) -> tuple[dict[str, float], dict[str, Finding]]:
    """Return every client's distance, and the findings; the worst is left out first and the rest measured again."""
    left, apart, found = dict(read), dict[str, float](), dict[str, Finding]()
    while len(left) > 2:
        total = _total(list(left.values()))
        now = {name: distance(own, total.minus(own)) for name, own in left.items()}
        apart.update(now)
        known = {name: value for name, value in now.items() if value == value}
        least = {name: APART + DEVIATIONS * chance(left[name], total.minus(left[name])) for name in known}
        worst = max(known, key=lambda name: known[name] - least[name], default="")
        usual = median([value for name, value in known.items() if name != worst])
        if not worst or not known[worst] > max(least[worst], LEAD * usual):
            break
        found[worst] = _strangeness(left[worst], total.minus(left[worst]), known[worst])
        del left[worst]
    return apart, found


def _strangeness(own: ComparedSums, others: ComparedSums, far: float) -> Finding:
    """Return label-flip if the means of other classes lie much nearer than those of the client's own labels."""
    text = f"its class means lie {far:.2g} variances from the others', honest clients near 0"
    known = own.counts >= LEAST
    between = torch.cdist(own.means, others.means).square()
    nearest = torch.where(others.counts >= LEAST, between, torch.inf).argmin(1)
    classes = torch.arange(len(known))
    weights = torch.where(known, own.counts, 0.0)
    renamed = float((weights * between[classes, nearest]).sum() / (weights * between.diagonal()).sum())
    pairs = [(int(nearest[c]), int(c)) for c in classes[known] if nearest[c] != c]
    if renamed < RENAMED and pairs:
        return Finding(LABEL_FLIP, f"{text}; it has the features of {some_pairs(pairs)}")
    return Finding(RANDOM, text)


def _copies(read: dict[str, ComparedSums], arrived: Sequence[str]) -> dict[str, Finding]:
    """Return a finding for each client whose mean squares equal an earlier client's, whatever the claimed numbers."""
    if not read:
        return {}
    places = {client: place for place, client in enumerate(arrived)}
    known = set(places) >= set(read)
    order = sorted(read, key=lambda name: (places.get(name, 0), name))
    why = "which arrived earlier" if known else "which of the two is the copy is not known"
    found, squares = dict[str, Finding](), torch.stack([read[name].squares for name in order])
    means = squares / squares.sum(1, keepdim=True).clamp_min(1e-300)
    lengths, original = means.norm(dim=1), torch.ones(len(order), dtype=torch.bool)
    for place, name in enumerate(order):
        apart = (means[:place] - means[place]).norm(dim=1) / lengths[:place]
        same = torch.nonzero((apart < EQUAL) & original[:place])
        if len(same):
            original[place] = False
            found[name] = Finding(COPY, f"its features have the mean squares of {order[int(same[0])]}, {why}")
    return found


def _findings(
    name: str, copies: dict[str, Finding], strange: dict[str, Finding], claims: dict[str, float]
) -> tuple[Finding, ...]:
    claimed = (
        Finding(SCALED, f"it claims {claims[name]:.3g} times the others' median number of examples")
        if claims.get(name, 0.0) > CLAIM
        else None
    )
    return tuple(found for found in (copies.get(name), strange.get(name), claimed) if found is not None)
