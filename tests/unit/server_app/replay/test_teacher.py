"""Replays that distil what the replayed run ended with, and FENS on a server with labelled images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server_app.replay.request import Request
from server_app.replay.stored import replay_run
from server_app.settings.build import build_job, build_strategy, held_out
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import read_settings
from strategies.core.errors import DataError, OptionError
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec, Upload
from strategies.run.run_folder import RunFolder

MakeRun = Callable[..., Path]


def replayed(run: Path, method: str, **overrides: Any) -> dict[str, Any]:
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in overrides.items()}
    return replay_run(Request(run, method, given), log=lambda _: None)


def ended_with(run: Path, combiner: str, weights: dict[str, torch.Tensor]) -> Path:
    """Give a run an outcome: the ensemble of its uploads under some combiner."""
    with RunFolder.open(run) as folder:
        uploads = folder.round(1).uploads()
        folder.save_ensemble(EnsembleSpec(tuple(u.client for u in uploads), combiner, weights), uploads)
    return run


def test_a_replay_distils_the_ensemble_that_the_run_ended_with(run_folder: MakeRun) -> None:
    mean = ended_with(run_folder(name="mean"), "mean", {})
    first = ended_with(run_folder(name="first"), "weighted", {"weights": torch.tensor([1.0, 0.0, 0.0])})

    plain = replayed(mean, "feddf")["weights_sha256"]
    same, other = (replayed(run, "feddf", teacher="run")["weights_sha256"] for run in (mean, first))

    assert same == plain
    assert other != plain


def test_a_run_without_an_ensemble_is_no_teacher(run_folder: MakeRun) -> None:
    with pytest.raises(OptionError, match="setting 'teacher' is 'run': needs a run that ended with an ensemble"):
        replayed(run_folder(), "feddf", teacher="run")


def test_votes_are_no_teacher_of_a_method_that_makes_images(run_folder: MakeRun) -> None:
    run = ended_with(run_folder(), "voting", {"counts": torch.ones(3, 10, 10)})

    with pytest.raises(
        OptionError, match="method 'dense' makes images by the ensemble's gradient, and 'voting' has none"
    ):
        replayed(run, "dense", teacher="run")
    assert replayed(run, "feddf", teacher="run")["status"] == "finished"


def test_a_teacher_in_a_run_that_is_no_replay_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="setting 'teacher' is 'run': needs a replay"):
        check_needs_of_settings(read_settings({**small, "method": "feddf", "teacher": "run"}))


def test_fens_on_the_server_has_its_share_with_labels(small: dict[str, Any]) -> None:
    settings = read_settings({**small, "method": "fens", "fens.train-on": "server"})

    job = build_job(settings, held_out(settings)[1], None)

    assert job.labelled is not None
    images, labels = job.labelled
    assert len(images) == len(labels) == int(0.1 * 1297)
    assert job.proxy is None


def test_fens_on_a_server_without_a_share_is_refused(small: dict[str, Any]) -> None:
    settings = read_settings({**small, "method": "fens", "fens.train-on": "server", "data.proxy": 0.0})

    with pytest.raises(
        OptionError, match="'fens.train-on' is 'server' and 'data.proxy' 0: needs a larger 'data.proxy'"
    ):
        build_job(settings, held_out(settings)[1], None)


def test_fens_trained_on_the_server_shows_the_cost_of_quantisation(run_folder: MakeRun) -> None:
    table = replayed(run_folder(), "fens", fens__rounds=30, fens__aggregator="per-class", fens__server_lr=0.05)["table"]

    names = [row["name"] for row in table]
    assert names[-2:] == ["FENS, members in float32", "FENS"]
    assert abs(table[-1]["accuracy"] - table[-2]["accuracy"]) < 3
    assert table[-1]["accuracy"] > next(row["accuracy"] for row in table if row["name"] == "FedENS")


def test_labelled_images_that_the_clients_trained_on_are_refused_in_a_replay(run_folder: MakeRun) -> None:
    run = run_folder(**{"data.proxy": 0.0})

    with pytest.raises(OptionError, match="setting 'data.proxy' is 0.1, the last 129 of 1297 training images"):
        replayed(run, "fens", fens__train_on="server", data__proxy=0.1)


SOLE = {"data__proxy": 0.0, "distill__steps": 3, "distill__batch_size": 8}


def test_a_replay_distils_the_teacher_of_another_replay_on_the_images_that_it_stored(run_folder: MakeRun) -> None:
    run = run_folder()
    made = Path(replayed(run, "co-boosting", store_images=12)["run_dir"])
    with RunFolder.open(made, write=False) as folder:
        images = folder.images()
    assert images is not None
    assert images.shape == (12, 1, 16, 16)  # of the two epochs' 16 images

    given = {**SOLE, "data__proxy_file": str(made / "images.safetensors")}
    plain = replayed(run, "distill", **given)
    learned, again = (replayed(run, "distill", **given, teacher="run", teacher_run=str(made)) for _ in range(2))

    assert plain["work"]["teacher_forward"] == 3 * len(images)
    assert learned["weights_sha256"] == again["weights_sha256"] != plain["weights_sha256"]
    assert learned["table"][-1]["name"] == "Distilled on stored images"


def test_the_ensemble_of_other_models_is_no_teacher(run_folder: MakeRun) -> None:
    run, other = run_folder(), run_folder("lenet5", "mnist-cnn", "mnist-cnn", name="other")
    with RunFolder.open(other) as folder:  # one client has another architecture, one is the same, one has other weights
        first, _, last = folder.round(1).uploads()
        changed = {name: value + 1 for name, value in run_state(run, 1).items()}
        second = Upload(UploadFacts("client-001", "lenet5", 5, None), lambda: changed)
        folder.save_ensemble(EnsembleSpec(("client-000", "client-001"), "mean", {}), [first, second, last])

    with pytest.raises(OptionError, match="'teacher-run' is '.*other', whose .*, of client-001: must be a replay of"):
        replayed(run, "distill", data__proxy=0.1, teacher="run", teacher_run=str(other))
    with pytest.raises(OptionError, match="needs a run that ended with an ensemble; .*nowhere: holds no ensemble"):
        replayed(run, "distill", data__proxy=0.1, teacher="run", teacher_run="nowhere")
    with pytest.raises(OptionError, match="'teacher-run' is 'a': must be '' unless 'teacher' is 'run', not 'method'"):
        replayed(run, "distill", data__proxy=0.1, teacher_run="a")


def run_state(run: Path, client: int) -> dict[str, torch.Tensor]:
    with RunFolder.open(run, write=False) as folder:
        return dict(folder.round(1).uploads()[client].read())


def test_a_missing_file_of_images_is_one_line_and_leaves_no_folder(run_folder: MakeRun) -> None:
    run = run_folder()
    with pytest.raises(DataError, match=r"^setting 'data.proxy-file' is 'pool': no such file; must be a safetensors"):
        replayed(run, "distill", **SOLE, data__proxy_file="pool")
    assert [folder.name for folder in run.parent.iterdir()] == ["run"]


def test_a_replay_scores_on_the_half_that_it_names(run_folder: MakeRun) -> None:
    run = run_folder()
    halves = [replayed(run, "fedens", data__held_out=half)["accuracy"] for half in ("selection", "report", "all")]
    assert len(set(halves)) == 3
    assert halves[2] == pytest.approx((halves[0] + halves[1]) / 2, abs=1)


TAUGHT = ["co-boosting", "flboost"]  # one that ends with the pool too, and one with a loop of its own
FLBOOST = {"flboost__iterations": 1, "flboost__student_steps": 1, "flboost__batch_size": 8, "flboost__latent": 8}


@pytest.mark.parametrize("method", TAUGHT)
def test_a_replay_distils_the_uploads_as_tally_combines_them(run_folder: MakeRun, method: str) -> None:
    run = run_folder("lenet5", "mnist-cnn", "lenet5")
    given = FLBOOST if method == "flboost" else {}
    plain, tally = (replayed(run, method, teacher=teacher, **given) for teacher in ("method", "tally"))

    assert tally["status"] == "finished"
    assert tally["weights_sha256"] != plain["weights_sha256"]
    names = [row["name"] for row in tally["table"]]
    assert ("Co-Boosting ensemble" in names) == (method == "co-boosting")


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
    other = read_settings({**small, "method": "fedavg", "teacher": "tally"})
    job = build_job(other, held_out(other)[1], None)
    with pytest.raises(OptionError, match="'fedavg' does not distil an ensemble"):
        build_strategy(other, job)


def test_a_teacher_that_brings_its_counts_needs_no_label_counts(small: dict[str, Any]) -> None:
    silent = {**small, "method": "fedkd", "client.share-label-counts": False}
    with pytest.raises(OptionError, match="'client.share-label-counts' is False"):
        check_needs_of_settings(read_settings(silent))
    check_needs_of_settings(read_settings({**silent, "teacher": "tally"}))


def test_rounds_without_a_refiner_have_no_use_for_a_teacher(small: dict[str, Any]) -> None:
    rounds = {**small, "method": "iterative", "teacher": "tally"}
    with pytest.raises(
        OptionError, match="setting 'teacher' is 'tally': with method 'iterative' it needs an 'iterative.refiner'"
    ):
        check_needs_of_settings(read_settings(rounds))
    settings = read_settings({**rounds, "iterative.refiner": "flboost"})
    check_needs_of_settings(settings)
    job = build_job(settings, held_out(settings)[1], None)
    assert settings.refiner is not None
    settings.refiner.check(job)
