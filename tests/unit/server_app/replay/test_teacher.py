"""Replays that distil what the replayed run ended with, and FENS on a server with labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MakeRun, replayed

from server_app.settings.build import build_job, build_strategy, held_out
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError
from strategies.method import EnsembleSpec
from strategies.run.ensembles import save_ensemble
from strategies.run.run_folder import RunFolder


def ended_with(run: Path, combiner: str, weights: dict[str, torch.Tensor]) -> Path:
    """Give a run an outcome: the ensemble of its uploads under some combiner."""
    with RunFolder.open(run) as folder:
        uploads = folder.round(1).uploads()
        spec = EnsembleSpec(tuple(u.client for u in uploads), combiner, weights)
        save_ensemble(folder.path / "ensemble", spec, uploads)
    return run


@pytest.mark.slow
def test_a_replay_distils_the_ensemble_that_the_run_ended_with(run_folder: MakeRun) -> None:
    mean = ended_with(run_folder(name="mean"), "mean", {})
    first = ended_with(run_folder(name="first"), "weighted", {"weights": torch.tensor([1.0, 0.0, 0.0])})

    plain = replayed(mean, "feddf")["weights_sha256"]
    same, other = (replayed(run, "feddf", teacher="run")["weights_sha256"] for run in (mean, first))

    assert same == plain
    assert other != plain


def test_fens_on_the_server_has_its_share_with_labels(small: dict[str, Any]) -> None:
    settings = read_settings({**small, "method": "fens", "fens.train-on": "server"})

    job = build_job(settings, held_out(settings)[1], None)

    assert job.labelled is not None
    images, labels = job.labelled
    assert len(images) == len(labels) == int(0.1 * 1297)
    assert job.proxy is None


SOLE = {"data__proxy": 0.0, "distill__steps": 3, "distill__batch_size": 8}


@pytest.mark.slow
def test_a_replay_distils_the_teacher_of_another_replay_on_the_images_that_it_stored(run_folder: MakeRun) -> None:
    run = run_folder()
    made = Path(replayed(run, "co-boosting", store_images=12)["run_dir"])
    with RunFolder.open(made, write=False) as folder:
        images = folder.images()
    assert images.shape == (12, 1, 16, 16)  # of the two epochs' 16 images

    given = {**SOLE, "data__proxy_file": str(made / "images.safetensors")}
    plain = replayed(run, "distill", **given)
    learned, again = (replayed(run, "distill", **given, teacher="run", teacher_run=str(made)) for _ in range(2))

    assert plain["work"]["teacher_forward"] == 3 * len(images)
    assert learned["weights_sha256"] == again["weights_sha256"] != plain["weights_sha256"]
    assert learned["table"][-1]["name"] == "Distilled on stored images"


@pytest.mark.slow
def test_a_replay_distils_the_uploads_as_tally_combines_them(run_folder: MakeRun) -> None:
    run = run_folder("lenet5", "mnist-cnn", "lenet5")
    plain, tally = (replayed(run, "co-boosting", teacher=teacher) for teacher in ("method", "tally"))

    assert tally["status"] == "finished"
    assert tally["weights_sha256"] != plain["weights_sha256"]
    assert "Co-Boosting ensemble" in [row["name"] for row in tally["table"]]


def test_a_run_whose_teacher_is_tally_keeps_it_in_replays_of_methods_that_take_one(run_folder: MakeRun) -> None:
    run, plain = run_folder(method="dense", teacher="tally"), run_folder(name="plain", method="dense")

    assert replayed(run, "")["weights_sha256"] == replayed(plain, "", teacher="tally")["weights_sha256"]
    assert replayed(run, "fedens")["status"] == "finished"
    with pytest.raises(OptionError, match=r"'fedens' does not distil an ensemble that it is given \('tally'\)"):
        replayed(run, "fedens", teacher="tally")


def test_settings_hand_tally_to_the_strategy(small: dict[str, Any], tmp_path: Path) -> None:
    settings = read_settings({**small, "method": "dense", "teacher": "tally", "run-dir": str(tmp_path / "run")})
    check_needs_of_settings(settings)

    strategy = build_strategy(settings, build_job(settings, held_out(settings)[1], None))

    assert strategy.job.teacher == "tally"
