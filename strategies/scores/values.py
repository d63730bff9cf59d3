"""Scores from sums: values, 95 % intervals that hold for few examples, and paired differences.

The percentile bootstrap is too narrow for 20 examples. So accuracy has Wilson's interval (JASA 1927); balanced accuracy
the MOVER of Wilson's per class (Zou and Donner, Statistics in Medicine 2008); AUROC Newcombe's method 5 (Statistics in
Medicine 2006, part 2), and from 50 examples per class DeLong's variance (Biometrics 1988) on the logit; the
difference of two accuracies on the same examples Bonett and Price's (British Journal of Mathematical and Statistical
Psychology 2012), that of two log losses Student's, and those of two AUROCs or macro F1 DeLong's by what each example
adds to them, all widened for few examples. A class's F1 is a function of a share, so that macro F1 has the MOVER of
Wilson's, too, and at either end the interval by what each example adds where that is wider. The calibration error has
no interval, because it is biased: beside it stands what a perfectly calibrated model would show.

Classes that no example has do not enter a mean over classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.facts import HEADLINES
from .sums import LARGEST_LOSS, ONE, PairSums, Sums, binned_pairs, cost_of_mistake, macro_f1

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

LOWER_IS_BETTER = frozenset({"log-loss"})
_Z = 1.959963984540054
_DELONG = 50
_PART = 0.1  # of an example more per class, in paired differences of AUROC
_MOST_CLASSES = 100  # of a confusion matrix and a table of classes in a result


@dataclass(frozen=True)
class Score:
    """A score with its 95 % interval, in [0, 1]; a log loss in nats.

    Attributes:
        value: The score.
        low: The lower end of its interval.
        high: The upper end.
    """

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """Return the score rounded for a file."""
        return {"value": round(self.value, 6), "low": round(self.low, 6), "high": round(self.high, 6)}


def scores_of(sums: Sums) -> dict[str, Score]:
    """Return the scores that the sums determine, by the names of :data:`HEADLINES`.

    With groups every interval counts as many examples as are worth the same under independence, by the design effect
    of the accuracy.
    """
    if not sums.examples:
        return {}
    share = effective_share(sums)
    found = {"accuracy": _wilson_score(sums.correct, sums.examples, share)}
    if sums.confusion is not None:
        found["balanced-accuracy"] = mean_of(_recalls(sums.confusion, share))
        found["macro-f1"] = _f1_score(sums.confusion, share)
    if sums.histogram is not None and (areas := _areas(sums, share)):
        # Areas of one class against the rest share their examples: independent ones would cover 84 % of macro AUROCs.
        found["auroc"] = mean_of(areas, inflation=2 - 1 / len(areas))
    if sums.loss is not None and sums.confusion is not None:
        found["log-loss"] = _log_loss(sums, share, len(sums.confusion))
    return found


def _scored(sums: Sums) -> int:
    """Return the number of examples whose probabilities are in the sums."""
    return 0 if sums.histogram is None else int(sums.histogram[0].sum())


def per_class(sums: Sums, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return every class's examples, recall, precision and AUROC, each with its interval or None.

    Args:
        sums: The sums; without a confusion matrix there are no rows.
        names: The classes' names; empty for their numbers.
    """
    if sums.confusion is None:
        return []
    share, rows = effective_share(sums), []
    areas = dict(zip(_present(sums), _areas(sums, share), strict=False)) if sums.histogram is not None else {}
    for label, counts in enumerate(sums.confusion):
        right, positives, predicted = int(counts[label]), int(counts.sum()), int(sums.confusion[:, label].sum())
        found = {
            "recall": _wilson_score(right, positives, share) if positives else None,
            "precision": _wilson_score(right, predicted, share) if predicted else None,
            "auroc": areas.get(label),
        }
        scores = {key: None if score is None else score.as_json() for key, score in found.items()}
        rows.append({"class": names[label] if names else str(label), "examples": positives, **scores})
    return rows


def effective_share(sums: Sums) -> float:
    """Return the number of independent examples that are worth as much as these, as a share of their number."""
    if sums.groups is None:
        return 1.0
    n, (k2, km, m2) = sums.examples, sums.groups
    p = sums.correct / n
    return _design(n * p * (1 - p), k2 - 2 * p * km + p * p * m2, n, m2)


def _design(single: float, grouped: float, n: int, m2: int) -> float:
    """Return :func:`effective_share` by the squared deviations of n examples, and of their groups' sums."""
    independent = n * n / m2  # if a group's examples were all alike
    if single <= 0 or independent <= 1:
        return independent / n
    grouped *= independent / (independent - 1)
    return min(1.0, max(independent / n, single / grouped if grouped > 0 else 1.0))


