"""Classifiers in folders of Hugging Face as models of a run: their inputs, heads and digests, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import completed
from safetensors.torch import load_file, save_file
from tiny_folders import write_bert, write_vit
from tiny_texts import write_news

from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.models import build, builders
from fl_app.models.backbones import backbone_of
from fl_app.models.features import as_read
from fl_app.models.huggingface import folder_digest, image_form, tokens
from fl_app.node_policy import NodePolicy
from server_app.export.exporting import export_run
from server_app.settings.build import build_job, folder_digests
from server_app.settings.read import read_settings
from server_app.settings.server_data import open_half
from strategies.core.errors import OptionError, UploadError
from strategies.core.facts import Normalization

transformers = pytest.importorskip("transformers")


@pytest.fixture
def news(tmp_path: Path) -> dict[str, Any]:
    """Return the settings of a run on small news with a folder's model."""
    write_news(tmp_path, 80)
    name = write_bert(tmp_path / "bert")
    return {"data.name": "ag-news", "data.root": str(tmp_path), "model.name": name, "data.limit": 0, "client.epochs": 1}


def test_texts_reach_a_folders_model_by_its_own_tokens_and_its_name_loads_its_weights_again(tmp_path: Path) -> None:
    name = write_bert(tmp_path, classes=4)
    read = tokens(name, ["war peace", "cup " * 50, ""])
    assert read.shape == (3, 1, 1, 24)  # no more than the model has positions
    model = pickle.loads(pickle.dumps(builders(4, (1, 1, 24), [name])[name]))().eval()  # noqa: S301  our own bytes
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    for row, text in zip(model(read), ([2, 3], [6] * 24), strict=False):
        torch.testing.assert_close(row, plain(input_ids=torch.tensor([text])).logits[0], atol=1e-6, rtol=0)
    plain.load_state_dict(model.state_dict())
    assert model(input_ids=torch.tensor([[2, 3]])).shape == (1, 4)


def test_images_reach_a_folders_model_by_its_own_normalisation_and_size(tmp_path: Path) -> None:
    name = write_vit(tmp_path)
    pixels = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    model = build(name, num_classes=10, input_shape=(1, 16, 16), normalization=Normalization((0.3,), (0.7,))).eval()
    plain = transformers.ViTForImageClassification.from_pretrained(tmp_path).eval()
    resized = torch.nn.functional.interpolate(pixels.expand(-1, 3, -1, -1), (8, 8), mode="bilinear")
    wanted = plain(pixel_values=(resized - 0.1) / 0.2).logits
    torch.testing.assert_close(model((pixels - 0.3) / 0.7), wanted, atol=1e-5, rtol=0)


def test_a_head_of_another_size_is_drawn_anew_which_a_line_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="flwr")
    name = write_bert(tmp_path)
    heads = []
    for _ in range(2):
        torch.manual_seed(1)
        model = build(name, num_classes=4, input_shape=(1, 1, 24))
        heads.append(model.classifier.weight)
    assert heads[0].shape == (4, 16)
    assert torch.equal(*heads)
    plain = transformers.BertModel.from_pretrained(tmp_path)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, plain.embeddings.word_embeddings.weight)
    told = [line for line in caplog.messages if "drawn anew" in line]
    assert len(told) == 1
    assert "classifier.bias, classifier.weight" in told[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["texts", "images"])
def test_clients_train_a_folders_model_to_a_finished_result(
    oneshot: Callable[..., Any], news: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    given = news if kind == "texts" else {"model.name": write_vit(tmp_path / "vit")}
    training = {"client.optimizer": "adam", "client.lr": 0.01, "client.epochs": 6, "client.batch-size": 8}
    result, log = completed(oneshot("run", "--method", "fedavg", **{**given, **training, "data.partition": "iid"}))

    assert ("drawn anew" in log) == (kind == "texts")
    assert result["accuracy"] > (50 if kind == "texts" else 20), (result["accuracy"], log)
    assert result["refusals"] == []
    folder = tmp_path / ("bert" if kind == "texts" else "vit")
    head = "Sequence" if kind == "texts" else "Image"
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=4 if kind == "texts" else 10)
    model = getattr(transformers, f"AutoModelFor{head}Classification").from_config(config)
    model.load_state_dict(load_file(Path(result["run_dir"]) / "student.safetensors"))
    export_run(Path(result["run_dir"]), log=list[str]().append)  # compares the program's answers with the model's


