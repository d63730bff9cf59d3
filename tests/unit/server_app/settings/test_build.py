from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from PIL import Image

from fl_app.data import clients_share
from server_app.settings.build import build_job, build_strategy, check_before_start, held_out, open_half
from server_app.settings.checks import check_needs_of_settings, check_same_run, free_on
from server_app.settings.choices import CHOICES
from server_app.settings.read import default_settings, listed_settings, overridden, read_settings
from strategies.core.durable import read_json
from strategies.core.errors import ComputeError, DataError, OneShotError, OptionError
from strategies.core.options import PRESET_NAMES, QUICK
from strategies.flower.rounds.iterative import Iterative
from strategies.method import Normalization
from strategies.methods.dense import DenseConfig

QUICK_DENSE = {
    "epochs": 24, "generator_steps": 10, "generator_lr": 0.003, "synthesis_batch_size": 64, "batch_size": 32,
    "kd_temperature": 4.0, "teacher_precision": "auto",
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, DenseConfig(**QUICK_DENSE)),
        ({"preset": "published"}, DenseConfig()),
        ({"preset": "paper"}, DenseConfig.preset("paper")),
        ({"preset": "feddf"}, DenseConfig()),  # a preset that this method lacks
        ({"server.epochs": "", "server.batch-size": ""}, DenseConfig(**QUICK_DENSE)),
        ({"server.epochs": 7, "server.batch-size": 9}, DenseConfig(**{**QUICK_DENSE, "epochs": 7, "batch_size": 9})),
        ({"preset": "paper", "server.epochs": 24}, DenseConfig.preset("paper", epochs=24)),
        # Keys of stored runs: of a shared option, and of a value that only presets set today.
        (
            {"dense.batch-size": 9, "dense.keep-images": "last"},
            DenseConfig(**{**QUICK_DENSE, "batch_size": 9, "keep_images": "last"}),
        ),
    ],
)
def test_a_method_has_the_preset_s_values_but_where_settings_differ(given: dict[str, Any], wanted: DenseConfig) -> None:
    assert read_settings({"method": "dense", **given}).method_config == wanted


def test_another_preset_replaces_the_stored_options_of_methods() -> None:
    stored = {"method": "dense", "dense.epochs": 24, "dense.batch-size": 9, "client.epochs": 3, "seed": 4}

    again = read_settings(overridden(stored, {"seed": 5}))
    other = read_settings(overridden(stored, {"preset": "paper"}))
    smaller = read_settings(overridden(stored, {"server.batch-size": 5}))

    assert (again.method_config.batch_size, again.app.client.epochs, again.app.seed) == (9, 3, 5)
    assert (other.method_config, other.app.client.epochs) == (DenseConfig.preset("paper"), 3)
    assert (smaller.method_config.batch_size, smaller.method_config.epochs) == (5, 24)


PAPERS = ("dense", "co-boosting", "f-dafl", "f-adi", "feddf", "intactofl")


@pytest.mark.parametrize("method", PAPERS)
def test_teachers_are_in_float32_under_every_preset_of_a_paper(method: str) -> None:
    found = {
        preset: read_settings({"method": method, "preset": preset}).method_config.teacher_precision
        for preset in PRESET_NAMES
    }

    assert found == {preset: "auto" if preset == QUICK else "float32" for preset in PRESET_NAMES}


@pytest.mark.parametrize("method", [*PAPERS, "tally"])
@pytest.mark.parametrize(
    ("stored", "changes", "wanted"),
    [
        (default_settings(), {}, "auto"),
        ({"preset": "quick"}, {}, "float32"),  # stored before the setting existed
        ({"preset": "quick", "server.teacher-precision": "float32"}, {}, "float32"),
        ({"preset": "quick"}, {"preset": "quick"}, "auto"),
        ({"preset": "quick"}, {"server.teacher-precision": "bfloat16"}, "bfloat16"),
    ],
)
def test_a_stored_run_replays_with_the_teachers_precision_that_it_had(
    method: str, stored: dict[str, Any], changes: dict[str, Any], wanted: str
) -> None:
    changed = overridden({**stored, "method": method}, changes)

    assert read_settings(changed).method_config.teacher_precision == wanted
    assert read_settings(listed_settings(changed)).method_config.teacher_precision == wanted


@pytest.mark.parametrize("stored", [{"method": "flboost"}, {"method": "iterative", "iterative.refiner": "flboost"}])
def test_a_stored_value_that_is_fixed_now_is_refused_for_its_own_method_alone(stored: dict[str, Any]) -> None:
    stored = {**stored, "flboost.moments": "mnist"}
    line = "stored setting 'flboost.moments' is 'mnist': must be 'none', which is fixed now"

    for refused in (stored, {**stored, "method": "dense"}):
        with pytest.raises(OptionError, match=line):
            overridden(refused, {"method": "flboost"})
    with pytest.raises(OptionError, match=line):
        overridden(stored, {"seed": 5})
    assert read_settings(overridden(stored, {"method": "dense"})).choice.name == "dense"
    assert read_settings(overridden({**stored, "method": "dense", "iterative.refiner": "none"}, {})).app.seed == 0
    with pytest.raises(OptionError, match="stored setting 'data.copies' is 3.0: must be 10.0"):
        overridden({**stored, "data.copies": 3.0}, {"method": "dense"})