def auroc_bound(sums: Sums) -> float:
    """Return by how much the bins may displace the pooled AUROC; 0 for the examples of one client."""
    if sums.histogram is None or sums.ties is None:
        return 0.0
    bounds = []
    _, shared = binned_pairs(sums.histogram)
    for label in _present(sums):
        positives, negatives = sums.histogram[label].sum(1).tolist()
        bounds.append((shared[label] - sums.ties[label]) / 2 / (positives * negatives))
    return float(np.mean(bounds)) if bounds else 0.0


def calibration_error(sums: Sums) -> tuple[float, float] | None:
    """Return the expected calibration error, and what a perfectly calibrated model would show on as many examples."""
    if sums.calibration is None or not sums.examples:
        return None
    from scipy.special import gammaln, xlogy  # scipy.stats takes a CPU second to import

    table = sums.calibration.astype(float)
    n, right, confidence = table[:, table[0] > 0]
    p = np.clip(confidence / ONE / n, 0, 1)
    k = np.floor(n * p) + 1  # De Moivre: E|X - np| = 2 k (1 - p) P(X = k)
    q = np.maximum(1 - p, np.finfo(float).tiny)
    chosen = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - np.minimum(k, n) + 1)
    perfect = 2 * k * (1 - p) * np.exp(chosen + xlogy(k, p) + xlogy(n - k, q))
    return float(np.abs(right - confidence / ONE).sum() / n.sum()), float(perfect.sum() / n.sum())


# A model against another one on the same examples.


def gain(first: Sums, second: Sums, pair: PairSums | None, metric: str) -> Score | None:
    """Return by how much the second model is better than the first, greater than 0 if it is; None if unknown.

    Accuracy, balanced accuracy, log loss, and the AUROC of one client are compared example by example. For the others
    the two intervals are combined as if they were independent, which is too wide where the models agree: for macro F1,
    and for the AUROC of several clients together, whose pairs of examples of two clients none has seen.

    Args:
        first: The sums of the first model.
        second: Those of the second one.
        pair: The sums of both, over the same examples; None if there are none.
        metric: One of :data:`HEADLINES`.
    """
    n = first.examples
    if pair is not None and n and metric == "accuracy":
        gained, lost = pair.discordant.sum(0).tolist()
        return _apart(gained - lost, gained + lost, n, effective_share(second))
    if pair is not None and n and metric == "balanced-accuracy" and first.confusion is not None:
        sizes, share = first.confusion.sum(1).tolist(), effective_share(second)
        rows = zip(pair.discordant.tolist(), sizes, strict=True)
        return mean_of([_apart(up - down, up + down, size, share) for (up, down), size in rows if size])
    if pair is not None and n and metric == "log-loss" and pair.loss is not None and first.confusion is not None:
        less, squares, guess = -pair.loss[0] / ONE, pair.loss[1] / ONE, math.log(len(first.confusion))
        costs = [cost_of_mistake(sums.histogram) for sums in (first, second) if sums.histogram is not None]
        return _less_loss(less, squares, n, effective_share(second), max([guess, *(cost / 2 for cost in costs)]))
    areas = len(_present(first))
    if metric == "auroc" and areas and pair is not None and pair.areas is not None and first.confusion is not None:
        was, now = (float(np.mean([area.value for area in _areas(sums, 1.0)])) for sums in (first, second))
        moved = np.array(pair.areas, np.float64) / ONE
        half = _widened(moved, first.confusion.sum(1), _PART / areas**2, effective_share(second))
        return Score(now - was, max(-1.0, now - was - half), min(1.0, now - was + half))
    before, after = scores_of(first).get(metric), scores_of(second).get(metric)
    if before is None or after is None:
        return None
    value = after.value - before.value
    low = value - math.hypot(after.value - after.low, before.high - before.value)
    high = value + math.hypot(after.high - after.value, before.value - before.low)
    return Score(-value, -high, -low) if metric in LOWER_IS_BETTER else Score(value, low, high)


