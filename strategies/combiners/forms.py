"""The forms of the aggregators in numpy: initial parameters, the formula, and its gradient, derived by hand.

A form takes parameters and member logits [M, B, C]. It returns the combined logits [B, C] and a pullback, which maps
the gradient of a loss by the combined logits, g [B, C], to its gradients by the parameters. Below, z_i [B, C] are the
logits of member i, and p_i is their softmax. Source: see :mod:`.aggregators`.

A model of two classes has logits (0, z) with z the log-odds of class 1; from other logits these are ``d = z_1 - z_0``.
The forms for two classes read d from each member and return logits (0, z), so that cross-entropy is the paper's
binary one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

Array = np.ndarray[Any, Any]

Params = dict[str, Array]
Pullback = Callable[[Array], Params]
# None: only the shapes matter.
Rng = np.random.Generator | None

# Replaces zero in logarithms: the smallest normal float32.
TINY = np.finfo(np.float32).tiny


class Sizes(NamedTuple):
    """The sizes that determine the parameters' shapes: M members, C classes, k hidden units."""

    members: int
    classes: int
    hidden: int


def uniform(rng: Rng, bound: float, *shape: int) -> Array:
    """Draw float32 numbers of a shape from U(-bound, bound); without a generator, zeros that take no memory."""
    if rng is None:
        return np.broadcast_to(np.float32(0), shape)
    return rng.uniform(-bound, bound, shape).astype(np.float32)


# Untrained forms


def draw_nothing(_: Rng, __: Sizes) -> Params:
    """Return no parameters."""
    return {}


def draw_label_counts(_: Rng, sizes: Sizes) -> Params:
    """Return label counts of zero [M, C]."""
    return {"weights": np.zeros((sizes.members, sizes.classes), np.float32)}


def draw_votes(_: Rng, sizes: Sizes) -> Params:
    """Return counts of votes of zero [M, C, C]."""
    return {"counts": np.zeros((sizes.members, sizes.classes, sizes.classes), np.float32)}