def test_the_settings_of_a_stored_run_are_listed_under_the_keys_of_today() -> None:
    stored = {
        "method": "dense", "dense.batch-size": 9, "f-dafl.batch-size": 8, "dense.latent": 256, "gone": 1,
        "data.law": "dirichlet-p4prep",
    }  # fmt: skip

    found = listed_settings(stored)

    of_today = {
        "method": "dense", "server.batch-size": 9, "data.partition": "fedftg-weighted",
        "server.teacher-precision": "float32",
    }  # fmt: skip
    assert found == {**default_settings(), **of_today}
    check_same_run({"settings": stored}, found)


def test_the_job_has_the_data_set_s_shape_and_the_settings() -> None:
    settings = read_settings({"seed": 3, "threads": 2, "device": "cpu", "model.student": "cnn-torch"})
    images, split = held_out(settings)

    job = build_job(settings, split, images)

    assert (job.num_classes, job.input_shape, job.student) == (10, (1, 16, 16), "cnn-torch")
    assert (job.seed, job.threads, job.device, job.uploads) == (3, 2, "cpu", ())
    assert job.normalization == Normalization((0.5,), (0.5,))
    assert job.config == settings.method_config
    assert job.observer is images
    assert tuple(images.data.images.shape) == (500, 1, 16, 16)


def test_settings_that_the_method_can_work_with_are_let_pass() -> None:
    for name in CHOICES:
        check_needs_of_settings(read_settings({"method": name}))
    check_needs_of_settings(read_settings({"method": "dense", "model.per-client": "lenet5,resnet8"}))
    check_needs_of_settings(read_settings({"method": "dense", "client.share-label-counts": False}))


def test_a_device_that_is_not_here_is_refused_at_once_when_the_stage_runs_here() -> None:
    with pytest.raises(ComputeError, match="cuda:99"):
        check_needs_of_settings(read_settings({"device": "cuda:99", "compute": "in-process"}))

    # In a Ray actor, which may run elsewhere, that is not known here.
    check_needs_of_settings(read_settings({"device": "cuda:99", "compute": "ray"}))


def test_a_device_that_the_clients_cannot_have_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ComputeError, match="'cuda' is missing.* set 'client.device' to 'auto' or 'cpu'"):
        check_before_start(read_settings({"client.device": "cuda"}), 5)


@pytest.mark.parametrize(
    ("lacks", "now", "line"),
    [
        ("", {}, ""),
        ("", {"data.alpha": 0.1}, "'data.alpha' is 0.1, but the run to resume began with 0.3"),
        ("client.clip", {}, ""),  # the run is older than the setting, and has its default
        ("privacy.epsilon", {"privacy.epsilon": 1.0}, "'privacy.epsilon' is 1.0, but the run to resume began with 0.0"),
    ],
)
def test_a_resumed_run_when_a_setting_differs_is_refused_by_key(lacks: str, now: dict[str, Any], line: str) -> None:
    begun = {key: value for key, value in default_settings().items() if key != lacks}

    with pytest.raises(OptionError, match=line) if line else nullcontext():
        check_same_run({"settings": begun}, {**default_settings(), **now})


def test_a_resumed_run_when_only_places_and_patience_differ_goes_on() -> None:
    changed = {
        "resume": "runs/a",
        "run-dir": "",
        "compute": "in-process",
        "shards": 4,
        "data.root": "elsewhere",
        "client.state-dir": "elsewhere",
        "min-uploads": 1,
        "deadline-s": 9.0,
        "max-upload-mib": 1.0,
        "client.max-ensemble-mib": 9.0,
        "client.device": "cpu",
        "fens.patience-s": 5.0,
        "checkpoint-s": 1.0,
        "tracker": "mlflow",
        "metric": "auroc",
        "evaluate.results": "runs/a",
        "model.evaluate": "my:scores",
    }

    check_same_run({"settings": default_settings()}, {**default_settings(), **changed})
    check_same_run({}, default_settings())
    assert set(changed) == free_on("resume")


def test_the_strategy_has_the_settings_and_stores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONESHOT_NUM_SUPERNODES", "7")
    settings = read_settings(
        {"method": "fedens", "run-dir": str(tmp_path / "run"), "min-uploads": 4, "compute": "in-process"}
    )
    images, split = held_out(settings)

    strategy = build_strategy(settings, build_job(settings, split, images))

    assert strategy.method == CHOICES["fedens"].method
    assert (strategy.rounds.min_uploads, strategy.rounds.compute) == (4, "in-process")
    facts = read_json(strategy.folder.path / "run.json")
    strategy.close()
    assert facts["settings"] == dict(settings.flat)
    assert (facts["method"], facts["num-supernodes"]) == ("fedens", 7)


