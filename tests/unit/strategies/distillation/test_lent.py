"""What a request tells of the generator that comes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord

from strategies.core.errors import UploadError
from strategies.distillation.generators import ConditionalGenerator, FeatureGenerator
from strategies.distillation.lent import Lent

LENT = Lent("features", "normal", 5, 4, 8, (1, 8, 12), 6, 9.8, 20)


def test_description_goes_through_a_request_and_back() -> None:
    assert all(key.startswith("generator-") for key in LENT.told())
    assert Lent.read(dict(ConfigRecord(LENT.told()))) == LENT  # type: ignore[arg-type]


def test_generator_is_of_its_level() -> None:
    labels, noise = torch.tensor([0, 3, 1]), torch.zeros(3, 5)
    features = LENT.build(7)
    assert isinstance(features, FeatureGenerator)
    assert features(noise, labels).shape == (3, 7)
    images = Lent(**{**vars(LENT), "level": "images"}).build(7)
    assert isinstance(images, ConditionalGenerator)
    assert images(noise, labels).shape == (3, 1, 8, 12)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("level", "pixels", "one of features, images"),
        ("noise", 1, "one of normal, uniform"),
        ("latent", 0, "a whole number from 1 to 65536"),
        ("classes", 4.0, "a whole number"),
        ("width", 10**9, "a whole number"),
        ("channels", True, "a whole number"),
        ("height", "8", "a whole number"),
        ("breadth", -8, "a whole number"),
        ("batch", None, "a whole number"),
        ("epochs", 0, "a whole number"),
        ("weight", float("nan"), "a finite number at least 0"),
        ("weight", -1.0, "a finite number"),
        ("weight", float("inf"), "a finite number"),
        ("weight", True, "a finite number"),
        ("weight", "1", "a finite number"),
    ],
)
def test_wrong_descriptions_are_refused(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(UploadError, match=f"the server's generator-{key} is .*: must be {allowed}"):
        Lent.read({**LENT.told(), f"generator-{key}": value})


@pytest.mark.parametrize(
    ("level", "sizes", "most"),
    [
        ("features", {"latent": 100, "classes": 10, "width": 18}, 2**19),
        ("images", {"latent": 4, "classes": 4, "shape": (1, 8, 7), "width": 65536}, 2**20),
    ],
)
def test_a_batch_of_more_than_256_mib_is_refused_before_it_is_made(
    level: str, sizes: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.distillation.lent.MOST", 2**20 + 1)
    lent = replace(LENT, level=level, batch=most, **sizes)
    assert Lent.read(lent.told()) == lent
    with pytest.raises(UploadError, match=f"generator-batch is {most + 1}: must make .* at most {2**26} values, not"):
        Lent.read(replace(lent, batch=most + 1).told())
