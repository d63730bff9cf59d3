"""The setting ``scale``: what it shortens, what it leaves, and who says so."""

from __future__ import annotations

from typing import Any

import pytest
from commands import MakeRun, replayed

from fl_app.config import AppConfig
from server_app.launch.result import print_result
from server_app.report.finish import table_lines
from server_app.settings.read import read_settings
from strategies.core.options import flatten

TRAINED = ("dense", "co-boosting", "intactofl", "tally", "f-dafl", "f-adi", "feddf", "fedkd", "fed-et")


@pytest.mark.parametrize("name", TRAINED)
def test_scale_when_below_one_shortens_local_and_server_epochs_and_nothing_else(name: str) -> None:
    given: dict[str, Any] = {"method": name, "client.epochs": 300, "server.epochs": 500}
    whole, tenth = read_settings(given), read_settings({**given, "scale": 0.1})

    assert tenth.scaled == {"client.epochs": [300, 30], "server.epochs": [500, 50]}
    # What run.json keeps are the published numbers, and the scale.
    assert dict(tenth.flat) == {**whole.flat, "scale": 0.1}
    assert {**flatten(tenth.method_config), "epochs": 500} == flatten(whole.method_config)
    assert {**flatten(tenth.app), "client.epochs": 300, "scale": 1.0} == flatten(whole.app)


@pytest.mark.parametrize(
    ("given", "scaled"),
    [
        ({}, {}),
        ({"method": "dense", "client.epochs": 3, "server.epochs": 1, "scale": 0.01}, {"client.epochs": [3, 1]}),
        ({"method": "fedavg", "client.epochs": 15, "scale": 0.5}, {"client.epochs": [15, 8]}),  # it trains nothing
    ],
)
def test_scale_leaves_an_epoch_at_least_also_to_the_client_that_reads_the_settings_itself(
    given: dict[str, Any], scaled: dict[str, list[int]]
) -> None:
    settings = read_settings(given)

    assert settings.scaled == scaled
    assert AppConfig.from_settings(settings.flat) == settings.app
    assert {key: flatten(settings.app)[key] for key in scaled} == {key: now for key, (_, now) in scaled.items()}


def test_a_shortened_replay_says_so_in_log_and_result(run_folder: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []

    result = replayed(run_folder(scale=0.5, client__epochs=10, server__epochs=2), "dense", log=lines.append)

    said = "client.epochs 5 instead of 10, server.epochs 1 instead of 2"
    assert result["scaled"] == {"client.epochs": [10, 5], "server.epochs": [2, 1]}
    assert lines.count(f"scaled: {said}") == 1
    assert f"scaled: {said}" in table_lines(result)
    print_result(result, "text")
    assert f"scaled       {said}" in capsys.readouterr().out