def test_settings_of_rounds_make_their_strategy(tmp_path: Path) -> None:
    given = {
        "method": "iterative",
        "iterative.rounds": 3,
        "iterative.strategy": "fedyogi",
        "run-dir": str(tmp_path / "run"),
        "seed": 4,
    }
    settings = read_settings(given)
    images, split = held_out(settings)
    strategy = build_strategy(settings, build_job(settings, split, images))
    assert isinstance(strategy, Iterative)
    assert (strategy.job.config.strategy, strategy.job.config.rounds, strategy.job.seed) == ("fedyogi", 3, 4)
    assert strategy.job.observer is images
    assert strategy.folder.info["settings"]["iterative.strategy"] == "fedyogi"
    strategy.close()


def test_proxy_images_when_the_method_needs_them_are_a_share_that_no_client_gets() -> None:
    settings = read_settings({"method": "feddf", "data.proxy": 0.2, "seed": 3})
    split, train = open_half(settings, "test"), open_half(settings, "train")

    proxy = build_job(settings, split, None).proxy

    held = clients_share(train, seed=3, proxy=0.2)
    kept = torch.tensor([position for position in range(1297) if position not in set(held.tolist())])
    assert len(proxy) == 259
    assert torch.equal(proxy, train.take(kept).images)
    other = build_job(settings, split, None, data_seed=4).proxy
    assert not torch.equal(other, proxy)
    assert build_job(read_settings({"method": "fedens", "data.proxy": 0.2}), split, None).proxy is None


@pytest.mark.parametrize("method", [{"method": "feddf"}, {"method": "iterative", "iterative.refiner": "feddf"}])
def test_the_strategy_when_the_method_needs_proxy_images_holds_them(tmp_path: Path, method: dict[str, str]) -> None:
    settings = read_settings({**method, "data.proxy": 0.2, "run-dir": str(tmp_path / "run")})
    job = build_job(settings, open_half(settings, "test"), None)

    strategy = build_strategy(settings, job)

    assert strategy.job.proxy is not None
    assert strategy.job.proxy is job.proxy


def test_proxy_images_of_another_data_set_are_its_training_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    write_images(tmp_path)
    given = {"method": "feddf", "data.name": "imagefolder", "data.root": str(tmp_path), "data.image-size": 8}
    settings = read_settings({**given, "data.proxy-name": "digits", "model.name": "resnet8"})

    with pytest.raises(OptionError, match="'data.proxy-name' is 'digits', whose images have 1 channels: .* with 3"):
        build_job(settings, open_half(settings, "test"), None)

    settings = read_settings({"method": "feddf", "data.proxy-name": "mnist", "data.root": str(tmp_path)})
    with pytest.raises(DataError, match="'mnist' is not in .* no network in tests"):
        build_job(settings, open_half(settings, "test"), None)


def write_images(root: Path) -> None:
    for half in ("train", "test"):
        (root / half / "ant").mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(root / half / "ant" / "a.png")


def test_the_images_of_the_server_are_no_client_s() -> None:
    check_before_start(read_settings({"method": "feddf", "data.proxy": 0.2}), 5)
    with pytest.raises(OptionError, match="--num-supernodes is 131: must be at most 130"):
        check_before_start(read_settings({"data.proxy": 0.9}), 131)


@pytest.mark.parametrize("method", ["fens", "dense", "iterative"])
def test_a_server_without_examples_needs_no_data_set_of_its_own(tmp_path: Path, method: str) -> None:
    where = "none" if method == "iterative" else "clients"
    given = {"method": method, "data.name": "cifar10", "data.root": str(tmp_path / "nowhere"), "evaluate.on": where}
    settings = read_settings(given)

    images, split = held_out(settings)
    job = build_job(settings, split, images)

    assert images is None
    assert (job.input_shape, job.num_classes, len(split.labels)) == ((3, 32, 32), 10, 0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "feddf", "data.proxy": 0.2}, "'data.root' is .*: no such folder"),
        ({"method": "feddf"}, "needs that the server holds images without labels"),
        ({"method": "fens", "data.held-out": "report"}, "'data.held-out' is 'report': must be 'all'"),
        ({"method": "iterative"}, "must be 'server' or 'none' with method 'iterative'"),
    ],
)
def test_what_a_server_without_examples_cannot_do_is_refused_before_a_client_trains(
    tmp_path: Path, given: dict[str, Any], reason: str
) -> None:
    root = str(tmp_path / "nowhere")
    settings = read_settings({"data.name": "cifar10", "data.root": root, "evaluate.on": "clients", **given})

    with pytest.raises(OneShotError, match=reason):
        build_job(settings, held_out(settings)[1], None)