def average(_: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``(1/M) sum_i z_i``."""
    return logits.mean(0), _no_way_back


def weighted(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``sum_i lambda_i * z_i``, ``lambda_i[c] = n_i^c / sum_j n_j^c``; zero for a class that no client holds."""
    return np.einsum("mc,mbc->bc", label_shares(params["weights"]), logits), _no_way_back


def vote(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """The log-likelihood of every class under the members' votes: :func:`vote_scores`."""
    return vote_scores(params["counts"], logits), _no_way_back


# Polychotomous voting: every member votes for a class, and its earlier votes show how reliable it is.
#
# Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, Figure 8. Member i has a matrix
# P_i, where P_i[r][c] is the share of the held examples of class r that it labels c. With equal priors and a benefit of
# one for the right class, the most likely class is ``argmax_r prod_i P_i[r][vote_i]``.
#
# The clients send counts, not shares: their sum gives the shares of the pooled examples. The paper averages the
# clients' shares; its code pools the examples.

# Replaces a share of zero, so that the product of many members' shares is not zero for every class. It is at most the
# share of one example in a million: a vote that never occurred counts more against a class than a rare one.
FLOOR = 1e-6


def vote_counts(logits: Array, labels: Array) -> npt.NDArray[np.int64]:
    """Count how each member labels the examples of each class.

    Args:
        logits: Of the members [M, B, C].
        labels: y [B], whole numbers in [0, C).

    Returns:
        Counts [M, C, C]: member, true class r, its vote c.
    """
    members, _, classes = logits.shape
    cells = (np.arange(members)[:, None] * classes + labels) * classes + logits.argmax(2)
    return np.bincount(cells.ravel(), minlength=members * classes**2).reshape(members, classes, classes)


def sum_votes(counts: Iterable[Array]) -> Array:
    """Return the counts of the pooled examples, the sum over clients.

    Args:
        counts: Of every client [M, C, C].

    Raises:
        ValueError: ``counts`` is empty.
    """
    tables = list(counts)
    if not tables:
        raise ValueError("no counts of votes to merge")
    total: Array = np.sum(tables, axis=0)
    return total


def vote_shares(counts: Array) -> npt.NDArray[np.float64]:
    """Return P [M, C, C] of merged counts.

    A class r without examples gets the uninformative row ``1 / #seen`` over the classes with examples. Without any
    examples every share is 1 / C.

    Args:
        counts: [M, C, C]: member, true class r, its vote c.
    """
    seen = counts.sum((0, 2)) > 0
    seen = seen if seen.any() else ~seen
    total = counts.sum(2, keepdims=True, dtype=np.float64)
    shares: npt.NDArray[np.float64] = np.where(total > 0, counts / np.maximum(total, 1), seen / seen.sum())
    return shares


def vote_scores(counts: Array, logits: Array) -> npt.NDArray[np.float32]:
    """Return ``sum_i log max(P_i[r][vote_i], floor)`` for every class r [B, C]; the largest is the prediction.

    Args:
        counts: Merged [M, C, C].
        logits: Of the members [M, B, C].
    """
    logs = np.log(np.maximum(vote_shares(counts), FLOOR))
    votes = logits.argmax(2)
    # For each member and example, the column of its vote over all true classes: [M, B, C].
    likelihoods = logs[np.arange(len(logits))[:, None], :, votes]
    total: npt.NDArray[np.float32] = likelihoods.sum(0).astype(np.float32)
    return total


# Trained forms. Xavier's bound is sqrt(6 / (fan in + fan out)); that of torch's layers is 1 / sqrt(fan in).


def draw_linear(rng: Rng, sizes: Sizes) -> Params:
    """Return weights [M] by Xavier for M inputs and one output, and a bias [1] of one."""
    bound = math.sqrt(6 / (sizes.members + 1))
    return {"weight": uniform(rng, bound, sizes.members), "bias": np.ones(1, np.float32)}


def linear(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``sum_i w_i z_i + b``; the scalar b shifts all classes alike and changes no decision."""
    combined = np.tensordot(params["weight"], logits, axes=1) + params["bias"]
    return combined, lambda g: {"weight": np.tensordot(logits, g, axes=2), "bias": g.sum().reshape(1)}


def draw_per_class(rng: Rng, sizes: Sizes) -> Params:
    """Return weights [M, C] by Xavier."""
    bound = math.sqrt(6 / (sizes.members + sizes.classes))
    return {"weight": uniform(rng, bound, sizes.members, sizes.classes)}


def per_class(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``sum_i lambda_i * z_i``, one weight per member and class."""
    combined = np.einsum("mc,mbc->bc", params["weight"], logits)
    return combined, lambda g: {"weight": np.einsum("bc,mbc->mc", g, logits)}


def draw_nn(rng: Rng, sizes: Sizes) -> Params:
    """Return two layers, M C -> k -> C, initialised as in torch."""
    return _draw_layers(rng, sizes.members * sizes.classes, sizes.hidden, sizes.classes)


def nn(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``W2 ReLU(W1 z + b1) + b2``, with z the concatenated logits of all members [B, M C]."""
    z = logits.transpose(1, 0, 2).reshape(logits.shape[1], -1)
    hidden = np.maximum(z @ params["weight1"].T + params["bias1"], 0)

    def pull(g: Array) -> Params:
        back = (g @ params["weight2"]) * (hidden > 0)
        return {"weight1": back.T @ z, "bias1": back.sum(0), "weight2": g.T @ hidden, "bias2": g.sum(0)}

    return hidden @ params["weight2"].T + params["bias2"], pull


def draw_in_torch(_: Rng, __: Sizes) -> NoReturn:
    """Refuse: the gate's parameters follow from the shape of its input, see :func:`.gate.start_gate`."""
    raise ValueError("aggregator 'moe' needs the shape of the members' input: combiners.gate starts it")


def apply_in_torch(_: Mapping[str, Array], __: Array) -> NoReturn:
    """Refuse: the gate sees the members' input, not only their logits."""
    raise ValueError("aggregator 'moe' needs the members' input: combiners.gate applies it")


# For two classes


def two_class_average(_: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``log(s_1 / s_0)``, ``s_c = (1/M) sum_i p_i(c)``: the mean of probabilities."""
    return _odds(_log_sum_exp(_log_softmax(logits))), _no_way_back


def two_class_weighted(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``log(s_1 / s_0)``, ``s_c = sum_i lambda_i[c] p_i(c)``; a class that no client holds has a share of ``TINY``."""
    shares = np.maximum(label_shares(params["weights"]), TINY)
    return _odds(_log_sum_exp(np.log(shares)[:, None] + _log_softmax(logits))), _no_way_back


def draw_two_class_per_class(rng: Rng, sizes: Sizes) -> Params:
    """Return a layer M -> 1 initialised as in torch: weights [M] and a bias [1]."""
    bound = sizes.members**-0.5
    return {"weight": uniform(rng, bound, sizes.members), "bias": uniform(rng, bound, 1)}


def two_class_per_class(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``sum_i w_i d_i + b``, the aggregator for Fed-Heart-Disease."""
    d = logits[..., 1] - logits[..., 0]
    combined = _beside_zero(params["weight"] @ d + params["bias"])
    return combined, lambda g: {"weight": d @ g[:, 1], "bias": g[:, 1].sum().reshape(1)}


def draw_two_class_nn(rng: Rng, sizes: Sizes) -> Params:
    """Return two layers, M -> 4 M -> 1, initialised as in torch; Table 8 has no such form."""
    return _draw_layers(rng, sizes.members, 4 * sizes.members, 1)


def two_class_nn(params: Mapping[str, Array], logits: Array) -> tuple[Array, Pullback]:
    """``W2 sigmoid(W1 d + b1) + b2``, for two classes."""
    d = (logits[..., 1] - logits[..., 0]).T
    hidden = (1 + np.tanh((d @ params["weight1"].T + params["bias1"]) / 2)) / 2  # the sigmoid, without overflow

    def pull(g: Array) -> Params:
        g = g[:, 1:]
        back = (g @ params["weight2"]) * hidden * (1 - hidden)
        return {"weight1": back.T @ d, "bias1": back.sum(0), "weight2": g.T @ hidden, "bias2": g.sum(0)}

    return _beside_zero((hidden @ params["weight2"].T + params["bias2"])[:, 0]), pull


def _draw_layers(rng: Rng, inputs: int, hidden: int, outputs: int) -> Params:
    return {
        "weight1": uniform(rng, inputs**-0.5, hidden, inputs),
        "bias1": uniform(rng, inputs**-0.5, hidden),
        "weight2": uniform(rng, hidden**-0.5, outputs, hidden),
        "bias2": uniform(rng, hidden**-0.5, outputs),
    }


def _no_way_back(_: Array) -> Params:
    return {}


def label_shares(counts: Array) -> Array:
    """Return ``n_i^c / sum_j n_j^c`` [M, C]; zero for a class that no client holds."""
    total = counts.sum(0)
    shares: Array = counts / np.where(total > 0, total, 1)
    return shares


def _log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    log_p: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return log_p


def _log_sum_exp(values: Array) -> Array:
    """Return ``log sum_i exp(v_i)`` over members, [M, B, C] -> [B, C]; small probabilities do not underflow."""
    largest = values.max(0)
    total: Array = largest + np.log(np.exp(values - largest).sum(0))
    return total


def _odds(log_s: Array) -> Array:
    return _beside_zero(log_s[:, 1] - log_s[:, 0])


def _beside_zero(z: Array) -> Array:
    return np.stack([np.zeros_like(z), z], axis=1)