def differences(
    first: Mapping[str, Array],
    second: Mapping[str, Array],
    labels: Labels,
    num_classes: int,
    groups: Labels | None = None,
) -> dict[str, Score]:
    """Return by how much a second model is better than a first one on the same examples, by the scores of both.

    As :func:`gain`, which knows sums alone: every score is compared example by example. With groups each interval
    counts as many examples as are worth the same under independence, by the design effect of its own difference.

    Args:
        first: The effects of :meth:`.Answers.effects`, or their means over several models.
        second: Those of the second one.
        labels: int64 [n].
        num_classes: C.
        groups: The group of each example [n]; None if each is its own.
    """
    n, found = len(labels), {}
    apart = {
        name: first[name] - second[name] if name in LOWER_IS_BETTER else second[name] - first[name]
        for name in HEADLINES
        if name in first and name in second
    }
    sizes = np.bincount(labels, minlength=num_classes)
    classes = np.flatnonzero(sizes)
    for name, by in apart.items():
        share, total = _share_of(by, groups), float(by.sum())
        if name == "accuracy":
            found[name] = _apart(total, float(by @ by), n, share)
            if "balanced-accuracy" in compared_scores(apart):
                parts = [by[labels == label] for label in classes]
                each = [_apart(float(part.sum()), float(part @ part), len(part), share) for part in parts]
                found["balanced-accuracy"] = mean_of(each)
        elif name == "log-loss":
            costs = [float(effects["mistake"].mean()) for effects in (first, second) if "mistake" in effects]
            guess = max([math.log(num_classes), *(cost / 2 for cost in costs)])
            found[name] = _less_loss(total, float(by @ by), n, share, guess)
        else:
            value, areas = total / n, 1 if name == "auroc" and num_classes == 2 else len(classes)
            moved = np.bincount(labels, ((by - value) * sizes[labels] / n) ** 2, num_classes).astype(np.float64)
            half = _widened(moved, sizes, (_PART if name == "auroc" else 3 * _PART) / areas**2, share)
            found[name] = Score(value, max(-1.0, value - half), min(1.0, value + half))
    return {name: found[name] for name in HEADLINES if name in found}


def compared_scores(effects: Collection[str]) -> set[str]:
    """Return the scores that :func:`differences` has of these effects: with more than the accuracy the balanced one."""
    return {*effects, *(["balanced-accuracy"] if len(effects) > 1 else [])}


def _share_of(by: Array, groups: Labels | None) -> float:
    if groups is None:
        return 1.0
    _, places, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    rest = by - by.mean()
    grouped = np.bincount(places, rest)
    return _design(float(rest @ rest), float(grouped @ grouped), len(by), int(sizes @ sizes))


def verdict(found: Score) -> str:
    """Return ``"gains"``, ``"loses"``, or ``"ties"`` where the interval of a gain holds 0."""
    return "gains" if found.low > 0 else "loses" if found.high < 0 else "ties"


def _apart(total: float, squares: float, n: int, share: float) -> Score:
    """Return the mean of n numbers from -1 to 1 with Bonett and Price's interval: with a 1 and a -1 more.

    For two models they are 1 for each example that the second one alone gets right, -1 for the first one.
    """
    half = _Z * _error(total * share, squares * share + 2, n * share + 2, n * share + 2)
    value, middle = total / n, total * share / (n * share + 2)
    return Score(value, max(-1.0, min(value, middle - half)), min(1.0, max(value, middle + half)))


def _less_loss(total: float, squares: float, n: int, share: float, more: float) -> Score:
    """Return the mean of n differences of losses with its t interval.

    As in :func:`_apart` there are two differences more, one in favour of each model: the loss of a uniform guess, or
    half of what a mistake of either model would cost if that is more.
    """
    from scipy.special import stdtrit

    known = n * share + 2
    half = float(stdtrit(known - 1, 0.975)) * _error(total * share, squares * share + 2 * more**2, known, known - 1)
    value, middle = total / n, total * share / known
    low, high = max(-LARGEST_LOSS, min(value, middle - half)), min(LARGEST_LOSS, max(value, middle + half))
    return Score(value, low, high)


def _error(total: float, squares: float, n: float, free: float) -> float:
    return math.sqrt(max(0.0, squares / n - (total / n) ** 2) / free)


def _widened(squares: Array, sizes: Labels, more: float, share: float) -> float:
    """Return half the width of the interval of a difference of scores that are means over classes.

    A class's sum of squared influences counts a part of an example more on which the models differ as much as they can.
    Among 20 examples two good models often differ on none of a rare class, and DeLong's interval alone covers 61 %.
    """
    present = sizes > 0
    return _Z * math.sqrt(float(((squares[present] + more) / sizes[present].astype(float) ** 2).sum()) / share)


# The intervals.


def _wilson(p: float, n: float) -> tuple[float, float]:
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def _wilson_score(hits: int, total: int, share: float) -> Score:
    return Score(hits / total, *_wilson(hits / total, total * share))


