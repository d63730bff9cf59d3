"""The plot of students on clients of the published schedule, against the stored results."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from doc_pages import ROOT

BENCH = ROOT / "tests" / "bench"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(BENCH))
    SCRIPT = runpy.run_path(str(BENCH / "published_plot.py"))
CELL = [row for row in SCRIPT["stored"]("published")["rows"] if (row["data"], row["alpha"]) == SCRIPT["CELL"]]
FIRST = {row["name"]: row for row in CELL if row["seed"] == 0}


def lines(panel: int) -> dict[str, list[list[float]]]:
    """Return the marked lines of a panel: marker -> the points."""
    axes = SCRIPT["drawn"](CELL).axes[panel]
    found: dict[str, list[list[float]]] = {}
    for line in axes.lines:
        found.setdefault(line.get_marker(), []).extend(line.get_xydata().tolist())
    return found


def test_a_curve_ends_after_the_steps_that_the_run_has_counted() -> None:
    dense = FIRST["dense"]
    assert lines(0)["^"][-1] == [dense["student_steps"], dense["accuracy"]["DENSE"]]
    assert lines(0)["^"][0] == [sum(range(1, 11)), dense["curve"][0][1]]  # ten epochs of 1 to 10 batches
    tally = FIRST["tally, read off"]
    assert lines(0)["o"][-1] == [tally["student_steps"], tally["accuracy"]["Tally"]]


def test_a_finished_server_stage_is_a_point_per_seed() -> None:
    own = [row for row in CELL if row["name"] == "tally, read off"]
    assert lines(1)["o"] == [[row["server_cpu_s"], row["accuracy"]["Tally"]] for row in own]
    assert len(own) >= 3


def test_other_steps_than_those_of_a_growing_pool_are_refused() -> None:
    row: dict[str, Any] = {**FIRST["dense"], "student_steps": 500.0}
    with pytest.raises(ValueError, match="dense took 500"):
        SCRIPT["steps"](row, 10)


def test_a_curve_that_was_stopped_makes_room_for_an_ended_one_and_else_tells_how_far_it_came() -> None:
    stopped: dict[str, Any] = {**FIRST["co-boosting"], "accuracy": {}, "curve": [[10, 40.0], [20, 50.0]]}
    ended: dict[str, Any] = {**FIRST["dense"], "name": f"co-boosting{SCRIPT['OTHERS']}"}

    def labels(*rows: dict[str, Any]) -> set[object]:
        others = [row for row in CELL if not row["name"].startswith("co-boosting")]
        return {line.get_label() for line in SCRIPT["drawn"]([*others, *rows]).axes[0].lines}

    assert "Co-Boosting, 20 epochs so far" in labels(stopped)
    assert "Co-Boosting" in labels(stopped, ended)
    assert "Co-Boosting" in labels({**stopped, "accuracy": {"Co-Boosting": 60.0}})
