from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.core.errors import OptionError
from strategies.core.seeds import generator
from strategies.core.seeds import generator as rng
from strategies.distillation.inverted import invert_images
from strategies.distillation.losses import cross_entropy
from strategies.distillation.synthesis import Batch, GeneratedImages, Recipe, Term, View, synthesize
from strategies.method import Job, Normalization
from strategies.teacher.augment import dequantize
from strategies.teacher.ensemble import Ensemble


class Toy(nn.Module):
    """Noise [B, 4] -> images [B, 1, 2, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.normal_(self.linear.weight, generator=rng(0))
        nn.init.zeros_(self.linear.bias)

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = torch.sigmoid(self.linear(noise)).view(-1, 1, 2, 2)
        return images


NOISE = torch.randn(6, 4, generator=rng(1))
BRIGHT = Term("bright", 2.0, lambda view: (view.images - 0.9).square().mean())


def look(images: Tensor) -> View:
    return View(images, images, torch.zeros(len(images), dtype=torch.long), images.flatten(1))


def test_keep_best_returns_the_images_of_the_lowest_total_loss() -> None:
    seen: list[Tensor] = []
    values = iter([3.0, 1.0, 2.0, 5.0])

    def spying(view: View) -> Tensor:
        seen.append(view.images.detach().clone())
        return view.images.mean() * 0 + next(values)

    images, losses = synthesize(
        Toy(), NOISE, look, terms=[Term("spy", 1.0, spying), BRIGHT_ZERO], recipe=Recipe(steps=4)
    )
    assert torch.equal(images, seen[1])
    assert losses["generator"] == 5.0


BRIGHT_ZERO = Term("never", 0.0, lambda view: pytest.fail("a term of weight 0 was computed"))


def test_bfloat16_gives_nearly_the_same_images_in_float32() -> None:
    exact, _ = synthesize(Toy(), NOISE, look, terms=[BRIGHT], recipe=Recipe(steps=3))
    rough, _ = synthesize(Toy(), NOISE, look, terms=[BRIGHT], recipe=Recipe(steps=3, precision="bfloat16"))
    assert rough.dtype == torch.float32
    assert not torch.equal(exact, rough)
    torch.testing.assert_close(exact, rough, rtol=0, atol=0.02)


@pytest.mark.parametrize("terms", [[], [Term("constant", 1.0, lambda view: torch.zeros(()))]])
def test_terms_that_do_not_depend_on_the_images_are_refused(terms: list[Term]) -> None:
    with pytest.raises(OptionError, match="nothing to learn from"):
        synthesize(Toy(), NOISE, look, terms=terms, recipe=Recipe(steps=1))


SMALL: dict[str, Any] = {"recipe": Recipe(steps=2, lr=0.01, clip=10.0), "latent": 4, "batch_size": 12}
JOB = Job((), {}, "net", 3, (1, 4, 4), Normalization((0.5,), (0.25,)), None, seed=2)
CE = Term("ce", 1.0, lambda view: cross_entropy(view.teacher, view.labels))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Dropout(0.5))


TEACHER = Ensemble([net(0), net(1)], Mean())


def make(images: GeneratedImages, epoch: int = 0, *, term: Term = CE, student: nn.Module | None = None) -> Batch:
    return images.batch(epoch, TEACHER, student, terms=[term])


def test_models_see_normalised_images_and_the_student_in_eval_mode() -> None:
    student = net(2).train()
    views: list[View] = []

    def spy(view: View) -> torch.Tensor:
        views.append(view)
        assert not any(part.training for part in student.modules())
        assert not any(weight.requires_grad for weight in student.parameters())
        return cross_entropy(view.teacher, view.labels)

    make(GeneratedImages(JOB, **SMALL), term=Term("spy", 1.0, spy), student=student)
    assert len(views) == 2
    for view in views:
        torch.testing.assert_close(view.inputs, (view.images - 0.5) / 0.25)
        torch.testing.assert_close(view.teacher, TEACHER(view.inputs))
        torch.testing.assert_close(view.student, student[:2](view.inputs))  # type: ignore[index]
    assert torch.equal(views[0].labels, views[1].labels)
    assert student.training
    assert all(weight.requires_grad and weight.grad is None for weight in student.parameters())


# Images as parameters, and images inverted from the models of those who know their class.


SHAPE, CLASSES = (2, 6, 5), 3
INVERTED_JOB = Job((), {}, "net", CLASSES, SHAPE, Normalization((0.4, 0.5), (0.3, 0.2)), None)
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 0])
EVEN = torch.full((2, CLASSES), 0.5)


def net_inverted() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def teacher() -> Ensemble:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        members = [net_inverted(), net_inverted()]
    for member in members:
        for parameter in member.parameters():
            parameter.data *= 2
    return Ensemble(members, Mean())


def made(shares: Tensor = EVEN, *, steps: int = 25, seed: int = 0, labels: Tensor = LABELS) -> Tensor:
    return dequantize(invert_images(INVERTED_JOB, teacher(), shares, labels, steps=steps, rng=generator(seed, "test")))


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


def test_generator_that_is_never_reset_goes_on_where_the_last_epoch_left_it() -> None:
    images = GeneratedImages(JOB, **SMALL, reset="never")
    make(images)
    left = {name: value.clone() for name, value in images.generator.state_dict().items()}
    seen: list[torch.Tensor] = []

    def spy(view: View) -> torch.Tensor:
        seen.append(images.generator.get_parameter("project.weight").detach().clone())
        return cross_entropy(view.teacher, view.labels)

    make(images, 1, term=Term("spy", 1.0, spy))
    assert torch.equal(seen[0], left["project.weight"])
    assert images.modules.keys() == {"generator"}
    assert not GeneratedImages(JOB, **SMALL).modules
