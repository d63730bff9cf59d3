"""Aggregators: small functions that combine the logits of M members, with parameters that FENS's clients train.

This module needs numpy alone: in deployment every message of a round starts a new process, and importing torch would
take longer than the round's steps. So the forms that are trained by gradients are here in numpy, with their initial
parameters and gradients; the server has all forms in torch (:mod:`.combiners`), with the same tensors under the same
names.

A form takes parameters and member logits [M, B, C]. It returns the combined logits [B, C] and a pullback, which maps
the gradient of a loss by the combined logits, g [B, C], to its gradients by the parameters. Below, z_i [B, C] are the
logits of member i. A model of two classes has logits (0, z) with z the log-odds of class 1; from other logits these are
``d = z_1 - z_0``. The forms for two classes read d from each member and return logits (0, z), so that cross-entropy is
the paper's binary one.

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, section 3 and Figure 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ..core.errors import OptionError
from ..core.seeds import derive_seed

Array = np.ndarray[Any, Any]

Params = dict[str, Array]
Pullback = Callable[[Array], Params]
# None: only the shapes matter.
Rng = np.random.Generator | None


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


# For two classes


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


def label_shares(counts: Array) -> Array:
    """Return ``n_i^c / sum_j n_j^c`` [M, C]; zero for a class that no client holds."""
    total = counts.sum(0)
    shares: Array = counts / np.where(total > 0, total, 1)
    return shares


def _beside_zero(z: Array) -> Array:
    return np.stack([np.zeros_like(z), z], axis=1)


def untrained(*_: object) -> NoReturn:
    """Refuse: the aggregator has no parameters to train, or is trained in torch."""
    raise ValueError("the aggregator is not trained by gradients in numpy")


@dataclass(frozen=True)
class Aggregator:
    """An aggregator as a value.

    Attributes:
        combiner: The key of its torch form in ``combiners.COMBINERS``.
        kind: ``"static"``: from label counts, or without parameters. ``"voted"``: from counts of votes. ``"trained"``:
            by gradients in numpy. ``"torch"``: by gradients in torch, since its gate sees the members' input.
        counts: The name of the parameter that is a table of counts; empty without one.
        draw: Returns the parameters that a trained one starts from.
        apply: Parameters and logits [M, B, C] -> combined logits [B, C] and the pullback.
    """

    name: str
    combiner: str
    kind: str
    counts: str = ""
    draw: Callable[[Rng, Sizes], Params] = untrained
    apply: Callable[[Mapping[str, Array], Array], tuple[Array, Pullback]] = untrained

    def start(self, seed: int | None, *, members: int, classes: int, hidden: int = 0) -> Params:
        """Return the float32 parameters that the first round starts from.

        Args:
            seed: The run's seed; None: not drawn, for their names and shapes alone.
            members: M.
            classes: C.
            hidden: Units k of ``"nn"``; 0: two per member, as the paper has.

        Raises:
            ValueError: It is not trained here; :func:`.gate.start_gate` starts the one that is trained in torch.
        """
        rng = None if seed is None else np.random.default_rng(derive_seed(seed, "aggregator", self.name))
        return self.draw(rng, Sizes(members, classes, hidden or 2 * members))

    def from_counts(self, counts: Any) -> Params:
        """Return the parameters of an aggregator that is not trained.

        Args:
            counts: For ``"weighted"`` the label counts n_i^c [M, C]; for ``"voting"`` the merged votes [M, C, C];
                ``"average"`` ignores it.
        """
        return {self.counts: np.asarray(counts, dtype=np.float32)} if self.counts else {}

    def gradient(self, params: Mapping[str, Array], logits: Array, labels: Array) -> tuple[float, Params]:
        """Return the mean cross-entropy of the combined logits, and its gradient by every parameter.

        Args:
            logits: z, float32 [M, B, C].
            labels: y [B], whole numbers in [0, C).

        Raises:
            ValueError: It is not trained here.
        """
        combined, pull = self.apply(params, logits)
        loss, residual = cross_entropy(combined, labels)
        return loss, pull(residual)


def cross_entropy(combined: Array, labels: Array) -> tuple[float, Array]:
    """Return the mean cross-entropy of logits, and its gradient by them, ``(sm(z) - onehot(y)) / B``.

    Args:
        combined: z [B, C], float32.
        labels: y [B], whole numbers in [0, C).
    """
    shifted = combined - combined.max(1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(np.mean(np.log(totals[:, 0]) - shifted[rows, labels]))
    residual = exponentials / totals
    residual[rows, labels] -= 1
    return loss, residual / np.float32(len(labels))


def check_params(expected: Mapping[str, Array], given: Mapping[str, Array]) -> None:
    """Validate received parameters against an aggregator's own.

    Raises:
        ValueError: A name is missing or not expected, a shape or a dtype differs, or a value is not finite.
    """
    if given.keys() != expected.keys():
        raise ValueError(f"aggregator parameters are {sorted(given)}: must be {sorted(expected)}")
    for name, wanted in expected.items():
        found = given[name]
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"aggregator parameter {name!r} is {found.dtype} {list(found.shape)}: "
                f"must be {wanted.dtype} {list(wanted.shape)}"
            )
        if not np.all(np.isfinite(found)):
            raise ValueError(f"aggregator parameter {name!r} holds NaN or Inf: must be finite")


def choose_aggregator(name: str, classes: int) -> Aggregator:
    """Return an aggregator by its name; with two classes, its form for two classes if it has one.

    Raises:
        OptionError: The name is unknown, or names a form for two classes while the number of classes differs.
    """
    if name not in AGGREGATORS:
        raise OptionError(f"unknown aggregator {name!r}: known are {', '.join(AGGREGATORS)}")
    if name.startswith("two-class-") and classes != 2:
        raise OptionError(f"aggregator {name!r} is for 2 classes, and there are {classes}: must be one of {_GENERAL}")
    return AGGREGATORS[_OF_TWO_CLASSES.get(name, name) if classes == 2 else name]


AGGREGATORS: Mapping[str, Aggregator] = {
    entry.name: entry
    for entry in (
        Aggregator("average", "mean", "static"),
        Aggregator("weighted", "label-count", "static", "weights"),
        Aggregator("linear", "linear", "trained", "", draw_linear, linear),
        Aggregator("per-class", "per-class", "trained", "", draw_per_class, per_class),
        Aggregator("nn", "nn", "trained", "", draw_nn, nn),
        Aggregator("voting", "voting", "voted", "counts"),
        Aggregator("moe", "moe", "torch"),
        Aggregator("two-class-average", "two-class-average", "static"),
        Aggregator("two-class-weighted", "two-class-weighted", "static", "weights"),
        Aggregator(
            "two-class-per-class", "two-class-per-class", "trained", "", draw_two_class_per_class, two_class_per_class
        ),
        Aggregator("two-class-nn", "two-class-nn", "trained", "", draw_two_class_nn, two_class_nn),
    )
}
# The network for two classes differs from the one for more, so only its own name selects it.
_OF_TWO_CLASSES = {name: f"two-class-{name}" for name in ("average", "weighted", "per-class")}
_GENERAL = ", ".join(name for name in AGGREGATORS if not name.startswith("two-class-"))

STATIC = frozenset(name for name, entry in AGGREGATORS.items() if entry.kind == "static")
TORCH_ONLY = frozenset(name for name, entry in AGGREGATORS.items() if entry.kind == "torch")
