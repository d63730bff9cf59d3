"""Generators of noise and labels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strategies.core.seeds import generator as rng
from strategies.core.seeds import seeded_torch
from strategies.distillation.generators import ConditionalGenerator, FeatureGenerator

LABELS = torch.tensor([0, 3, 1, 1, 2, 0])


def images_of(side: int = 8, channels: int = 2) -> ConditionalGenerator:
    with seeded_torch(0):
        return ConditionalGenerator(5, 4, (channels, side, side))


class Plain(nn.Module):
    """Table 5a as it is written: one-hot labels, upsampling, convolutions."""

    def __init__(self, fast: ConditionalGenerator) -> None:
        super().__init__()
        self.side, channels = fast.first[1], fast.pixels.out_channels
        self.l1, self.l2 = nn.Linear(5, 64 * self.side**2), nn.Linear(4, 64 * self.side**2)
        self.rest = nn.Sequential(
            nn.BatchNorm2d(128),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 128, 3, padding=1, bias=False),
            nn.BatchNorm2d(128),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(128, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.LeakyReLU(0.2),
            nn.Conv2d(64, channels, 3, padding=1),
            nn.Tanh(),
            nn.BatchNorm2d(channels, affine=False),
        )
        with torch.no_grad():
            for mine, theirs in zip(self.parameters(), fast.parameters(), strict=True):
                mine.copy_(theirs)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.cat([self.l1(noise), self.l2(nn.functional.one_hot(labels, 4).float())], dim=1)
        made: Tensor = self.rest(hidden.view(-1, 128, self.side, self.side))
        return made


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 8, 12)])
def test_images_have_the_asked_shape_and_are_standardised_per_channel(shape: tuple[int, int, int]) -> None:
    with seeded_torch(0):
        model = ConditionalGenerator(5, 4, shape)
    images = model(torch.randn(6, 5, generator=rng(0)), LABELS)
    assert images.shape == (6, *shape)
    assert images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(shape[0]), rtol=0, atol=1e-4)
    torch.testing.assert_close(images.var((0, 2, 3), correction=0), torch.ones(shape[0]), rtol=0, atol=0.02)


def test_image_generator_equals_the_plain_form_in_both_modes() -> None:
    fast = images_of()
    slow = Plain(fast)
    noise, weight = torch.randn(6, 5, generator=rng(1)), torch.randn(6, 2, 8, 8, generator=rng(2))
    torch.testing.assert_close(fast(noise, LABELS), slow(noise, LABELS), rtol=0, atol=1e-4)
    ours = torch.autograd.grad((fast(noise, LABELS) * weight).mean(), list(fast.parameters()))
    theirs = torch.autograd.grad((slow(noise, LABELS) * weight).mean(), list(slow.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    torch.testing.assert_close(fast.eval()(noise, LABELS), slow.eval()(noise, LABELS), rtol=0, atol=1e-4)


def test_features_are_those_of_the_table() -> None:
    with seeded_torch(0):
        model = FeatureGenerator(5, 4, 7, 6)
    noise = torch.randn(6, 5, generator=rng(0))
    one_hot = nn.functional.one_hot(LABELS, 4).float()

    def normalised(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()

    first = normalised(torch.cat([noise @ model.project.weight.T, one_hot @ model.project_label.weight.T], dim=1))
    second = nn.functional.leaky_relu(normalised(first @ model.hidden.weight.T), 0.2)
    torch.testing.assert_close(model(noise, LABELS), second @ model.features.weight.T + model.features.bias)


@pytest.mark.parametrize("kind", ["images", "features"])
def test_labels_change_the_output_and_equal_seeds_give_equal_weights(kind: str) -> None:
    def build() -> nn.Module:
        return images_of() if kind == "images" else FeatureGenerator(5, 4, 7, 6)

    with seeded_torch(1):
        first = build()
    with seeded_torch(1):
        second = build()
    noise = torch.randn(6, 5, generator=rng(0))
    first.eval()
    second.eval()
    assert torch.equal(first(noise, LABELS), second(noise, LABELS))
    assert not torch.equal(first(noise, LABELS)[0], first(noise, (LABELS + 1) % 4)[0])
