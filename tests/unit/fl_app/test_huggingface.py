"""Backbones in folders of Hugging Face: features of texts and of images, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import strategies.core.vision  # noqa: F401  before transformers, which imports torchvision
from fl_app.models.backbones import backbone_of
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from strategies.core.errors import OptionError

transformers = pytest.importorskip("transformers")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder with a tiny BERT whose tokenizer knows four words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=6
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    words = {"[PAD]": 0, "[UNK]": 1, "red": 2, "green": 3, "blue": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(tmp_path)
    return tmp_path


def test_features_of_texts_are_the_mean_over_their_tokens_whatever_else_is_in_the_batch(texts: Path) -> None:
    backbone = backbone_of(f"hf:{texts}")
    read = backbone.texts.tokens(["red green blue", "blue", ""])
    assert read.shape == (3, 1, 1, 128)
    found = backbone.build()(read)
    model = transformers.BertModel.from_pretrained(texts).eval()
    for row, ids in zip(found, ([2, 3, 4], [4]), strict=False):
        wanted = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(row, wanted, atol=1e-6, rtol=0)
    assert bool((found[2] == 0).all())
    assert backbone.features == 8
    assert len(backbone.texts.tokens(["red " * 500]).flatten()) == 128


def test_texts_of_alike_lengths_go_through_a_backbone_together_and_their_features_keep_the_order(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = FeatureFunction(FeaturesConfig(backbone=f"hf:{texts}")).module
    reader = backbone_of(f"hf:{texts}").texts
    read = reader.tokens([" ".join(["red", "green", "blue"] * (1 + 7 * k % 40)) for k in range(40)])
    wanted = torch.cat([module.at_once(one[None]) for one in read])
    widths: list[tuple[int, int]] = []

    def counted(batch: torch.Tensor) -> torch.Tensor:
        lengths = (batch != 0).flatten(1).sum(1)
        widths.append((int(lengths.min()), int(lengths.max())))
        return own(batch)

    own = module._batch
    monkeypatch.setattr(module, "_batch", counted)
    torch.testing.assert_close(module(read), wanted, atol=1e-6, rtol=0)
    assert [one[0] >= before[1] for before, one in pairwise(widths)] == [True] * (len(widths) - 1)


def test_features_of_images_take_the_form_of_the_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    backbone = backbone_of(f"hf:{tmp_path}")
    assert (backbone.texts, backbone.side, backbone.mean[0], backbone.std[0]) == (None, 16, 0.1, 0.2)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = transformers.ViTModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    wanted = model(pixel_values=images).last_hidden_state.mean(1)
    torch.testing.assert_close(backbone.build()(images), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda folder: (folder / "config.json").unlink(), "save_pretrained"),
        (lambda folder: (folder / "config.json").write_text("{}"), "hidden_size"),
        (lambda folder: (folder / "config.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "cannot be read"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_one_line(spoil: Any, line: str, texts: Path) -> None:
    spoil(texts)
    with pytest.raises(OptionError, match=line) as caught:
        backbone_of(f"hf:{texts}").build()
    assert "features.backbone" in str(caught.value)
