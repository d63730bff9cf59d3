"""Aggregators: small functions that combine the logits of M members, with parameters that FENS's clients train.

This module needs numpy alone: in deployment every message of a round starts a new process, and importing torch would
take longer than the round's steps. The server has the same forms in torch (:mod:`.combiners`), with the same tensors
under the same names.

Allouah et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, section 3 and Figure 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import OptionError
from ..core.seeds import derive_seed
from . import forms
from .forms import Array, Params, Pullback, Rng, Sizes


@dataclass(frozen=True)
class Aggregator:
    """An aggregator as a value.

    Attributes:
        combiner: The key of its torch form in ``combiners.COMBINERS``.
        kind: ``"static"``: from label counts, or without parameters. ``"voted"``: from counts of votes. ``"trained"``:
            by gradients in numpy. ``"torch"``: by gradients in torch, since its gate sees the members' input.
        apply: Parameters and logits [M, B, C] -> combined logits [B, C] and the pullback.
        counts: The name of the parameter that is a table of counts; empty without one.
    """

    name: str
    combiner: str
    kind: str
    draw: Callable[[Rng, Sizes], Params]
    apply: Callable[[Mapping[str, Array], Array], tuple[Array, Pullback]]
    counts: str = ""

    def start(self, seed: int | None, *, members: int, classes: int, hidden: int = 0) -> Params:
        """Return the float32 parameters that the first round starts from; counts are zero.

        Args:
            seed: The run's seed; None: not drawn, for their names and shapes alone.
            members: M.
            classes: C.
            hidden: Units k of ``"nn"``; 0: two per member, as the paper has.

        Raises:
            ValueError: It is trained with torch: :func:`.gate.start_gate` starts it.
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

    def forward(self, params: Mapping[str, Array], logits: Array) -> Array:
        """Combine member logits [M, B, C] to [B, C].

        Raises:
            ValueError: It needs the members' input as well.
        """
        return self.apply(params, logits)[0]

    def gradient(self, params: Mapping[str, Array], logits: Array, labels: Array) -> tuple[float, Params]:
        """Return the mean cross-entropy of the combined logits, and its gradient by every parameter.

        Args:
            logits: z, float32 [M, B, C].
            labels: y [B], whole numbers in [0, C).

        Raises:
            ValueError: It is not trained by gradients here.
        """
        if self.kind != "trained":
            raise ValueError(f"aggregator {self.name!r} is not trained by gradients here")
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
        Aggregator("average", "mean", "static", forms.draw_nothing, forms.average),
        Aggregator("weighted", "label-count", "static", forms.draw_label_counts, forms.weighted, "weights"),
        Aggregator("linear", "linear", "trained", forms.draw_linear, forms.linear),
        Aggregator("per-class", "per-class", "trained", forms.draw_per_class, forms.per_class),
        Aggregator("nn", "nn", "trained", forms.draw_nn, forms.nn),
        Aggregator("voting", "voting", "voted", forms.draw_votes, forms.vote, "counts"),
        Aggregator("moe", "moe", "torch", forms.draw_in_torch, forms.apply_in_torch),
        Aggregator("two-class-average", "two-class-average", "static", forms.draw_nothing, forms.two_class_average),
        Aggregator(
            "two-class-weighted",
            "two-class-weighted",
            "static",
            forms.draw_label_counts,
            forms.two_class_weighted,
            "weights",
        ),
        Aggregator(
            "two-class-per-class",
            "two-class-per-class",
            "trained",
            forms.draw_two_class_per_class,
            forms.two_class_per_class,
        ),
        Aggregator("two-class-nn", "two-class-nn", "trained", forms.draw_two_class_nn, forms.two_class_nn),
    )
}
# The network for two classes differs from the one for more, so only its own name selects it.
_OF_TWO_CLASSES = {name: f"two-class-{name}" for name in ("average", "weighted", "per-class")}
_GENERAL = ", ".join(name for name in AGGREGATORS if not name.startswith("two-class-"))

STATIC = frozenset(name for name, entry in AGGREGATORS.items() if entry.kind == "static")
TORCH_ONLY = frozenset(name for name, entry in AGGREGATORS.items() if entry.kind == "torch")
