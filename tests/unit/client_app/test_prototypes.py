"""FAFI's local training: its loss against loops in numpy, and what it learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from client_app.training.fafi import supervised_contrast, train
from client_app.training.local import Epoch, Training
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization
from fl_app.models import build
from fl_app.models.client_nets import PrototypeNet

HALF = Normalization((0.5,), (0.5,))
CONFIG = ClientConfig(epochs=1, batch_size=6, lr=0.05, clip=1.0, whole_batches=True)


def net(classes: int = 3) -> PrototypeNet:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return PrototypeNet(build("lenet5", num_classes=classes, input_shape=(1, 16, 16)), classes)


def toy(count: int = 12) -> ImageData:
    rng = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 3
    images = torch.randint(0, 60, (count, 1, 16, 16), generator=rng, dtype=torch.uint8)
    for k in range(3):  # a class is a bright band
        images[labels == k, :, 5 * k : 5 * k + 5] += 180
    return ImageData(images, labels)


class TwoNames(torch.nn.Module):
    """Calls its last layer by the second of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = torch.nn.Linear(9, 3), torch.nn.Linear(3, 3)
        self.classifier = self.fc

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(images.flatten(1)))  # type: ignore[no-any-return]


def test_encoder_is_the_model_without_its_last_layer_whatever_its_names() -> None:
    images = torch.randn(2, 1, 3, 3)
    model = PrototypeNet(classifier := TwoNames(), 3)

    assert torch.equal(model(images)[:, 3:], classifier.body(images.flatten(1)))
    assert [key for key in model.state_dict() if "fc" in key or "classifier" in key] == []


def test_contrast_equals_a_loop_over_anchors_and_positives() -> None:
    rng = torch.Generator().manual_seed(1)
    directions = F.normalize(torch.randn(10, 4, generator=rng), dim=1)
    labels = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 0, 1])
    v: np.ndarray[Any, np.dtype[np.float64]] = directions.double().numpy()
    total = 0.0
    for i in range(10):
        positives = [j for j in range(10) if j != i and labels[j] == labels[i]]
        below = sum(np.exp(v[i] @ v[a] / 0.2) for a in range(10) if a != i)
        total -= sum(np.log(np.exp(v[i] @ v[j] / 0.2) / below) for j in positives) / len(positives)

    assert float(supervised_contrast(directions, labels, 0.2)) == pytest.approx(total / 10, rel=1e-5)


def test_step_goes_down_the_gradient_of_the_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.training.fafi.view", lambda pixels, rng, flips, each: pixels)
    data, model, seen = toy(6), net(), list[Epoch]()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    inputs, labels = torch.cat([data.images.float() / 127.5 - 1] * 2), data.labels.repeat(2)
    outputs = model(inputs)
    directions = F.normalize(outputs[:, 3:])
    logits = directions @ model.prototypes.T
    loss = 2 * F.cross_entropy(logits, labels) + supervised_contrast(directions, labels, 0.07)
    loss = loss + F.cross_entropy(model.prototypes @ model.prototypes.T, torch.arange(3))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()

    config = replace(CONFIG, momentum=0.0, clip=0.0)
    last = train(model, Training(data, config, HALF, report=seen.append))

    assert last.loss == pytest.approx(loss.item(), rel=1e-4)
    assert seen == [last]
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), start[name] - 0.05 * gradients[name], rtol=1e-3, atol=1e-5)


def test_training_learns_the_classes() -> None:
    model = net()
    train(model, Training(toy(), replace(CONFIG, epochs=30, batch_size=12), HALF, seed=4))

    with torch.no_grad():
        outputs = model.eval()(toy().images.float() / 127.5 - 1)
    assert (outputs[:, :3].argmax(1) == toy().labels).float().mean() > 0.9
    torch.testing.assert_close(outputs[:, :3], F.normalize(outputs[:, 3:]) @ model.prototypes.T)
