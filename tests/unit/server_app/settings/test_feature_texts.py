"""Ridge and LDA on texts and rows: from raw news by a backbone's own tokens, and from tables, to the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from commands import replayed, run_card
from feature_fakes import CLIENTS, SETTINGS, Uploads, sent_by_clients, stored
from tiny_texts import write_news

from client_app.node import Node, TrainRequest
from client_app.work import load_examples
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from fl_app.node_policy import NodePolicy
from server_app.settings.build import build_job, check_before_start
from server_app.settings.read import read_settings
from server_app.settings.server_data import open_half
from strategies.core.errors import OptionError, UploadError

TEXTS: dict[str, Any] = {**SETTINGS, "features.backbone": "tiny_texts:make", "data.name": "ag-news", "data.limit": 0}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("data")
    write_news(root)
    return {**TEXTS, "data.root": str(root), "client.state-dir": str(root / "state")}


@pytest.fixture(scope="module")
def sums(given: dict[str, Any]) -> Uploads:
    return sent_by_clients(given)


@pytest.fixture(scope="module")
def run(given: dict[str, Any], sums: Uploads, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stored(tmp_path_factory.mktemp("runs") / "ridge", given, *sums)


def test_news_lead_to_a_head_whose_card_says_how_it_reads_texts(run: Path, tmp_path: Path) -> None:
    for method in ("ridge", "lda"):
        assert replayed(run, method, tmp_path / method)["accuracy"] > 97.0
    card = (tmp_path / "ridge" / "model_card.md").read_text()
    assert "Backbone: tiny-texts, frozen, the first 64 tokens of a text, 24 features" in card
    assert "tokenizer crc32 of words, special-tokens none, truncation 64" in card
    names = run_card(tmp_path / "ridge")
    with torch.no_grad():
        found = names["model"](names["tokens"](["Robot chip in space", "The coach's last match", "oil and shares"]))
    assert found.argmax(1).tolist() == [3, 1, 2]


def test_texts_without_tokens_are_left_out_of_the_sums_and_of_the_told_number(
    sums: Uploads,
) -> None:
    assert sum(facts.num_examples or 0 for facts in sums[1].values()) == 240 - 12
    for name, state in sums[0].items():
        assert state["counts"].tolist() == list(sums[1][name].label_counts or ())
    total = sum(state["counts"] for state in sums[0].values())
    assert torch.as_tensor(total).tolist() == [48.0, 60.0, 60.0, 60.0]


def test_a_client_whose_texts_have_no_tokens_sends_nothing(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ag_news").mkdir()
    (tmp_path / "ag_news" / "train.csv").write_text('"1","..."\n"2","!"\n"3","?"\n"4",""\n' * 2)
    with pytest.raises(UploadError, match="none of its examples has features, so it sends nothing"):
        sent_by_clients({**given, "data.root": str(tmp_path), "data.partition": "iid"})


def test_features_are_cached_by_tokenizer(
    given: dict[str, Any], sums: Uploads, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="flwr")
    for run_id, lines in (("a" * 32, 0), ("b" * 32, CLIENTS)):
        caplog.clear()
        states, _ = sent_by_clients(given, run_id)
        assert caplog.text.count("examples are read from the cache") == lines
        assert all(torch.equal(states[name]["gram"], sums[0][name]["gram"]) for name in states)
    caplog.clear()
    sent_by_clients({**given, "features.backbone": "tiny_texts:shouting"}, "c" * 32)
    assert "from the cache" not in caplog.text


def test_another_tokenizer_is_refused_with_both_names(sums: Uploads) -> None:
    other = FeatureFunction(FeaturesConfig(backbone="tiny_texts:shouting"), 0, (0.0,), (1.0,))
    with pytest.raises(UploadError, match=r"differ in tokenizer: crc32 of words, expected is crc32 of WORDS$"):
        other.sums(4).check_upload(sums[0]["client-000"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"data.name": "digits"},
            r"'tiny_texts:make', which takes texts, and 'data.name' is 'digits', which has image",
        ),
        ({"features.backbone": "tiny_backbone:make"}, "takes images, and 'data.name' is 'ag-news', which has texts"),
        ({"features.backbone": "tiny_backbone:rows"}, "takes rows, and 'data.name' is 'ag-news', which has texts"),
    ],
)
def test_a_backbone_of_another_kind_than_the_examples_is_refused_before_anything_starts(
    given: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        check_before_start(read_settings({**given, **changed}), CLIENTS)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root, draws = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    names = ["low", "middle", "high"]
    for half, count in (("train", 240), ("test", 120)):
        table = pd.DataFrame(draws.normal(size=(count, 3)), columns=names)
        table["kind"] = np.array(names)[table[names].to_numpy().argmax(1)]
        table["site"] = [f"site-{number % CLIENTS}" for number in range(count)]
        table.to_csv(root / f"{half}.csv", index=False)
    columns = "".join(f"[columns.{name}]\n" for name in names)
    (root / "schema.toml").write_text(f"classes = {names}\n{columns}")
    return {
        **SETTINGS, "features.backbone": "tiny_backbone:rows", "data.limit": 0, "data.name": "csv",
        "data.root": str(root), "data.label": "kind", "data.client": "site", "data.partition": "domains",
        "features.moments": True, "client.state-dir": str(root / "state"),
    }  # fmt: skip


def test_rows_lead_to_a_head_for_a_backbone_of_rows(tables: dict[str, Any], tmp_path: Path) -> None:
    run = stored(tmp_path / "run", tables, *sent_by_clients(tables))
    for method in ("ridge", "lda", "fedpft"):
        assert replayed(run, method, tmp_path / method)["accuracy"] > 90.0
    assert "rows of 3 columns, 3 features" in (tmp_path / "ridge" / "model_card.md").read_text()


def test_rows_of_another_number_of_columns_are_refused(tables: dict[str, Any], tmp_path: Path) -> None:
    place = Path(tables["data.root"])
    for half in ("train", "test"):
        (tmp_path / f"{half}.csv").write_text((place / f"{half}.csv").read_text())
    short = (place / "schema.toml").read_text().replace("[columns.low]\n", "")
    (tmp_path / "schema.toml").write_text(short)
    with pytest.raises(OptionError, match="takes rows of 3 columns, and 'data.name' is 'csv', whose rows have 2"):
        check_before_start(read_settings({**tables, "data.root": str(tmp_path)}), CLIENTS)


def test_other_methods_read_hashes_of_words_unless_a_backbone_of_texts_is_named(given: dict[str, Any]) -> None:
    for backbone, length in (("efficientnet-lite0", 64), ("torchvision:resnet18", 64), ("tiny_texts:long", 99)):
        settings = read_settings({**given, "method": "fedens", "model.name": "text-bag", "features.backbone": backbone})
        split = open_half(settings, "test")
        assert split.input_shape == (1, 1, length)
        assert build_job(settings, split, None).input_shape == split.input_shape
        assert split.take([0]).images.shape == (1, 1, 1, length)


def test_a_deployed_node_reads_no_texts_by_a_module_of_the_run_s_choice(given: dict[str, Any]) -> None:
    app = read_settings({**given, "method": "fedens", "model.name": "text-bag"}).app
    node = Node.of({"partition-id": 0, "num-partitions": CLIENTS, "data-root": given["data.root"]}, app)
    load_examples(app, node, TrainRequest("", 1, 0))
    with pytest.raises(UploadError, match="'tiny_texts:make': must be .* a module of the run's choice"):
        load_examples(app, replace(node, policy=NodePolicy(deployed=True)), TrainRequest("", 1, 0))
