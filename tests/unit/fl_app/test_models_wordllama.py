"""The packaged backbone of texts; all but the refusal needs the packages of the extra ``features-text``."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from safetensors.torch import load_file

from fl_app.models import wordllama
from fl_app.models.backbones import backbone_of
from fl_app.models.features import FeatureFunction
from fl_app.models.features_config import FeaturesConfig
from strategies.core.errors import OptionError

INSTALLED = all(importlib.util.find_spec(name) for name in ("wordllama", "tokenizers"))
needs_packages = pytest.mark.skipif(not INSTALLED, reason="the extra features-text is not installed")


@needs_packages
def test_features_are_the_mean_of_the_vectors_of_all_tokens_and_no_special_one() -> None:
    ids = wordllama.tokens(["Hello world", "Hello"])
    assert ids.shape == (2, 1, 1, 512)
    assert ids[:, 0, 0, :3].tolist() == [[15043, 3186, 0], [15043, 0, 0]]
    backbone = backbone_of("wordllama")
    vectors = load_file(wordllama._file(wordllama.VECTORS))["embedding.weight"].float()
    expected = torch.stack([(vectors[15043] + vectors[3186]) / 2, vectors[15043]])
    torch.testing.assert_close(backbone.build()(ids), expected, rtol=0, atol=1e-6)
    assert "wordllama" not in sys.modules


@needs_packages
def test_a_text_without_tokens_has_no_features_and_a_long_one_keeps_its_first_tokens() -> None:
    function = FeatureFunction(FeaturesConfig(backbone="wordllama", dim=32), 0, (0.0,), (1.0,))
    texts = function.backbone.texts
    assert texts is not None
    features = function.module(texts.tokens(["", "word " * 2000, "word " * 512, "other"]))
    assert features[0].tolist() == [0.0] * 32
    assert torch.equal(features[1], features[2])
    assert float((features[1:].norm(dim=1) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("missing", [("wordllama",), ("tokenizers",), ("wordllama", "tokenizers")])
def test_a_missing_package_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]
) -> None:
    found = importlib.util.find_spec
    spec = found("torch")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else spec)
    with pytest.raises(
        OptionError, match=f"but {' and '.join(missing)} is not installed: pip install '.*features-text"
    ):
        wordllama.tokenizer_digest()