def mean_of(parts: Sequence[Score], inflation: float = 1.0) -> Score:
    """Return the mean of scores, with the interval of a mean of independent ones, its variance times ``inflation``.

    Also of gains of clients, whose examples are independent; the interval says nothing of other clients.
    """
    values, lows, highs = (np.array([getattr(part, end) for part in parts]) for end in ("value", "low", "high"))
    value, scale = float(values.mean()), math.sqrt(inflation) / len(parts)
    low = value - scale * math.sqrt(float(((values - lows) ** 2).sum()))
    return Score(value, low, value + scale * math.sqrt(float(((highs - values) ** 2).sum())))


def _recalls(confusion: npt.NDArray[np.int64], share: float) -> list[Score]:
    return [
        _wilson_score(int(counts[label]), int(counts.sum()), share)
        for label, counts in enumerate(confusion)
        if counts.sum()
    ]


def _present(sums: Sums) -> list[int]:
    """Return the classes that have an AUROC; of two, the second is the positive one."""
    if sums.histogram is None:
        return []
    totals = sums.histogram.sum(2)
    found = np.flatnonzero((totals > 0).all(1)).tolist()
    return [label for label in found if label == 1] if len(totals) == 2 else found


def _areas(sums: Sums, share: float) -> list[Score]:
    if sums.histogram is None or sums.within is None:
        return []
    binned, _ = binned_pairs(sums.histogram)
    found = []
    for label in _present(sums):
        positives, negatives = sums.histogram[label]
        p, n = int(positives.sum()), int(negatives.sum())
        area = (binned[label] + sums.within[label]) / (2 * p * n)
        if min(p, n) >= _DELONG and 0 < area < 1:
            low, high = _delong(area, positives, negatives, share)
        else:
            low, high = _newcombe(area, p * share, n * share)
        found.append(Score(area, low, high))
    return found


def _delong(area: float, positives: npt.NDArray[Any], negatives: npt.NDArray[Any], share: float) -> tuple[float, float]:
    p, n = positives.sum(), negatives.sum()
    below, under = np.cumsum(negatives) - negatives / 2, np.cumsum(positives) - positives / 2
    of_positives, of_negatives = below / n, 1 - under / p  # each example's placement
    variance = float(np.average((of_positives - area) ** 2, weights=positives)) / (p - 1)
    variance += float(np.average((of_negatives - area) ** 2, weights=negatives)) / (n - 1)
    half = _Z * math.sqrt(variance / share) / (area * (1 - area))
    middle = math.log(area / (1 - area))
    return 1 / (1 + math.exp(half - middle)), 1 / (1 + math.exp(-half - middle))


def _newcombe(area: float, p: float, n: float) -> tuple[float, float]:
    from scipy.optimize import brentq

    mean = max(0.0, (p + n) / 2 - 1)

    def beyond(theta: float) -> float:
        spread = 1 + mean * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (area - theta) ** 2 - _Z**2 * theta * (1 - theta) * spread / (p * n)

    low = float(brentq(beyond, 0.0, area)) if area > 0 and beyond(0.0) * beyond(area) < 0 else 0.0
    high = float(brentq(beyond, area, 1.0)) if area < 1 and beyond(1.0) * beyond(area) < 0 else 1.0
    return low, high


def _mean(sums: tuple[int, int], n: int, share: float) -> tuple[float, float]:
    """Return a mean of fixed-point numbers, and half the width of its t interval."""
    from scipy.special import stdtrit

    mean, square = sums[0] / n / ONE, sums[1] / n / ONE
    free = n * share - 1
    if free <= 0:
        return mean, math.inf
    return mean, float(stdtrit(free, 0.975)) * math.sqrt(max(0.0, square - mean**2) / free)


def _log_loss(sums: Sums, share: float, num_classes: int) -> Score:
    """Return a mean loss with the t interval of its logarithm, because losses are skewed.

    The upper end counts one example more, because a confident model's few large losses may be missing among few
    examples: with the most of twice the loss of a uniform guess, twice the mean of the losses weighted by themselves,
    and half of what a wrong answer would cost, the mean loss if each example had another class. With that half, the end
    of n examples without a mistake is near that cost times 3.7 / n, the share of mistakes that n examples show none of
    in 2.5 % of draws.

    No interval covers every model: of examples that cost 104 nats each, the largest loss, a share of .17 is absent from
    20 in 2.5 % of draws, so that its end would have to be 17 nats above every mean.
    """
    loss, n = sums.loss or (0, 0), _scored(sums)
    mistake = 0.0 if sums.histogram is None else cost_of_mistake(sums.histogram)
    extra = max(2 * math.log(num_classes), 2 * loss[1] / max(1, loss[0]), mistake / 2)
    widened = loss[0] + round(extra * ONE), loss[1] + round(extra**2 * ONE)
    low, _ = _log_interval(loss, n, share)
    _, high = _log_interval(widened, n + 1, share)
    return Score(loss[0] / n / ONE, low, min(high, LARGEST_LOSS))


