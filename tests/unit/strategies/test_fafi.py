"""FAFI's fusion against loops over samples in numpy, its options, and the kind of its uploads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from method_fakes import drawn_upload, model_of
from torch import nn

from strategies.combiners.outcomes import load_model
from strategies.core.seeds import generator
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.fafi import NOISE_IMAGES, FafiConfig, fit

Floats = np.ndarray[Any, np.dtype[np.float64]]
CLASSES, FEATURES = 3, 5


class Encoder(nn.Module):
    """Three logits and five features, of images 1 x 4 x 4."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, FEATURES), nn.BatchNorm1d(5) if norm else nn.Tanh())
        self.prototypes = nn.Parameter(torch.randn(CLASSES, FEATURES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.encoder(images)
        return torch.cat([nn.functional.normalize(features) @ self.prototypes.T, features], 1)


def normed() -> nn.Module:
    return Encoder(norm=True)


BUILDERS = {"net": nn.Identity, "net+prototypes": Encoder, "normed+prototypes": normed}


def upload(k: int, name: str = "net+prototypes") -> Upload:
    return drawn_upload(k, name, BUILDERS, 10 * (k + 1))


def job(*uploads: Upload, student: str = "net", **options: str) -> Job:
    space = Normalization((0.5,), (0.5,))
    return Job(uploads, BUILDERS, student, CLASSES, (1, 4, 4), space, FafiConfig(**options))


def features_of(each: Upload, images: torch.Tensor) -> Floats:
    state = {key: value.double().numpy() for key, value in each.read().items()}
    found: Floats = np.tanh(images.double().flatten(1).numpy() @ state["encoder.1.weight"].T + state["encoder.1.bias"])
    return found


def cosine(a: Floats, b: Floats) -> float:
    return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))


def predicted(one: Job, images: torch.Tensor, informative: list[Floats] | None = None) -> Floats:
    """Return ``h / ||h|| . P`` [B, C], sample by sample; ``informative`` has a_k(x) [B] per client."""
    features = [features_of(each, images) for each in one.uploads]
    prototypes = sum(each.read()["prototypes"].double().numpy() for each in one.uploads) / len(one.uploads)
    scores = np.zeros((len(images), CLASSES))
    for sample in range(len(images)):
        fused = np.zeros(FEATURES)
        for k, each in enumerate(one.uploads):
            weight = float(each.num_examples or 0) if informative is None else informative[k][sample]
            fused += weight * features[k][sample]
        for c in range(CLASSES):
            scores[sample, c] = fused @ prototypes[c] / np.sqrt(fused @ fused)
    return scores


def test_fusion_by_size_equals_a_loop_over_samples() -> None:
    one, images = job(*map(upload, range(3))), torch.randn(20, 1, 4, 4)

    model = load_model(fit(one, Silent()), one)

    np.testing.assert_allclose(model(images).numpy(), predicted(one, images), rtol=1e-4, atol=1e-5)


def test_fusion_by_noise_weighs_by_the_mean_distance_from_noise() -> None:
    one, images = job(*map(upload, range(3)), fusion="noise"), torch.randn(20, 1, 4, 4)
    noise = torch.randn(NOISE_IMAGES, 1, 4, 4, generator=generator(one.seed, "fafi", "noise"))
    informative = []
    for each in one.uploads:
        own, strange = features_of(each, images), features_of(each, noise)
        informative.append(np.array([np.mean([1 - cosine(row, other) for other in strange]) for row in own]))

    model = load_model(fit(one, Silent()), one)

    np.testing.assert_allclose(model(images).numpy(), predicted(one, images, informative), rtol=1e-4, atol=1e-5)
    plain = load_model(fit(job(*one.uploads), Silent()), one)
    assert not torch.allclose(model(images), plain(images), atol=1e-3)


def test_predictions_by_test_batch_depend_on_the_other_images_and_by_default_do_not() -> None:
    uploads = [upload(k, "normed+prototypes") for k in range(2)]
    images = torch.randn(8, 1, 4, 4)
    one = job(*uploads, student="normed")
    running = load_model(fit(one, Silent()), one)
    batch = load_model(fit(replace(one, config=FafiConfig(bn="test-batch")), Silent()), one)

    torch.testing.assert_close(running(images)[:3], running(images[:3]))
    assert not torch.allclose(batch(images)[:3], batch(images[:3]), atol=1e-3)
    # Equal to members in training mode.
    members = [model_of(each, BUILDERS).train()(images) for each in uploads]
    torch.testing.assert_close(batch(images), batch.combiner(torch.stack(members)))  # type: ignore[operator]
