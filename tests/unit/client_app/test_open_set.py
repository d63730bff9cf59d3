from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from client_app.training.fedov import (
    attack,
    features_and_logits,
    mixed_features,
    to_unknown,
    train,
    unknown_loss,
)
from client_app.training.local import Training
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization

Floats = np.ndarray[Any, np.dtype[np.float64]]
HALF = Normalization((0.5,), (0.5,))


def random_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def log_softmax(values: Floats) -> Floats:
    shifted = values - values.max(1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def array(values: torch.Tensor) -> Floats:
    return values.detach().double().numpy()


def small(outputs: int = 4) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 36, 8), nn.Tanh(), nn.Linear(8, outputs)
        )


def images(count: int = 6) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=random_generator(1)) * 2 - 1


def test_mixed_features_lie_between_those_of_two_images_of_different_classes() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    features = 10.0 ** torch.arange(6)[:, None].double().repeat(1, 2)

    for seed in range(20):
        mixed = array(mixed_features(features, labels, random_generator(seed)))
        rng = random_generator(seed)
        other, share = torch.randperm(6, generator=rng), torch.rand((), generator=rng)
        pairs = [(i, int(j)) for i, j in enumerate(other) if labels[i] != labels[j]]
        wanted = [share * features[i] + (1 - share) * features[j] for i, j in pairs]
        np.testing.assert_allclose(mixed, torch.stack(wanted).numpy(), rtol=1e-6)


def test_attack_steps_along_the_sign_of_the_gradient_and_makes_images_look_known() -> None:
    model, start = small(), images()
    leaf = start.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(to_unknown(model(leaf)), leaf)

    one = attack(model, start, steps=1, step=torch.tensor(0.01))
    many = attack(model, start, steps=10, step=torch.tensor(0.01))

    torch.testing.assert_close(one, start + 0.01 * slope.sign())
    losses = [float(to_unknown(model(batch)).detach()) for batch in (start, one, many)]
    assert losses == sorted(losses)
    assert losses[0] < losses[2]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loss_when_counted_term_by_term_in_numpy_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, labels = small(), images(), torch.tensor([0, 1, 2, 0, 1, 2])
    monkeypatch.setattr("client_app.training.fedov.ATTACK_STEP", 0.05)
    destroyed = inputs.flip(3)
    monkeypatch.setattr("client_app.training.fedov.destroy", lambda given, *_: given.flip(3))
    features, logits = features_and_logits(model, inputs)

    rng = random_generator(3)
    loss = unknown_loss(model, inputs, labels, outputs=(features, logits), normalization=HALF, attack_steps=2, rng=rng)

    def strange(batch: torch.Tensor) -> float:
        return float(-log_softmax(array(model(batch)))[:, -1].mean())

    attacked = attack(model, destroyed, steps=2, step=torch.tensor(0.1))
    mixed = model[5](mixed_features(features, labels, random_generator(3)))  # type: ignore[index]
    rest = np.stack([np.delete(row, label) for row, label in zip(array(logits), labels.tolist(), strict=True)])
    without, between = (-log_softmax(values)[:, -1].mean() for values in (rest, array(mixed)))
    terms = [strange(destroyed), without, between, strange(attacked)]
    assert float(loss.detach()) == pytest.approx(np.dot([1, 1, 0.01, 1], terms), rel=1e-5)


def stripes(count: int = 48) -> ImageData:
    """Bright bars: class 0 stands upright, class 1 lies."""
    labels = torch.arange(count) % 2
    pixels = torch.zeros(count, 1, 8, 8, dtype=torch.uint8)
    for number, label in enumerate(labels.tolist()):
        place = 1 + number % 6
        pixels[number, 0].t()[place] = 250 if label == 0 else 0
        pixels[number, 0][place] = 250 if label == 1 else pixels[number, 0][place]
    return ImageData(pixels, labels)


def test_training_learns_the_classes_and_that_destroyed_images_are_unknown() -> None:
    config = ClientConfig(epochs=25, optimizer="adam", lr=0.01, batch_size=16, clip=0.0)
    model = small(3)
    last = train(model, Training(stripes(), config, HALF))

    noise = torch.rand(64, 1, 8, 8, generator=random_generator(9)) * 2 - 1
    clean = stripes().images / 127.5 - 1
    with torch.no_grad():
        strange, known = (model(batch).softmax(1)[:, -1].mean() for batch in (noise, clean))
    assert last.number == 25
    assert last.accuracy > 0.9
    assert strange > known + 0.1
