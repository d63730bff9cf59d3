"""Heads on a frozen backbone as the clients' models: methods work on them as on other models, or refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import replayed, run_card
from feature_fakes import SETTINGS, Uploads
from safetensors.torch import load_file

from fl_app.data import normalize, open_split
from fl_app.models.feature_heads import FeatureHead
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from server_app.export.exporting import stored_models, write_programs
from server_app.settings.build import build_job
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError, UploadError
from strategies.method import METHODS, Need
from strategies.uploads.checks import check_outputs

HEAD = "head+tiny_backbone:make"
GIVEN = {**SETTINGS, "method": "fedavg", "model.name": HEAD, "client.epochs": 15, "data.proxy": 0.2, "fens.rounds": 60}
TASK = "classifier"
MAKERS = [name for name in METHODS if Need.IMAGE_GRADIENTS in METHODS[name].needs]


def test_a_client_sends_its_head_and_no_backbone(sent: Uploads) -> None:
    state = sent[0]["client-000"]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "fingerprint": (1024,), "head.weight": (10, 96), "head.bias": (10,)
    }  # fmt: skip
    assert sent[1]["client-000"].architecture == HEAD


@pytest.mark.parametrize("method", ["fedavg", "fedens", "dw-fedens", "label-count-ensemble", "fens", "tally"])
def test_methods_work_on_heads_as_on_other_models(run: Path, tmp_path: Path, method: str) -> None:
    result = replayed(run, method, tmp_path / method, **{"server.epochs": 2, "tally.images": 256, "tally.probes": 64})
    names = [row["name"] for row in result["table"]]
    assert names[:4] == [f"client-00{number}" for number in range(4)]
    assert {"FedAvg (one shot)", "FedENS"} <= set(names)
    assert result["accuracy"] > max(row["accuracy"] for row in result["table"][:4])


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        *((name, {}, f"no gradient reaches the images: method '{name}'.*another.*: fedavg") for name in MAKERS),
        ("tally", {"tally.inverted": 8}, "setting 'tally.inverted' makes images.* must be 0"),
        ("flboost", {}, "setting 'flboost.level' makes images.* must be 'features'"),
    ],
)
def test_what_makes_images_refuses_heads(
    run: Path, tmp_path: Path, method: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        replayed(run, method, tmp_path / method, **given)


def test_a_head_of_another_function_is_refused_at_the_door_and_where_it_is_loaded(sent: Uploads) -> None:
    other = read_settings({**GIVEN, "features.side": 20})
    job, state = build_job(other, open_split("digits", "test"), None), sent[0]["client-000"]
    with pytest.raises(UploadError, match="another function: .*they differ in side: 16, expected is 20$"):
        check_outputs(HEAD, state, job.builders[HEAD], job.input_shape)
    function = FeatureFunction(FeaturesConfig(backbone="tiny_backbone:make", dim=96), 0)
    with pytest.raises(UploadError, match="another function"):
        FeatureHead(function, 10).load_state_dict(state)


def test_a_head_s_own_form_on_features_gives_the_same_logits(sent: Uploads) -> None:
    model = build_job(read_settings(GIVEN), open_split("digits", "test"), None).builders[HEAD]()
    assert isinstance(model, FeatureHead)
    model.load_state_dict(sent[0]["client-001"])
    alone = model.on_features()
    alone.load_state_dict(model.state_dict())
    images = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    features = model.function.module(images).float()
    torch.testing.assert_close(alone(features[..., None, None]), model(images))


def test_the_card_s_code_loads_an_ensemble_of_heads(run: Path, tmp_path: Path) -> None:
    result = replayed(run, "label-count-ensemble", tmp_path / "ensemble")
    card = (tmp_path / "ensemble" / "model_card.md").read_text()
    assert "Backbone: tiny, frozen, 16 pixels a side, 96 features" in card
    assert "Penalty" not in card
    names = run_card(tmp_path / "ensemble")
    split = open_split("digits", "test")
    test = split.take()
    right = names["model"](normalize(test.images, *split.normalization)).argmax(1) == test.labels
    assert round(100.0 * float(right.double().mean()), 2) == result["accuracy"]


def test_a_program_of_heads_holds_the_backbone(run: Path, tmp_path: Path) -> None:
    replayed(run, "fedavg", tmp_path / "result")
    stored_run = stored_models(tmp_path / "result")
    differences = write_programs(stored_run, "student", tmp_path, ("torch",))
    assert max(differences.values()) < 1e-5
    program = torch.export.load(tmp_path / "student.pt2").module()
    pixels = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    job = build_job(read_settings(GIVEN), open_split("digits", "test"), None)
    model = job.builders[HEAD]()
    model.load_state_dict(load_file(tmp_path / "result" / "student.safetensors"))
    torch.testing.assert_close(program(pixels), model((pixels - 0.5) / 0.5), rtol=1e-4, atol=1e-4)
