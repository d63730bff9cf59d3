"""Images inverted from the models of those who know their class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.core.seeds import generator
from strategies.distillation import inverted
from strategies.distillation.inverted import SquashedPixels, inverted_images, roughness
from strategies.distillation.pool import dequantize
from strategies.method import Job, Normalization
from strategies.teacher.ensemble import Ensemble

SHAPE, CLASSES = (2, 6, 5), 3
JOB = Job((), {}, "net", CLASSES, SHAPE, Normalization((0.4, 0.5), (0.3, 0.2)), None)
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 0])
EVEN = torch.full((2, CLASSES), 0.5)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def teacher() -> Ensemble:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        members = [net(), net()]
    for member in members:
        for parameter in member.parameters():
            parameter.data *= 2
    return Ensemble(members, Mean())


def made(shares: Tensor = EVEN, *, steps: int = 25, seed: int = 0, labels: Tensor = LABELS) -> Tensor:
    return dequantize(inverted_images(JOB, teacher(), shares, labels, steps=steps, rng=generator(seed, "test")))


def losses(images: Tensor) -> Tensor:
    """Return the cross-entropy of both members [2, N]."""
    inputs = (images - torch.tensor([0.4, 0.5]).view(2, 1, 1)) / torch.tensor([0.3, 0.2]).view(2, 1, 1)
    with torch.no_grad():
        return torch.stack(
            [nn.functional.cross_entropy(z, LABELS, reduction="none") for z in teacher().member_logits(inputs)]
        )


def test_images_are_pixels_in_which_both_members_see_the_class() -> None:
    images = made()
    assert images.shape == (7, *SHAPE)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert not images.requires_grad
    assert float(losses(images).mean()) < 0.75 * float(losses(made(steps=1)).mean())


def test_only_members_with_a_share_of_the_class_are_inverted() -> None:
    first, second = (losses(made(torch.tensor(rows))) for rows in ([[1.0] * 3, [0.0] * 3], [[0.0] * 3, [1.0] * 3]))
    assert float(first[0].mean()) < 0.6 * float(first[1].mean())
    assert float(second[1].mean()) < 0.6 * float(second[0].mean())


def test_images_follow_the_generator_and_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(made(steps=2), made(steps=2))
    assert not torch.equal(made(steps=2), made(steps=2, seed=1))
    ticks: list[int] = []
    monkeypatch.setattr(inverted, "BATCH", 3)
    images = inverted_images(
        JOB, teacher(), EVEN, LABELS, steps=2, rng=generator(0, "test"), tick=lambda: ticks.append(1)
    )
    assert images.shape == (7, *SHAPE)
    assert images.dtype == torch.uint8
    assert len(ticks) == 2 * 3


def test_squashed_pixels_of_zero_are_grey() -> None:
    model = SquashedPixels(torch.zeros(2, *SHAPE))
    assert torch.equal(model(torch.zeros(0)), torch.full((2, *SHAPE), 0.5))
    assert len(list(model.parameters())) == 1


def test_roughness_is_the_steps_down_and_across_per_pixel() -> None:
    image = torch.tensor([[[[0.0, 1.0, 1.0], [3.0, 1.0, 2.0]]]])
    # Down: 3, 0, 1. Across: 1, 0, 2, 1. Of six pixels.
    assert float(roughness(image)) == pytest.approx((4 + 4) / 6)
    assert float(roughness(torch.rand(2, 1, 1, 1))) == 0
    assert float(roughness(torch.ones(2, *SHAPE))) == 0
