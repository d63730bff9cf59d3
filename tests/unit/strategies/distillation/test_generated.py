from typing import Any

import torch
from torch import nn

from strategies.combiners.combiners import Mean
from strategies.distillation.generated import GeneratedImages
from strategies.distillation.losses import cross_entropy
from strategies.distillation.synthesis import Batch, Recipe, Term, View
from strategies.method import Job, Normalization
from strategies.teacher.ensemble import Ensemble

SMALL: dict[str, Any] = {"recipe": Recipe(steps=2, lr=0.01, clip=10.0), "latent": 4, "batch_size": 12}
JOB = Job((), {}, "net", 3, (1, 4, 4), Normalization((0.5,), (0.25,)), None, seed=2)
CE = Term("ce", 1.0, lambda view: cross_entropy(view.teacher, view.labels))


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Dropout(0.5))


TEACHER = Ensemble([net(0), net(1)], Mean())


def make(images: GeneratedImages, epoch: int = 0, *, term: Term = CE, student: nn.Module | None = None) -> Batch:
    return images.batch(epoch, TEACHER, student, terms=[term])


def test_batch_has_pixels_labels_and_losses() -> None:
    batch = make(GeneratedImages(JOB, **SMALL))
    assert batch.images.shape == (12, 1, 4, 4)
    assert not batch.images.requires_grad
    assert 0 <= float(batch.images.min()) < float(batch.images.max()) <= 1
    assert set(batch.labels.tolist()) <= {0, 1, 2}
    assert batch.losses.keys() == {"ce", "generator"}


def test_epoch_gives_the_same_batch_whatever_was_made_before() -> None:
    first, second = GeneratedImages(JOB, **SMALL), GeneratedImages(JOB, **SMALL)
    make(first, 0)
    assert torch.equal(make(first, 1).images, make(second, 1).images)
    assert not torch.equal(make(second, 1).images, make(second, 2).images)


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
        assert view.student is not None
        torch.testing.assert_close(view.inputs, (view.images - 0.5) / 0.25)
        torch.testing.assert_close(view.teacher, TEACHER(view.inputs))
        torch.testing.assert_close(view.student, student[:2](view.inputs))  # type: ignore[index]
    assert torch.equal(views[0].labels, views[1].labels)
    assert student.training
    assert all(weight.requires_grad and weight.grad is None for weight in student.parameters())


def test_augmentation_comes_before_the_models_and_is_drawn_for_every_step() -> None:
    inputs: list[torch.Tensor] = []

    def spy(view: View) -> torch.Tensor:
        mirrored = [bool((view.inputs[i] != (view.images[i] - 0.5) / 0.25).any()) for i in range(12)]
        inputs.append(torch.tensor(mirrored))
        return cross_entropy(view.teacher, view.labels)

    make(GeneratedImages(JOB, **SMALL, augmentation="flip"), term=Term("spy", 1.0, spy))
    assert 0 < int(inputs[0].sum()) < 12
    assert not torch.equal(inputs[0], inputs[1])
