"""The knowledge-distillation loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .losses import soft_kl


def distill(
    student: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
    *,
    temperature: float = 1.0,
    clip: float = 0.0,
    tick: Callable[[], None] = lambda: None,
) -> float:
    """Pull a student's predictions towards a teacher's, one optimiser step per batch, in train mode.

    The loss is :func:`.losses.soft_kl`; the teacher's logits come with the batches, because a pool that is read
    without augmentation knows them already.

    Args:
        student: [B, ch, H, W] -> logits [B, C]; trained in place.
        batches: Pairs of normalised images [B, ch, H, W] and teacher logits [B, C] without gradient.
        optimizer: Of the student's parameters.
        temperature: T > 0 of the loss.
        clip: Largest norm of the gradient; 0 does not clip.
        tick: Called after each step.

    Returns:
        The mean loss over the batches; 0 if there are none.
    """
    student.train()
    losses = []
    for images, teacher_logits in batches:
        loss = soft_kl(student(images), teacher_logits, temperature)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(student.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
        tick()
    return float(torch.stack(losses).mean()) if losses else 0.0
