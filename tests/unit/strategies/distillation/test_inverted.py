"""Images as parameters, and images inverted from the models of those who know their class."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.core.seeds import generator
from strategies.distillation import inverted
from strategies.distillation.inverted import Pixels, inverted_images, roughness
from strategies.distillation.synthesis import Recipe, Term, View, synthesize
from strategies.method import Job, Normalization
from strategies.teacher.augment import dequantize
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


def test_inverted_are_the_pixels_after_the_last_step_of_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: list[Recipe] = []

    def spy(pixels: nn.Module, *_: object, recipe: Recipe, **__: object) -> tuple[Tensor, dict[str, float]]:
        recipes.append(recipe)
        return pixels(torch.empty(0)).detach(), {}

    monkeypatch.setattr(inverted, "synthesize", spy)
    made(steps=4)
    assert recipes == [Recipe(steps=4, lr=0.15, betas=(0.9, 0.99), optimize_noise=False, keep="last")]


def test_roughness_is_the_steps_down_and_across_per_pixel() -> None:
    image = torch.tensor([[[[0.0, 1.0, 1.0], [0.0, 1.0, 5.0]]]])
    # Down: 0, 0, 4. Across: 1, 0, 1, 4. Of six pixels.
    assert float(roughness(image)) == pytest.approx((4 + 6) / 6)
    assert float(roughness(torch.rand(2, 1, 1, 1))) == 0
    assert float(roughness(torch.ones(2, *SHAPE))) == 0


START = torch.randn(3, 2, 4, 5, generator=generator(0))


def look(images: torch.Tensor) -> View:
    return View(images, images, torch.zeros(3, dtype=torch.long), images.flatten(1))


def invert(losses: list[float], **recipe: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Move pixels along a slope while the loss takes the values given; also return what every step saw."""
    seen, values = list[torch.Tensor](), iter(losses)

    def spy(view: View) -> torch.Tensor:
        seen.append(view.images.detach().clone())
        slope = view.images.sum()
        return slope - slope.detach() + next(values)

    steps = Recipe(steps=len(losses), lr=0.1, optimize_noise=False, **recipe)  # type: ignore[arg-type]
    kept, _ = synthesize(Pixels(START), torch.empty(0), look, terms=[Term("spy", 1.0, spy)], recipe=steps)
    return kept, seen


@pytest.mark.parametrize(
    ("losses", "best"), [([1.0, 2.0, 3.0], 0), ([3.0, 1.0, 2.0], 1), ([3.0, 2.0, 1.0], 2), ([1.0], 0)]
)
def test_images_kept_are_the_pixels_that_had_the_lowest_loss_and_not_those_after_the_step(
    losses: list[float], best: int
) -> None:
    kept, seen = invert(losses)
    assert torch.equal(kept, seen[best])
    assert torch.equal(seen[0], START)
