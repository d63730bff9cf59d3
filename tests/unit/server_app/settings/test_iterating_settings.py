"""Settings of a run in rounds, and its result table."""

from __future__ import annotations

from pathlib import Path

from fl_app.models import build
from server_app.report.evaluation import result_table
from server_app.settings.build import build_job, build_strategy, held_out
from server_app.settings.read import read_settings
from strategies.core.seeds import seeded_torch
from strategies.flower.rounds.iterative import Iterative
from strategies.method import Outcome
from strategies.run.stage import StageReport

ROUNDS = {"method": "iterative", "iterative.rounds": 3}


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