def _log_interval(sums: tuple[int, int], n: int, share: float) -> tuple[float, float]:
    mean, half = _mean(sums, n, share)
    factor = math.exp(min(half / mean, 700.0)) if mean else 1.0
    return mean / factor, mean * factor


def _f1_score(confusion: npt.NDArray[np.int64], share: float) -> Score:
    """Return macro F1 with the wider of two intervals at each end.

    One is that of a mean over classes. With t right examples of the m that have a class or are predicted as it, F1 is
    2 r / (1 + r) of the share r = t / m, which has Wilson's interval; a mistake enters the shares of two classes.
    Alone it covers 78 % of models that are nearly always right. The other one is that of paired differences, alone too
    narrow for few examples of two classes.
    """
    value, added = macro_f1(confusion)
    true, hits = confusion.sum(1), np.diagonal(confusion)
    either = true + confusion.sum(0) - hits
    shares = [_wilson_score(int(hits[label]), int(either[label]), share) for label in np.flatnonzero(true)]
    parts = [Score(*(2 * end / (1 + end) for end in (found.value, found.low, found.high))) for found in shares]
    known, squares = mean_of(parts, inflation=2 - 1 / len(parts)), (confusion * added**2).sum(1) * true**2.0
    half = _widened(squares, true, 3 * _PART / len(parts) ** 2, share)
    return Score(value, max(0.0, min(known.low, value - half)), min(1.0, max(known.high, value + half)))


def as_json(scores: Mapping[str, Score]) -> dict[str, dict[str, float]]:
    """Return scores as JSON values."""
    return {name: score.as_json() for name, score in scores.items()}


def describe(sums: Sums, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return everything that a report shows of a model's sums, as JSON values.

    Args:
        sums: Of at least one example.
        names: The classes' names; empty for their numbers.

    Returns:
        ``accuracy`` in %, ``examples``, ``scores`` by name; where the sums hold them also ``calibration-error`` with
        what a ``calibrated`` model would show, ``calibration``, three rows of bins, ``confusion`` and ``classes``,
        these two for at most 100 classes; ``notes``, what a reader must know of the figures.
    """
    found: dict[str, Any] = {
        "accuracy": round(100 * sums.correct / sums.examples, 2),
        "examples": sums.examples,
        "scores": as_json(scores_of(sums)),
        "notes": _notes(sums, names),
    }
    if (errors := calibration_error(sums)) is not None and sums.calibration is not None:
        found["calibration-error"] = dict(
            zip(("value", "calibrated"), (round(each, 6) for each in errors), strict=True)
        )
        counts, right, confidence = sums.calibration.tolist()
        found["calibration"] = [counts, right, [round(value / ONE, 3) for value in confidence]]
    if sums.confusion is not None and len(sums.confusion) <= _MOST_CLASSES:
        found |= {"confusion": sums.confusion.tolist(), "classes": per_class(sums, names)}
    return found


def _notes(sums: Sums, names: Sequence[str]) -> list[str]:
    lacking = [] if sums.confusion is None else np.flatnonzero(sums.confusion.sum(1) == 0).tolist()
    absent, notes = [names[label] if names else str(label) for label in lacking], []
    if absent:
        shown = ", ".join(absent[:10]) + (f" and {len(absent) - 10} more" if len(absent) > 10 else "")
        notes.append(f"no example is of class {shown}: it has no recall and no AUROC, and enters no mean over classes")
    if sums.confusion is None:
        notes.append("only the accuracy is known: answers hold NaN or Inf, or nodes share no more")
    elif not _scored(sums):
        notes.append("only accuracy, balanced accuracy and macro F1 are known: nodes share no more")
    for scores, known in (
        ("recall, balanced accuracy and macro F1", 0 if sums.confusion is None else int(sums.confusion.sum())),
        ("AUROC, log loss and calibration error", _scored(sums)),
    ):
        if 0 < known < sums.examples:
            notes.append(
                f"{scores} are of {known} of the {sums.examples} examples: the other answers hold NaN or Inf, or their "
                "nodes share less"
            )
    if (bound := auroc_bound(sums)) > 0:
        off = math.ceil(10_000 * bound) / 100
        notes.append(f"AUROC is exact to {off:g} points, by the width of the bins that clients count in")
    return notes
