"""Integer sums over examples, from which every score is computed.

Float sums differ with the order of their terms; integers do not. So the sums of several clients, added in any order,
are the sums of their examples together. Losses and confidences are fixed-point numbers with 30 binary digits.

A histogram per class holds what AUROC needs of scores that stay with their clients. Its edges are spaced by asinh in
the log-odds of the float32 probability, because confident models put most of their scores next to 0 and 1. A client
also counts the pairs of its own examples exactly, so that binning costs precision between clients only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..core import refusals

if TYPE_CHECKING:
    import torch

Counts = npt.NDArray[np.int64]

ONE = 2**30  # 1.0 in fixed point
CALIBRATION_BINS = 15
HISTOGRAM_BINS = 512
LOG_ODDS = (-104.0, 17.0)  # of the least and the largest float32 probability that is not 0 or 1
LARGEST_LOSS = 104.0  # -log of the least float32 above 0; larger losses count as this one
MOST_EXAMPLES = 2**31  # of one client


@dataclass(frozen=True)
class Sums:
    """The sums of one model over n examples of C classes; a field is None where it is unknown or not shared.

    Sums of several clients hold the correct examples of all, and everything else of those that share it.

    Attributes:
        examples: n.
        correct: Examples whose most probable class is the true one.
        confusion: Examples by true and predicted class, int64 [C, C].
        loss: Sum of -log p of the true class, and of its square, both in fixed point.
        calibration: Examples, correct ones, and confidence in fixed point, by bin of confidence; int64 [3, 15].
        histogram: Examples of a class, and of the others, by bin of that class's probability; int64 [C, 2, 512].
        within: Pairs of a class's example and another one, of one client: twice the number that is ordered right, ties
            counting once, less what the bins give for it; C integers.
        ties: Such pairs of one client that share a bin; C integers.
        groups: With k correct of m examples in a group: the sums of k^2, k m and m^2 over the groups.
    """

    examples: int
    correct: int
    confusion: Counts | None = None
    loss: tuple[int, int] | None = None
    calibration: Counts | None = None
    histogram: Counts | None = None
    within: tuple[int, ...] | None = None
    ties: tuple[int, ...] | None = None
    groups: tuple[int, int, int] | None = None

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over the examples of both.

        A field that one of them lacks counts the examples of the other alone, so that one client that shares less
        takes no score from the others. Without groups each example is a group.
        """
        added: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "groups" and (mine is None) != (theirs is None):
                mine = mine or (self.correct, self.correct, self.examples)
                theirs = theirs or (other.correct, other.correct, other.examples)
            if mine is None or theirs is None:
                added[field.name] = theirs if mine is None else mine
            elif isinstance(mine, tuple):  # Python's integers, which do not overflow
                added[field.name] = tuple(a + b for a, b in zip(mine, theirs, strict=True))
            else:
                added[field.name] = mine + theirs
        return Sums(**added)


@dataclass(frozen=True)
class PairSums:
    """The sums of two models over the same examples.

    Attributes:
        discordant: Examples of each true class that only the second model, and that only the first one gets right;
            int64 [C, 2].
        loss: Sum of the second model's loss less the first one's, and of its square, in fixed point.
        areas: Of the examples of each true class, the sum of the squared difference of the models' influences on AUROC
            (:meth:`Answers.influences`), in fixed point; C integers. They compare scores of one client, and are None
            for the examples of several.
    """

    discordant: Counts
    loss: tuple[int, int] | None = None
    areas: tuple[int, ...] | None = None

    def __add__(self, other: PairSums) -> PairSums:
        """Return the sums over the examples of both."""
        both = self.loss is not None and other.loss is not None
        loss = (self.loss[0] + other.loss[0], self.loss[1] + other.loss[1]) if both else None  # type: ignore[index]
        return PairSums(self.discordant + other.discordant, loss)


