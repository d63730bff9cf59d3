"""The measures of a client's upload, each a small function of tensors.

Letters: M clients, N images, C classes; NaN marks a value that was not measured. Medians are those of the others: a
client is compared with the cohort without itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

VECTOR = 65_536  # length of the vector that represents a model's weights; for larger models it is a sketch
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
BLOCK = 4096  # entries of the vectors in float64 at once
NEAR = 1e-6  # below this share of their sizes, the squared distance of two vectors is that of their difference
STATISTICS = ("running_mean", "running_var")
NAN = float("nan")


def weight_norms(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return ``||W_l||_2`` of every layer's weight, biases and running statistics left out."""
    weights = {key: value for key, value in state.items() if key.endswith("weight") and value.is_floating_point()}
    return {key: float(torch.linalg.vector_norm(value.double())) for key, value in weights.items()}


def statistic_norms(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean running variance of every normalisation layer; empty without such layers."""
    return {key: float(value.double().mean()) for key, value in state.items() if key.endswith("running_var")}


def weight_vector(state: Mapping[str, Tensor], rng: torch.Generator) -> Tensor:
    """Return a model's weights as one vector, in float32, without running statistics.

    With at most ``VECTOR`` weights the vector holds them all. With more, weight i is added with a random sign to entry
    i modulo ``VECTOR``, which preserves inner products to about ``1 / sqrt(VECTOR)`` of the norms.

    Args:
        rng: Draws the signs; needs the same seed for all models that are compared.
    """
    kept = [v.flatten().float() for k, v in state.items() if v.is_floating_point() and not k.endswith(STATISTICS)]
    if sum(map(len, kept)) <= VECTOR:
        return torch.cat(kept) if kept else torch.zeros(1)
    found, place = torch.zeros(VECTOR), 0
    for part in kept:
        signs = torch.randint(0, 2, part.shape, generator=rng, dtype=torch.int8).mul_(2).sub_(1)
        found.index_add_(0, (place + torch.arange(len(part))) % VECTOR, part * signs)
        place += len(part)
    return found


def median(values: Sequence[float]) -> float:
    """Return the median of the values that are not NaN; NaN if there are none."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return NAN
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2


def ratios(values: Sequence[float]) -> list[float]:
    """Return the ratio of each client's value to the others' [M]; NaN if it is unknown.

    The ratio is the lower median by ``|log|`` of all ``x_k / x_j`` with j != k. A client is thus compared with the
    nearer half of the cohort, so that one large client does not make the others look small, even among three.
    """
    found = []
    for k, value in enumerate(values):
        own = [value / other for j, other in enumerate(values) if j != k and other and not math.isnan(other)]
        near = sorted((ratio for ratio in own if not math.isnan(ratio)), key=distance_of)
        found.append(near[(len(near) - 1) // 2] if near else NAN)
    return found


def extreme_ratio(norms: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Return for every client the layer whose norm is farthest from the others', and their ratio [M].

    Farthest is the largest ``|log|`` of :func:`ratios`; ``("", nan)`` if nothing can be compared.
    """
    found = [("", NAN)] * len(norms)
    for layer in norms[0] if norms else ():
        for k, ratio in enumerate(ratios([own[layer] for own in norms])):
            if distance_of(ratio) > distance_of(found[k][1]) or math.isnan(found[k][1]):
                found[k] = (layer, ratio)
    return found


def distance_of(ratio: float) -> float:
    """Return ``|log ratio|``, the distance of a ratio from 1; infinite for 0, and 0 for NaN."""
    if math.isnan(ratio):
        return 0.0
    return abs(math.log(ratio)) if ratio > 0 and not math.isinf(ratio) else math.inf


def logit_size(logits: Tensor) -> float:
    """Return the mean over images of the standard deviation of a model's logits [N, C] over the classes."""
    return float(logits.double().std(1, correction=0).mean())


def variation(logits: Tensor) -> float:
    """Return how much logits [N, C] differ from image to image: the mean over classes of their deviation over images.

    Each image's mean logit is subtracted first, because it changes no prediction.
    """
    centred = logits.double() - logits.double().mean(1, keepdim=True)
    return float(centred.std(0, correction=0).mean())


def distances(vectors: Sequence[Tensor]) -> Tensor:
    """Return ``||v_i - v_j||_2`` [M, M], in float64; NaN on the diagonal and where the lengths differ."""
    found = torch.full((len(vectors), len(vectors)), NAN, dtype=torch.float64)
    for rows in _of_one_length(vectors):
        products = _products([vectors[k] for k in rows], centred=True)
        sizes = products.diagonal()[:, None] + products.diagonal()
        squares = sizes - products - products.T
        # The difference of two large numbers says little of models that are near: copies above all.
        for i, j in torch.nonzero((squares < NEAR * sizes).triu(1)).tolist():
            apart = (vectors[rows[i]] - vectors[rows[j]]).double()
            squares[i, j] = squares[j, i] = apart.square().sum()
        found[torch.tensor(rows)[:, None], torch.tensor(rows)] = squares.clamp_min(0.0).sqrt().fill_diagonal_(NAN)
    return found


def _of_one_length(vectors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the vectors by length."""
    found: dict[int, list[int]] = {}
    for k, vector in enumerate(vectors):
        found.setdefault(len(vector), []).append(k)
    return list(found.values())


def _products(vectors: Sequence[Tensor], *, centred: bool) -> Tensor:
    """Return the inner products of vectors of one length [M, M], in float64, block by block of their entries.

    Centred ones are relative to the median of each entry, which no minority of vectors moves.
    """
    total = torch.zeros((len(vectors), len(vectors)), dtype=torch.float64)
    for start in range(0, len(vectors[0]), BLOCK):
        part = torch.stack([vector[start : start + BLOCK].double() for vector in vectors])
        part = part - part.median(0).values if centred else part
        total += part @ part.T
    return total


def nearest_distances(apart: Tensor) -> list[float]:
    """Return the distance of each client to its nearest neighbour [M]; NaN without one.

    Args:
        apart: Distances [M, M]; NaN if two models cannot be compared.
    """
    return [min((value for value in row if not math.isnan(value)), default=NAN) for row in apart.tolist()]


class UsualDistance:
    """The usual distance of a client to its nearest neighbour: the lower median over the witnesses outside a pair.

    So one distant client does not increase it. The witnesses are sorted once for all pairs.
    """

    def __init__(self, nearest: Sequence[float], witnesses: Sequence[int]) -> None:
        known = sorted((nearest[k], k) for k in witnesses if not math.isnan(nearest[k]))
        self._values, self._places = [value for value, _ in known], {k: place for place, (_, k) in enumerate(known)}

    def without(self, one: int, other: int) -> float:
        """Return it for two different clients whose distance is compared with it; NaN without witnesses."""
        left_out = sorted(self._places[k] for k in (one, other) if k in self._places)
        middle = (len(self._values) - len(left_out) - 1) // 2
        for place in left_out:
            middle += place <= middle
        return self._values[middle] if len(self._values) > len(left_out) else NAN


def likeness(vectors: Sequence[Tensor]) -> list[float]:
    """Return for every client the median over the others of ``cos(v_k, v_j)`` [M]."""
    found = [NAN] * len(vectors)
    for rows in _of_one_length(vectors):
        products = _products([vectors[k] for k in rows], centred=False)
        norms = products.diagonal().sqrt()
        cosines = products / torch.outer(norms, norms).clamp_min(1e-8)
        for k, row in zip(rows, cosines.fill_diagonal_(NAN).tolist(), strict=True):
            found[k] = median(row)
    return found


def pair_agreement(predictions: Tensor, labels: Tensor, makers: Tensor, known: Tensor) -> Tensor:
    """Return the agreement of each pair of clients on the classes that both know [M, M]; NaN if they share none.

    ``a_kj`` is the mean of two shares. The first is over the images inverted from j for classes that both know: the
    share that k predicts as that class. The second has k and j exchanged.

    Args:
        predictions: Every client's prediction for every image [M, N].
        labels: The class that an image was inverted for [N].
        makers: The client whose model it was inverted from [N].
        known: Whether a client knows a class [M, C].
    """
    count, shared = len(predictions), known[:, labels]
    none = torch.zeros((count, count), dtype=torch.float64)
    measured = none.index_add(1, makers, shared.double())
    right = none.index_add(1, makers, (shared & (predictions == labels)).double())
    one_way = torch.where(measured > 0, right / measured, NAN).fill_diagonal_(NAN)
    return torch.stack([one_way, one_way.T]).mean(0)


def mapping(predictions: Tensor, labels: Tensor, counts: Tensor) -> tuple[dict[int, int], float]:
    """Return a client's most frequent prediction for the images of each class, and how consistent it is, in [0, 1].

    Args:
        predictions: The client's predictions for the others' images [N].
        labels: The classes that the images were inverted for [N].
        counts: The classes to include, those that are not 0 [C].

    Returns:
        Class -> its most frequent prediction; the mean over the classes of that prediction's share.
    """
    found, shares = {}, []
    for label in torch.nonzero(counts)[:, 0].tolist():
        seen = predictions[labels == label]
        if len(seen):
            votes = torch.bincount(seen)
            found[label] = int(votes.argmax())
            shares.append(float(votes.max()) / len(seen))
    return found, sum(shares) / len(shares) if shares else NAN


def influence(logits: Tensor) -> list[float]:
    """Return how much the combined prediction changes without a client [M], as total variation in [0, 1].

    ``mean_i 0.5 |p(x_i) - p_{-k}(x_i)|_1``, with ``p`` the softmax of the mean logits of all clients, and ``p_{-k}``
    that of all but k.

    Args:
        logits: [M, N, C], at least two clients.
    """
    total = logits.double().sum(0)
    every = torch.softmax(total / len(logits), 1)
    without = [torch.softmax((total - own.double()) / (len(logits) - 1), 1) for own in logits]
    return [float(0.5 * (every - rest).abs().sum(1).mean()) for rest in without]


def robust_scores(values: Sequence[float], floor: float) -> list[float]:
    """Return ``(x_k - median_{j != k}) / max(1.4826 MAD_{j != k}, floor)`` [M].

    Args:
        values: [M].
        floor: The least divisor: with few clients the MAD may be 0 by chance.
    """
    found = []
    for k, value in enumerate(values):
        others = [v for j, v in enumerate(values) if j != k]
        centre = median(others)
        spread = median([abs(v - centre) for v in others])
        found.append((value - centre) / max(MAD_TO_DEVIATION * spread, floor) if not math.isnan(spread) else NAN)
    return found
