"""The knowledge-distillation loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.work import work
from .losses import soft_kl

# A student's logits [B, C] and the teacher's answers [B, ...] to a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]

MOMENTUM = 0.9  # of SGD on the server, in every published loop


@dataclass(frozen=True)
class DistillRecipe:
    """The settings of a student's training.

    Attributes:
        epochs: T, the passes over the images, and the length of the learning rate's schedule.
        batch_size: b, images per step.
        kd_temperature: Temperature of the distillation loss.
        student_lr: eta_S, the largest learning rate.
        steps_per_epoch: Most batches per epoch; 0 for one pass over all images.
        optimizer: ``"sgd"`` or ``"adam"``.
        momentum: Momentum of sgd.
        weight_decay: Weight decay of either optimiser.
        schedule: ``"constant"``, ``"cosine"`` or ``"one-cycle"``.
        student_clip: Largest norm of the gradient; 0 does not clip.
        steps: All steps, with which the last pass and the schedule end; 0: whole passes.
    """

    epochs: int
    batch_size: int
    kd_temperature: float
    student_lr: float
    steps_per_epoch: int = 0
    optimizer: str = "sgd"
    momentum: float = MOMENTUM
    weight_decay: float = 0.0
    schedule: str = "constant"
    student_clip: float = 0.0
    steps: int = 0


def distill(
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss = soft_kl,
    clip: float = 0.0,
    frozen_statistics: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> float:
    """Pull a student's predictions towards a teacher's, one optimiser step per batch, in train mode.

    The teacher's answers come with the batches, because a pool that is read without augmentation stores them.

    Args:
        student: [B, ch, H, W] -> logits [B, C]; trained in place.
        batches: Pairs of normalised images [B, ch, H, W] and the teacher's answers [B, ...] without gradient.
        optimizer: Of the student's parameters.
        loss: The loss to minimise; by default :func:`.losses.soft_kl` at temperature 1, with logits [B, C] as answers.
        clip: Largest norm of the gradient; 0 does not clip.
        frozen_statistics: Whether batch normalisation uses its running statistics and leaves them unchanged.
        tick: Called after each step.

    Returns:
        The mean loss over the batches; 0 if there are none.
    """
    student.train()
    if frozen_statistics:
        for layer in student.modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()
    losses = []
    for images, answers in batches:
        value = loss(student(images), answers)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(student.parameters(), clip)
        optimizer.step()
        work().student_steps += 1
        losses.append(value.detach())
        tick()
    return float(torch.stack(losses).mean()) if losses else 0.0