@dataclass(frozen=True)
class Answers:
    """What a model answers to n examples, as the sums need it.

    Attributes:
        predicted: The most probable class, int64 [n].
        probabilities: float32 [n, C]; None if a logit is NaN or infinite.
        losses: -log p of the true class in fixed point, int64 [n]; None if a logit is NaN or infinite.
        labels: int64 [n].
    """

    predicted: Counts
    probabilities: npt.NDArray[np.float32] | None
    losses: Counts | None
    labels: Counts

    @classmethod
    def of(cls, logits: torch.Tensor, labels: torch.Tensor) -> Answers:
        """Return the answers of logits [n, C], of any float type, with labels [n]."""
        predicted, truth = logits.argmax(1).cpu().numpy(), labels.cpu().numpy()
        if not bool(logits.isfinite().all()):
            return cls(predicted, None, None, truth)
        single = logits.float().cpu()  # bfloat16 would tie scores
        logs = single.log_softmax(1)
        losses = -logs.gather(1, labels.cpu()[:, None])[:, 0].double().numpy()
        fixed = np.rint(np.minimum(losses, LARGEST_LOSS) * ONE).astype(np.int64)
        return cls(predicted, single.softmax(1).numpy(), fixed, truth)

    def take(self, positions: Counts) -> Answers:
        """Return the answers to some of the examples."""
        probabilities = None if self.probabilities is None else self.probabilities[positions]
        losses = None if self.losses is None else self.losses[positions]
        return Answers(self.predicted[positions], probabilities, losses, self.labels[positions])

    def sums(self, groups: Counts | None = None) -> Sums:
        """Return the sums of these answers.

        Args:
            groups: The group of each example [n], such as a patient's number; None if each is its own.
        """
        right = self.predicted == self.labels
        by_group = None if groups is None else _group_sums(right, groups)
        if self.probabilities is None or self.losses is None:
            return Sums(len(right), int(right.sum()), groups=by_group)
        histogram, ranks = _histogram(self.probabilities, self.labels), _twice_u(self.probabilities, self.labels)
        binned, ties = binned_pairs(histogram)
        return Sums(
            examples=len(right),
            correct=int(right.sum()),
            confusion=_confusion(self.predicted, self.labels, self.probabilities.shape[1]),
            loss=_moments(self.losses),
            calibration=_calibration(self.probabilities, right),
            histogram=histogram,
            within=tuple(exact - rough for exact, rough in zip(ranks, binned, strict=True)),
            ties=ties,
            groups=by_group,
        )

    def against(self, other: Answers, num_classes: int) -> PairSums:
        """Return the sums of another model's answers to the same examples, compared with these."""
        mine, theirs = self.predicted == self.labels, other.predicted == other.labels
        only = [np.bincount(self.labels[these], minlength=num_classes) for these in (theirs & ~mine, mine & ~theirs)]
        known = self.losses is not None and other.losses is not None
        loss = _moments(other.losses - self.losses) if known else None  # type: ignore[operator]
        before, after, areas = self.influences(), other.influences(), None
        if before is not None and after is not None:
            squares = np.bincount(self.labels, weights=(after[1] - before[1]) ** 2, minlength=num_classes)
            areas = tuple(int(value) for value in np.rint(squares * ONE))
        return PairSums(np.stack(only, axis=1).astype(np.int64), loss, areas)

    def influences(self) -> tuple[float, npt.NDArray[np.float64]] | None:
        """Return the macro AUROC, and what each example adds to it, n_y times for one of a class of n_y examples; [n].

        With p examples of a class and q others, an example's placement is the share of the other side that it is
        ordered right against, and its influence on this class's AUROC the placement less the AUROC, over p or q
        (DeLong et al., Biometrics 1988, Eq. 4 to 6). Placements are found by sorting (Sun and Xu, IEEE Signal
        Processing Letters 2014). The squared influences add up to the variance of the AUROC.

        Returns:
            None if a logit is NaN or infinite, or no class has an AUROC.
        """
        if self.probabilities is None or not len(self.labels):
            return None
        n, num_classes = self.probabilities.shape
        sizes = np.bincount(self.labels, minlength=num_classes)
        classes = [label for label in np.flatnonzero((sizes > 0) & (sizes < n)) if num_classes > 2 or label == 1]
        total, found = 0.0, np.zeros(n)
        for label in classes:
            own, p, q = self.labels == label, sizes[label], n - sizes[label]
            values, place = np.unique(self.probabilities[:, label], return_inverse=True)
            ours, others = (np.bincount(place[side], minlength=len(values)) for side in (own, ~own))
            below, under = np.cumsum(others) - others / 2, np.cumsum(ours) - ours / 2
            placement = np.where(own, below[place] / q, 1 - under[place] / p)
            area = placement[own].mean()
            total += area
            found += np.where(own, 1, sizes[self.labels] / q) * (placement - area)
        return (float(total) / len(classes), found / len(classes)) if classes else None

    def effects(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return numbers of the examples [n] whose mean is a score, for all scores but balanced accuracy.

        They are 1 for a right answer, the loss in nats, and for macro F1 and AUROC the score and n times what an
        example adds to it. Their differences between two models tell how certain the difference of the scores is; that
        of log losses also needs ``mistake``, :func:`cost_of_mistake`.

        Returns:
            The accuracy alone if a logit is NaN or infinite.
        """
        right, n = self.predicted == self.labels, len(self.labels)
        found = {"accuracy": right.astype(np.float64)}
        if self.probabilities is None or self.losses is None or not n:
            return found
        f1, added = macro_f1(_confusion(self.predicted, self.labels, self.probabilities.shape[1]))
        found |= {"macro-f1": f1 + n * added[self.labels, self.predicted], "log-loss": self.losses / ONE}
        found["mistake"] = np.full(n, cost_of_mistake(_histogram(self.probabilities, self.labels)))
        if (areas := self.influences()) is not None:
            found["auroc"] = areas[0] + n * areas[1] / np.bincount(self.labels)[self.labels]
        return found


def macro_f1(confusion: Counts) -> tuple[float, npt.NDArray[np.float64]]:
    """Return macro F1 over the classes that have examples, and what an example adds to it by its cell [C, C].

    F1 of a class is 2 t / (h + g): the right examples by those that have it, and those that are predicted as it.
    """
    true = confusion.sum(1)
    either = np.maximum(true + confusion.sum(0), 1)
    weights = np.where(true > 0, 1 / either, 0.0) / max(1, (true > 0).sum())
    f1 = 2 * np.diagonal(confusion) * weights
    return float(f1.sum()), np.diag(2 * weights) - (f1 / either)[:, None] - f1 / either


def _moments(fixed: Counts) -> tuple[int, int]:
    """Return the sum of fixed-point numbers, and of their squares, each rounded to fixed point by itself."""
    squares = np.rint((fixed / ONE) ** 2 * ONE).astype(np.int64)
    return sum(fixed.tolist()), sum(squares.tolist())


def _are_moments(total: int, squares: int, n: int) -> bool:
    """Return whether n numbers may have this sum and sum of squares, which is rounded for each."""
    return total * total <= n * ONE * (squares + n)


def _confusion(predicted: Counts, labels: Counts, num_classes: int) -> Counts:
    both = (labels * num_classes + predicted).astype(np.int64)  # none have no integers
    counts = np.bincount(both, minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes).astype(np.int64)


def _calibration(probabilities: npt.NDArray[np.float32], right: npt.NDArray[np.bool_]) -> Counts:
    confidence = probabilities.max(1).astype(np.float64) if len(right) else np.zeros(0)
    places = np.minimum(np.floor(CALIBRATION_BINS * confidence), CALIBRATION_BINS - 1).astype(np.int64)
    table = np.zeros((3, CALIBRATION_BINS), np.int64)
    for row, values in enumerate((1, right.astype(np.int64), np.rint(confidence * ONE).astype(np.int64))):
        np.add.at(table[row], places, values)
    return table


@cache
def _edges() -> npt.NDArray[np.float64]:
    """Return the 509 probabilities between bins 1 to 510, those of scores that are not exactly 0 or 1."""
    low, high = np.arcsinh(LOG_ODDS)
    log_odds = np.sinh(np.linspace(low, high, HISTOGRAM_BINS - 1)[1:-1])
    return np.where(log_odds < 0, np.exp(-np.logaddexp(0, -log_odds)), 1 - np.exp(-np.logaddexp(0, log_odds)))


@cache
def _bin_losses() -> npt.NDArray[np.float64]:
    """Return -log of the score in the middle of each bin of a histogram [512], in nats."""
    low, high = np.arcsinh(LOG_ODDS)
    ends = np.linspace(low, high, HISTOGRAM_BINS - 1)
    middle = np.sinh((ends[1:] + ends[:-1]) / 2)
    return np.concatenate([[LARGEST_LOSS], np.logaddexp(0, -middle), [0.0]])


def cost_of_mistake(histogram: Counts) -> float:
    """Return what a mistake would cost in nats: the mean loss if each example had another class, to a bin's width."""
    others = histogram[:, 1].sum(0)
    return float(others @ _bin_losses()) / max(1, int(others.sum()))


def _histogram(probabilities: npt.NDArray[np.float32], labels: Counts) -> Counts:
    scores = probabilities.astype(np.float64)
    bins = 1 + np.searchsorted(_edges(), scores, side="right")
    bins[scores == 0], bins[scores == 1] = 0, HISTOGRAM_BINS - 1
    table = np.zeros((scores.shape[1], 2, HISTOGRAM_BINS), np.int64)
    for label in range(scores.shape[1]):
        own = labels == label
        table[label, 0] = np.bincount(bins[own, label], minlength=HISTOGRAM_BINS)
        table[label, 1] = np.bincount(bins[~own, label], minlength=HISTOGRAM_BINS)
    return table


def _twice_u(probabilities: npt.NDArray[np.float32], labels: Counts) -> tuple[int, ...]:
    """Return twice the Mann-Whitney U of every class against the rest."""
    if not len(labels):
        return tuple([0] * probabilities.shape[1])
    found = []
    for label in range(probabilities.shape[1]):
        own = labels == label
        positives = int(own.sum())
        _, place, ties = np.unique(probabilities[:, label], return_inverse=True, return_counts=True)
        doubled = 2 * np.cumsum(ties) - ties + 1  # midranks are halves
        found.append(int(doubled[place[own]].sum()) - positives * (positives + 1))
    return tuple(found)


def binned_pairs(histogram: Counts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return, per class, twice U with midranks within the bins, and the pairs that share a bin."""
    twice, shared = [], []
    if np.abs(histogram.astype(float)).sum() >= 2**31:  # products may pass 2^63, and Python's integers do not end there
        histogram = histogram.astype(object)
    for positive, negative in histogram:
        below = np.cumsum(negative) - negative
        twice.append(int((positive * (2 * below + negative)).sum()))
        shared.append(int((positive * negative).sum()))
    return tuple(twice), tuple(shared)


def _group_sums(right: npt.NDArray[np.bool_], groups: Counts) -> tuple[int, int, int]:
    _, places = np.unique(groups, return_inverse=True)
    m, k = np.bincount(places), np.bincount(places, weights=right).astype(np.int64)
    return int((k * k).sum()), int((k * m).sum()), int((m * m).sum())


# Sums on their way from a client to the server: arrays by name, and their checks.


SHARES = ("sums", "confusion", "accuracy")  # what a node permits to be sent, most first
_ARRAYS = ("confusion", "loss", "calibration", "histogram", "twice-u", "groups")


def pack(sums: Sums, share: str = "sums") -> dict[str, np.ndarray[Any, Any]]:
    """Return sums of one client as arrays of integers.

    Args:
        share: One of :data:`SHARES`: all, the confusion matrix, or the number of correct examples alone.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {"count": np.array([sums.examples, sums.correct], np.int64)}
    if share != "accuracy" and sums.confusion is not None:
        arrays["confusion"] = sums.confusion
    if share != "sums":
        return arrays
    if sums.groups is not None:
        arrays["groups"] = np.array(sums.groups, np.int64)
    if sums.loss is None or sums.histogram is None or sums.within is None or sums.calibration is None:
        return arrays
    exact = [rest + rough for rest, rough in zip(sums.within, binned_pairs(sums.histogram)[0], strict=True)]
    return {
        **arrays,
        "loss": np.array(sums.loss, np.int64),
        "calibration": sums.calibration.astype(np.int64),
        "histogram": sums.histogram.astype(np.uint32),
        "twice-u": np.array(exact, np.int64),
    }


def unpack(arrays: Mapping[str, np.ndarray[Any, Any]], num_classes: int, what: str) -> Sums:
    """Read the sums of one client, which may have sent anything.

    Args:
        arrays: Those of :func:`pack`.
        num_classes: C.

    Raises:
        UploadError: An array is unknown, missing, of another shape, negative, or contradicts another.
    """
    checked = _Checked(arrays, num_classes, what)
    count = checked.read("count", (2,))
    if count is None:
        raise refusals.contradicting_sums(what, "has no 'count'")
    n, correct = map(int, count)
    checked.require(n <= MOST_EXAMPLES, f"counts {n} examples")
    checked.require(correct <= n, f"counts {correct} correct of {n} examples")
    found: dict[str, Any] = {"examples": n, "correct": correct, "confusion": checked.confusion(n, correct)}
    if (groups := checked.read("groups", (3,))) is not None:
        k2, km, m2 = found["groups"] = tuple(map(int, groups))
        fits = k2 <= km <= m2 and n <= m2 <= n * n and correct <= k2 <= correct * correct and km * km <= k2 * m2
        checked.require(fits, f"has groups {k2}, {km}, {m2}")
    rest = {name: checked.read(name, shape) for name, shape in checked.shapes.items()}
    if any(value is None for value in rest.values()):
        checked.require(all(value is None for value in rest.values()), "has some of its sums")
        return Sums(**found)
    return Sums(**found, **checked.of_scores(n, correct, found["confusion"], rest))


@dataclass(frozen=True)
class _Checked:
    """The arrays of one model in a client's answer."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    num_classes: int
    what: str

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.arrays) - {"count", *_ARRAYS}):
            raise refusals.contradicting_sums(self.what, f"has {unknown[0][:80]!r}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The arrays that only whole sums have."""
        c = self.num_classes
        return {
            "loss": (2,),
            "calibration": (3, CALIBRATION_BINS),
            "histogram": (c, 2, HISTOGRAM_BINS),
            "twice-u": (c,),
        }

    def require(self, fits: bool, found: str) -> None:
        """Refuse the answer unless it fits."""
        if not fits:
            raise refusals.contradicting_sums(self.what, found)

    def read(self, name: str, shape: tuple[int, ...]) -> Counts | None:
        """Return an array of integers from 0; None if the answer lacks it."""
        if (array := self.arrays.get(name)) is None:
            return None
        self.require(array.shape == shape, f"has {name} of shape {list(array.shape)}")
        self.require(array.dtype.name in ("int64", "uint32"), f"has {name} of {array.dtype}")
        self.require(not array.size or int(array.min()) >= 0, f"has {name} with {array.min()}")
        return array.astype(np.int64)

    def confusion(self, n: int, correct: int) -> Counts | None:
        """Return the confusion matrix, if there is one."""
        table = self.read("confusion", (self.num_classes, self.num_classes))
        if table is not None:
            total, right = sum(table.ravel().tolist()), sum(np.diag(table).tolist())  # Python's: no overflow
            self.require(total == n, f"has a confusion matrix of {total} examples")
            self.require(right == correct, f"has {right} correct in its confusion matrix")
        return table

    def of_scores(self, n: int, correct: int, confusion: Counts | None, rest: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sums of probabilities, compared with the confusion matrix."""
        loss, calibration, histogram, ranks = (rest[name] for name in self.shapes)
        first, second = map(int, loss)
        most = int(LARGEST_LOSS)
        fits = first <= n * most * ONE and second <= most * first + n and _are_moments(first, second, n)
        self.require(fits, f"has a loss of {first}, {second}")
        counts, rights, confidences = calibration.tolist()
        fits = sum(counts) == n and sum(rights) == correct
        fits &= all(r <= c and s <= c * ONE for c, r, s in zip(counts, rights, confidences, strict=True))
        self.require(fits, "has bins of confidence that contradict its counts")
        if confusion is None:
            raise refusals.contradicting_sums(self.what, "has no confusion matrix")
        positives = confusion.sum(1)
        for label, (own, others) in enumerate(histogram.tolist()):
            fits = sum(own) == positives[label] and sum(own) + sum(others) == n
            self.require(fits, f"has a histogram of class {label} that contradicts its counts")
        binned, ties = binned_pairs(histogram)
        within = [int(exact) - rough for exact, rough in zip(ranks, binned, strict=True)]
        for label, (off, shared) in enumerate(zip(within, ties, strict=True)):
            self.require(abs(off) <= shared, f"has ranks of class {label} beyond its histogram")
        return {
            "loss": (first, second), "calibration": calibration.astype(object), "histogram": histogram,
            "within": tuple(within), "ties": ties,
        }  # fmt: skip


def pack_pair(pair: PairSums, share: str = "sums") -> dict[str, np.ndarray[Any, Any]]:
    """Return the sums of two models as arrays of integers; ``share`` as in :func:`pack`."""
    if share == "accuracy":
        return {"discordant": pair.discordant.sum(0, keepdims=True)}
    more = {} if share != "sums" else {"loss": pair.loss, "areas": pair.areas}
    known = {name: np.array(value, np.int64) for name, value in more.items() if value is not None}
    return {"discordant": pair.discordant, **known}


def unpack_pair(arrays: Mapping[str, np.ndarray[Any, Any]], first: Sums, second: Sums, what: str) -> PairSums:
    """Read the sums of two models, and compare them with each model's own.

    Raises:
        UploadError: They contradict these.
    """
    classes = 1 if first.confusion is None else len(first.confusion)
    checked = _Checked({}, classes, what)
    table, loss = arrays.get("discordant"), arrays.get("loss")
    fits = table is not None and table.shape == (classes, 2) and table.dtype.name == "int64"
    checked.require(fits, "has no discordant counts of the classes")
    counts = np.asarray(table).astype(np.int64)
    checked.require(int(counts.min()) >= 0, "has negative discordant counts")
    gained, lost = (np.array(counts[:, place].tolist(), object) for place in (0, 1))
    if first.confusion is not None and second.confusion is not None:
        differ = np.diag(second.confusion) - np.diag(first.confusion)
        fits = bool((gained - lost == differ).all() and (gained + lost <= first.confusion.sum(1)).all())
        same = bool((first.confusion.sum(1) == second.confusion.sum(1)).all())
        checked.require(same, "has confusion matrices of other examples")
    else:
        total = int(gained.sum() + lost.sum())
        fits = int(gained.sum() - lost.sum()) == second.correct - first.correct and total <= first.examples
    checked.require(fits, "has discordant counts that contradict its confusion matrices")
    areas = None
    if (squares := arrays.get("areas")) is not None:
        fits = squares.shape == (classes,) and squares.dtype.name == "int64" and first.confusion is not None
        checked.require(fits, "has no squared influences of the classes")
        # Those of a class add up to its number of examples at most.
        fits = bool(((squares >= 0) & (squares <= first.confusion.sum(1) * ONE + 1)).all())  # type: ignore[union-attr]
        checked.require(fits, "has squared influences that no AUROC of its examples has")
        areas = tuple(squares.tolist())
    if loss is None:
        return PairSums(counts, areas=areas)
    off, n = "has a difference of losses that contradicts them", first.examples
    checked.require(loss.shape == (2,) and loss.dtype.name == "int64", off)
    less, both = map(int, loss)
    if first.loss is None or second.loss is None:
        raise refusals.contradicting_sums(what, off)
    fits = less == second.loss[0] - first.loss[0] and 0 <= both <= first.loss[1] + second.loss[1] + 2 * n
    checked.require(fits and _are_moments(less, both, n), off)
    return PairSums(counts, (less, both), areas)
