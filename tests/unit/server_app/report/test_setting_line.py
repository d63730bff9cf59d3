"""The line below the titles names data, split, clients and seed, and where several runs differ, all their values."""

from __future__ import annotations

import pytest

from server_app.report.tables import setting_line, split_line

DIGITS = {"data.name": "digits", "data.partition": "dirichlet-classes", "data.alpha": 0.3, "data.sigma": 0.0}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (DIGITS, "dirichlet-classes, alpha 0.3"),
        (
            {"data.partition": "classes", "data.classes-per-client": 2, "data.alpha": 0.3},
            "classes, 2 classes per client",
        ),
        ({"data.partition": "iid", "data.alpha": 0.3}, "iid"),
        ({"data.partition": "lognormal", "data.sigma": 0.6}, "lognormal, sigma 0.6"),
        ({}, ""),
    ],
)
def test_split_is_its_law_with_the_parameter_that_matters(settings: dict[str, object], line: str) -> None:
    assert split_line(settings) == line


def test_setting_of_runs_that_differ_has_all_values() -> None:
    runs = [DIGITS, {**DIGITS, "data.alpha": 0.1}]

    found = setting_line(runs, [5, 10], [1, 0, 1])

    assert found == (
        "digits · split dirichlet-classes, alpha 0.3 / dirichlet-classes, alpha 0.1 · 5 / 10 clients · seeds 0 / 1"
    )