def test_a_client_whose_folder_has_other_files_is_refused_before_it_trains(news: dict[str, Any]) -> None:
    settings = read_settings({**news, "method": "fedavg"})
    node = Node.of({"partition-id": 0, "num-partitions": 4}, settings.app)
    asked = TrainRequest.read(folder_digests(settings), 0)
    trained, _ = prepare_upload(settings.app, node, asked, {})
    assert trained.facts.architecture == news["model.name"]
    config = Path(news["model.name"].removeprefix("hf:")) / "config.json"
    config.write_text(config.read_text() + "\n")
    folder_digest.cache_clear()
    with pytest.raises(UploadError, match=r"'hf:.*bert' have the digest [0-9a-f]{12} on this client"):
        prepare_upload(settings.app, node, asked, {})


def test_a_deployed_node_takes_only_folders_that_its_own_config_names(news: dict[str, Any]) -> None:
    app, name = read_settings({**news, "method": "fedavg"}).app, news["model.name"]
    with pytest.raises(UploadError, match=r"not permitted on this node"):
        Node.of({}, app, NodePolicy(deployed=True))
    assert Node.of({}, app, NodePolicy(deployed=True, architectures=(name,))).architecture == name


def _as_gpt2(folder: Path) -> None:
    import transformers

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24, "num_labels": 4}
    transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes)).save_pretrained(folder)


def _damage(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["bert.encoder.layer.0.output.dense.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "shape", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), (1, 1, 24), "save_pretrained"),
        (_damage, (1, 1, 24), r"lack 'bert\.encoder\.layer\.0\.output\.dense\.weight'"),
        (lambda folder: (folder / "model.safetensors").unlink(), (1, 1, 24), "cannot be read"),
        (lambda folder: folder, (1, 16, 16), "takes texts"),
        (_as_gpt2, (1, 1, 24), r"config\.json has no pad_token_id"),
        (lambda folder: (folder / "tokenizer.json").unlink(), (1, 1, 24), r"takes images, because it has no tokenizer"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(
    spoil: Callable[[Path], Any], shape: tuple[int, int, int], line: str, tmp_path: Path
) -> None:
    name = write_bert(tmp_path, classes=4)
    spoil(tmp_path)
    with pytest.raises(OptionError, match=line) as caught:
        build(name, num_classes=4, input_shape=shape)
    assert "'model.name'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *((text, r"preprocessor_config\.json is damaged") for text in ("{", "[]", '{"image_std": null}')),
        ('{"image_std": [0, 0, 0]}', r"image_std in preprocessor_config\.json above 0"),
    ],
)
def test_preprocessing_of_images_that_cannot_be_used_is_refused(text: str, line: str, tmp_path: Path) -> None:
    name = write_vit(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(OptionError, match=line):
        build(name, num_classes=4, input_shape=(1, 16, 16))


def test_preprocessing_without_normalisation_and_a_side_as_a_list_are_read(tmp_path: Path) -> None:
    name = write_vit(tmp_path)
    config = tmp_path / "config.json"
    side = json.loads(config.read_text())["image_size"]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"image_size": [side, side]}))
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false, "image_mean": [0.3, 0.3, 0.3]}')
    assert image_form(name) == (side, (0.0,) * 3, (1.0,) * 3)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 0.25, "image_std": [0.5]}')
    assert image_form(name) == (side, (0.25,) * 3, (0.5,) * 3)


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    name = write_bert(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(OptionError, match=r"whose tokenizer\.json cannot be read"):
        tokens(name, ["war"])


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OptionError, match=r"transformers is not installed: pip install '\.\[adapters\]'"):
        build(f"hf:{tmp_path}", num_classes=2, input_shape=(1, 1, 8))


def test_two_folders_of_one_run_must_read_texts_by_the_same_tokens(news: dict[str, Any], tmp_path: Path) -> None:
    other = write_bert(tmp_path / "other")
    settings = read_settings({**news, "method": "fedens", "model.student": other})
    assert build_job(settings, open_half(settings, "test"), None).student == other
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1) + "\n")
    backbone_of.cache_clear()
    with pytest.raises(OptionError, match="must share one tokenizer"):
        as_read(open_half(settings, "test"), settings.app.features, settings.app.model.all_named())
