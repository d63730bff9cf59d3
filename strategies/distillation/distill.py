"""The knowledge-distillation loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.gpu import Graphed, has_hooks
from ..core.layout import tensors_of
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
        student_lr: eta_S, the largest learning rate.
        steps_per_epoch: Most batches per epoch; 0 for one pass over all images.
        optimizer: ``"sgd"`` or ``"adam"``.
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


class Distillation:
    """Pulls a student's predictions towards a teacher's, one optimiser step per batch, in train mode.

    The teacher's answers come with the batches, because a pool that is read without augmentation stores them.

    Args:
        student: [B, ch, H, W] -> logits [B, C]; trained in place.
        loss: The loss to minimise; by default :func:`.losses.soft_kl` at temperature 1, with logits [B, C] as answers.
        clip: Largest norm of the gradient; 0 does not clip.
        frozen_statistics: Whether batch normalisation uses its running statistics and leaves them unchanged.
    """

    def __init__(
        self,
        student: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss = soft_kl,
        clip: float = 0.0,
        frozen_statistics: bool = False,
    ) -> None:
        self._student, self._optimizer, self._loss, self._clip = student, optimizer, loss, clip
        self._frozen_statistics = frozen_statistics
        device = next((weight.device for weight in student.parameters()), "cpu")
        self._step = Graphed(self._stepped, device, capture=not has_hooks(student), reads=partial(tensors_of, student))

    def learn(self, batches: Iterable[tuple[Tensor, Tensor]], tick: Callable[[], None] = lambda: None) -> float:
        """Pass once over some batches, and return their mean loss; 0 if there are none.

        Args:
            batches: Pairs of normalised images [B, ch, H, W] and the teacher's answers [B, ...] without gradient.
        """
        self._step.forget_moved()
        self._student.train()
        if self._frozen_statistics:
            for layer in self._student.modules():
                if isinstance(layer, _BatchNorm):
                    layer.eval()
        losses = []
        for images, answers in batches:
            losses.append(self._step(images, answers))
            work().student_steps += 1
            tick()
        return float(torch.stack(losses).mean()) if losses else 0.0

    def _stepped(self, images: Tensor, answers: Tensor) -> Tensor:
        value = self._loss(self._student(images), answers)
        return take_step(value, self._student, self._optimizer, clip=self._clip)


def take_step(loss: Tensor, module: nn.Module, optimizer: torch.optim.Optimizer, *, clip: float) -> Tensor:
    """Take a step of a module's optimiser down a loss, a scalar, and return the loss without its gradient.

    Args:
        clip: Largest norm of the gradient; 0 does not clip.
    """
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    optimizer.step()
    return loss.detach()
