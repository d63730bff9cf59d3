"""The checks of a strategy's plain arguments, before a client has worked, and of what a project's own code returns."""

from __future__ import annotations

from collections.abc import Callable
from logging import WARNING
from numbers import Integral
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from ..core.errors import OptionError
from ..core.places import expand_user
from ..uploads.builders import check_shape

Shape = tuple[int, int, int]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
# Flower's steps, for callers that own the loop; start() has its own.
STEPS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


def check_arguments(input_shape: Any, *, seed: Any, min_uploads: Any, fraction_evaluate: Any = 0.0) -> Shape:
    """Refuse arguments of a strategy that are out of their range.

    Args:
        input_shape: Three whole numbers above 0.
        seed: A whole number.
        min_uploads: A whole number, at least 1.
        fraction_evaluate: From 0 to 1.

    Returns:
        The input shape, as a tuple.

    Raises:
        OptionError: One of them is out of its range.
    """
    shape = check_shape(input_shape)
    if not isinstance(seed, Integral):
        raise OptionError(f"seed is {seed!r}: must be a whole number")
    if not isinstance(min_uploads, Integral) or not min_uploads >= 1:  # type: ignore[operator]
        raise OptionError(f"min_uploads is {min_uploads!r}: must be a whole number at least 1")
    if not isinstance(fraction_evaluate, int | float) or not 0.0 <= fraction_evaluate <= 1.0:
        raise OptionError(f"fraction_evaluate is {fraction_evaluate!r}: must be a number from 0 to 1")
    return shape


def check_start(strategy: Strategy, own: type[Strategy], timeout: Any) -> None:
    """Check the deadline of ``start()``, and warn about steps that a subclass overrides and ``start()`` never calls.

    Args:
        strategy: The strategy.
        own: The class whose ``start()`` it is.
        timeout: Seconds, at least 0.

    Raises:
        OptionError: The deadline is no such number.
    """
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise OptionError(f"timeout is {timeout!r}: must be a number of seconds, at least 0")
    if changed := [step for step in STEPS if getattr(type(strategy), step) is not getattr(own, step)]:
        line = "%s overrides %s, which start() does not call: use observer or evaluate_fn, or a loop of your own"
        log(WARNING, line, type(strategy).__name__, ", ".join(changed))


def absolute(run_dir: str | Path | None) -> Path | None:
    """Return a run folder as it is meant now, wherever the process goes later; None for none."""
    return expand_user(run_dir).absolute() if run_dir else None


def keep_plain_scores(evaluate_fn: EvaluateFn | None) -> EvaluateFn | None:
    """Return a project's own function as one whose scores a run can keep, see :func:`scores_by_name`; None for none."""
    if evaluate_fn is None:
        return None

    def scored(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return kept_scores("evaluate_fn", evaluate_fn(server_round, arrays))

    return scored


def kept_scores(what: str, found: Any) -> MetricRecord | None:
    """Return the scores that a project's own function returned; None if it returned none, see :func:`scores_by_name`.

    Numbers of numpy and torch become Python's, and their rows lists, as a checkpoint holds them.
    """
    if found is None:
        return None
    return scores_by_name(what, found, lambda value: value.tolist() if hasattr(value, "tolist") else value) or None


def scores_by_name(what: str, found: Any, read: Callable[[Any], Any] = float) -> MetricRecord:
    """Return the scores that a project's own function returned; none, and a warning, if they are not by name.

    The result of a run matters more than its scores.

    Args:
        what: The function's name as an argument.
        found: Names -> numbers.
        read: Makes a number of one score.
    """
    try:
        return MetricRecord({key: read(value) for key, value in found.items()})
    except (AttributeError, RuntimeError, TypeError, ValueError):
        line = "%s returned %s: must be names with numbers, such as {'accuracy': 93.0}; they are left out"
        log(WARNING, line, what, " ".join(repr(found).split())[:80])
        return MetricRecord()
