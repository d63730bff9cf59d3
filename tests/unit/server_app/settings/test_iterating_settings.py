"""Settings of a run in rounds, and its result table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_app.models import build
from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run, unmet_need
from server_app.report.evaluation import result_table
from server_app.settings.build import build_job, build_strategy, held_out
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError
from strategies.core.seeds import seeded_torch
from strategies.flower.rounds.iterative import Iterative
from strategies.method import Outcome
from strategies.run.stage import StageReport

ROUNDS = {"method": "iterative", "iterative.rounds": 3}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"client.checkpoint": "{client}.pt"},
            "'client.checkpoint' is '{client}.pt': must be empty with method 'iterative'",
        ),
        (
            {"client.optimizer": "adam", "iterative.strategy": "scaffold"},
            "'client.optimizer' is 'adam': must be 'sgd' with 'iterative.strategy' 'scaffold'",
        ),
        (
            {"client.optimizer": "adam", "iterative.strategy": "fednova"},
            "must be 'sgd' with 'iterative.strategy' 'fednova'",
        ),
        (
            {"iterative.server-momentum": 0.9},
            "'iterative.server-momentum' is 0.9 with 'iterative.strategy' 'fedavg': must be 0; only fednova",
        ),
        ({"model.per-client": "lenet5,cnn1"}, "method 'iterative' needs one architecture for all"),
    ],
)
def test_settings_that_rounds_can_do_nothing_with_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        check_needs_of_settings(read_settings({**ROUNDS, **settings}))


def test_adam_and_the_plain_strategies_go_together() -> None:
    check_needs_of_settings(read_settings({**ROUNDS, "client.optimizer": "adam", "iterative.strategy": "fedadam"}))


def test_settings_make_the_strategy(tmp_path: Path) -> None:
    given = {**ROUNDS, "iterative.strategy": "fedyogi", "run-dir": str(tmp_path / "run"), "seed": 4, "threads": 1}
    settings = read_settings(given)
    images, split = held_out(settings)
    strategy = build_strategy(settings, build_job(settings, split, images))
    assert isinstance(strategy, Iterative)
    assert (strategy.job.config.strategy, strategy.job.config.rounds, strategy.job.seed) == ("fedyogi", 3, 4)
    assert strategy.job.observer is images
    assert strategy.folder.info["settings"]["iterative.strategy"] == "fedyogi"
    strategy.close()


def test_result_table_has_the_last_model_alone() -> None:
    settings = read_settings({**ROUNDS, "iterative.strategy": "scaffold", "device": "cpu"})
    images, split = held_out(settings)
    with seeded_torch(0):
        state = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict()
    report = StageReport(Outcome(student=dict(state)), build_job(settings, split, images), 0, 0.0)
    (row,) = result_table(report, "iterative", images)
    assert (row.name, row.kind) == ("SCAFFOLD, 3 rounds", "baseline")
    assert 0.0 <= row.accuracy <= 40.0


def test_replay_of_stored_uploads_is_refused_in_one_line(run_folder: Any) -> None:
    run = run_folder()
    with pytest.raises(OptionError, match=r"'iterative' needs that clients answer in every round.*oneshot run"):
        replay_run(ReplayRequest(run, "iterative", {}), log=lambda line: None)
    # A comparison of all methods leaves it out for the same reason.
    assert "clients answer in every round" in unmet_need(ReplayRequest(run, "iterative", {}))
    assert [path.name for path in run.parent.iterdir()] == [run.name]
