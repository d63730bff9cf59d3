"""From a tenth of the work on, the time left is within 30 % for methods whose epochs cost the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from strategies.run.journal import Pace


def errors(
    seconds: Sequence[float],
    steps: Sequence[int],
    *,
    start_s: float,
    told: bool,
    first: int = 0,
    jitter: Callable[[], float] = lambda: 1.0,
) -> list[tuple[float, float | None]]:
    """Play a stage on a fake clock; return (share of the work done, estimate / truth) at every report.

    Args:
        seconds: Seconds of each epoch.
        steps: Steps of each epoch.
        start_s: Seconds before the first step, with reports of the start in between.
        told: Whether reports say how many steps an epoch has.
        first: Epochs of an earlier process.
        jitter: Factor of each step.
    """
    now, found, total = 1000.0, [], first + len(seconds)
    pace = Pace(first, now)
    times = [[jitter() * each / count for _ in range(count)] for each, count in zip(seconds, steps, strict=True)]
    work = sum(map(sum, times))
    done = 0.0

    def note(step: int, part: tuple[int, int] = (0, 0)) -> None:
        pace.note(now, step, total, part)
        left = pace.left(now)
        truth = work - done
        found.append((done / work, None if left is None or not truth else left / truth))

    for _ in range(5):
        now += start_s / 5
        note(first)
    for number, each in enumerate(times):
        for step, took in enumerate(each, start=1):
            now, done = now + took, done + took
            note(first + number, (step, len(each) if told else 0))
        note(first + number + 1, (0, len(each)))
    return found


@pytest.mark.parametrize("epochs", [12, 40])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("first", [0, 7])
def test_estimate_of_equal_epochs_is_within_30_percent_after_a_tenth(epochs: int, told: bool, first: int) -> None:
    rng = random.Random(0)

    found = errors(
        [4.0] * epochs, [20] * epochs, start_s=60.0, told=told, first=first, jitter=lambda: rng.uniform(0.6, 1.4)
    )

    late = [ratio for share, ratio in found if 0.1 <= share < 0.98]
    assert late
    assert all(ratio is not None and 0.7 <= ratio <= 1.3 for ratio in late)


def test_estimate_within_the_first_epoch_exists_where_its_steps_are_told() -> None:
    found = errors([30.0] * 2, [100] * 2, start_s=60.0, told=True)

    assert all(ratio == pytest.approx(1.0, abs=0.05) for share, ratio in found if 0.05 <= share < 0.5)


@pytest.mark.parametrize("first", [0, 7])
def test_estimate_of_epochs_of_one_step_begins_with_the_second(first: int) -> None:
    found = errors([4.0] * 12, [1] * 12, start_s=60.0, told=True, first=first)

    # Five reports of the start, then two per epoch.
    assert [ratio for _, ratio in found[:8]] == [None] * 8
    assert all(ratio is None or ratio == pytest.approx(1.0, abs=1e-6) for _, ratio in found)
    assert found[-2][1] is None  # the truth is 0
    assert found[-3][1] is not None


def test_first_report_at_the_end_of_an_epoch_of_one_step_gives_no_estimate_yet() -> None:
    pace = Pace(0, 0.0)
    pace.note(1.0, 0, 5, (1, 1))
    pace.note(1.1, 1, 5, (0, 1))
    assert pace.left(1.2) is None


def test_estimate_of_growing_epochs_grows_with_their_steps() -> None:
    steps = [10 + 2 * (number + 1) for number in range(24)]
    seconds = [1.0 + 0.1 * count for count in steps]  # steps of two kinds, of which one becomes more

    found = errors(seconds, steps, start_s=10.0, told=True)

    assert all(ratio is not None and 0.7 <= ratio <= 1.3 for share, ratio in found if 0.1 <= share < 0.98)


def test_before_anything_is_known_there_is_no_estimate() -> None:
    pace = Pace(0, 0.0)
    assert pace.left(5.0) is None
    pace.note(5.0, 0, 10)
    assert pace.left(5.0) is None
    pace.note(6.0, 0, 10, (1, 0))
    assert pace.left(6.0) is None


def test_estimate_falls_while_nothing_is_reported_and_ends_at_zero() -> None:
    pace = Pace(0, 0.0)
    for step in range(4):
        pace.note(10.0 * step, step, 4)
    assert [pace.left(now) for now in (30.0, 34.0, 60.0)] == [10.0, 6.0, 0.0]
    pace.note(40.0, 4, 4)
    assert pace.left(40.0) == 0.0
