import pytest
import torch

from strategies.core.seeds import generator as rng
from strategies.distillation.inversion import Pixels, jitter
from strategies.distillation.synthesis import Recipe, Term, View, synthesize

START = torch.randn(3, 2, 4, 5, generator=rng(0))


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


def test_images_kept_last_are_those_after_the_last_step() -> None:
    kept, seen = invert([1.0, 2.0], keep="last")
    torch.testing.assert_close(kept, START - 0.2)  # Adam moves every pixel by its rate
    torch.testing.assert_close(seen[1], START - 0.1)


def test_pixels_leave_the_images_they_start_from_alone() -> None:
    before = START.clone()
    invert([1.0, 2.0])
    assert torch.equal(START, before)


def test_jitter_rolls_the_whole_batch_by_one_offset_within_its_bound() -> None:
    images = torch.arange(2 * 3 * 7 * 6.0).view(2, 3, 7, 6)
    offsets = {}
    for k in range(200):
        rolled = jitter(images, 2, rng(k))
        for down in range(-2, 3):
            for across in range(-2, 3):
                if torch.equal(rolled, images.roll((down, across), (2, 3))):
                    offsets[k] = (down, across)
    assert len(offsets) == 200
    assert len(set(offsets.values())) == 25


def test_jitter_of_zero_changes_nothing() -> None:
    assert torch.equal(jitter(START, 0, rng(0)), START)
