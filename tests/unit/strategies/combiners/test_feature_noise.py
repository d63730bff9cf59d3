"""Tally on heads of one backbone works in the space of features, on noise that the heads' rows span."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from strategies.combiners.feature_noise import noise_for, on_features, on_images
from strategies.core.facts import Upload, UploadFacts
from strategies.core.seeds import generator
from strategies.method import METHODS, Job, Normalization, Silent

WIDTH, CLASSES, HEAD = 24, 3, "head+some"


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(features.flatten(1))
        return logits


class OnImages(Alone):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.normalize(images.flatten(1)[:, :WIDTH] + 2.0, dim=1))

    def on_features(self) -> Alone:
        return Alone()


def upload(client: int, architecture: str = HEAD) -> Upload:
    rng = generator(client, "head")
    weight = 5 * torch.randn(CLASSES, WIDTH, generator=rng)
    state = {"head.weight": weight, "head.bias": torch.randn(CLASSES, generator=rng)}
    counts = tuple(10 * (kind == client % CLASSES) + 1 for kind in range(CLASSES))
    return Upload(UploadFacts(f"client-{client}", architecture, sum(counts), counts), lambda: dict(state))


def job(*uploads: Upload, **given: Any) -> Job:
    config = METHODS["tally"].config(epochs=3, images=256, probes=64)
    basic = {"config": config, "normalization": Normalization((0.5,), (0.5,)), "threads": 1}
    return Job(uploads, {HEAD: OnImages, "net": OnImages}, HEAD, CLASSES, (1, 8, 8), **{**basic, **given})


def test_a_job_of_other_models_or_with_shards_stays_as_it_is() -> None:
    for other in (
        job(upload(0), upload(1, "net")),
        job(upload(0, "net")),
        job(upload(0), shards=object()),
    ):
        assert on_features(other) is other


def test_models_of_both_spaces_have_equal_logits() -> None:
    plain = job(upload(0), upload(1))
    found = on_features(plain)
    assert found.input_shape == (WIDTH, 1, 1)
    whole, alone = OnImages(), found.builders[HEAD]()
    whole.load_state_dict(plain.uploads[1].read())
    alone.load_state_dict(found.uploads[1].read())
    images = torch.randn(6, 1, 8, 8)
    features = nn.functional.normalize(images.flatten(1)[:, :WIDTH] + 2.0, dim=1)
    torch.testing.assert_close(alone(math.sqrt(WIDTH) * features[..., None, None]), whole(images))
    torch.testing.assert_close(on_images(alone.state_dict())["head.weight"], plain.uploads[1].read()["head.weight"])


def test_noise_lies_in_the_span_of_the_centred_rows_and_has_the_size_of_features() -> None:
    found = on_features(job(*map(upload, range(4))))
    (noise,) = noise_for(found, 300, generator(0, "noise"))
    assert noise.shape == (300, WIDTH, 1, 1)
    torch.testing.assert_close(noise.flatten(1).norm(dim=1), torch.full((300,), math.sqrt(WIDTH)))
    rows = torch.cat([one.read()["head.weight"] - one.read()["head.weight"].mean(0) for one in found.uploads])
    assert int(torch.linalg.matrix_rank(noise.flatten(1))) == int(torch.linalg.matrix_rank(rows)) == 4 * (CLASSES - 1)
    both = torch.cat([rows / rows.norm(), noise.flatten(1)])
    assert int(torch.linalg.matrix_rank(both)) == 4 * (CLASSES - 1)


def test_tally_ends_with_a_head_on_images_and_its_epochs_are_observed_as_such() -> None:
    seen: list[float] = []

    def observer(epoch: int, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, OnImages)
        seen.append(float(model.head.weight.detach().norm()))
        return {"accuracy": 0.0}

    plain = job(*map(upload, range(3)), observer=observer)
    outcome = METHODS["tally"].fit(plain, Silent())
    assert outcome.student is not None
    assert outcome.student["head.weight"].shape == (CLASSES, WIDTH)
    assert seen[-1] == pytest.approx(float(outcome.student["head.weight"].norm()), rel=1e-5)
    assert outcome.images is None
    assert outcome.ensemble is not None
    assert outcome.ensemble.clients == tuple(one.client for one in plain.uploads)
