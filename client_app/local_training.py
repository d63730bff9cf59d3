"""Local training: SGD on one client's images.

The settings of the papers (ALGORITHMS: Co-Boosting and DENSE train with SGD 0.01, momentum 0.9, cross-entropy; the
weights of the last epoch are uploaded) are options of :class:`fl_app.config.ClientConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization, augment, normalize
from strategies.seeds import derive_seed, seeded_torch


@dataclass(frozen=True)
class Epoch:
    """What one epoch of training showed: its number from 1, mean loss, and training accuracy in [0, 1]."""

    number: int
    loss: float
    accuracy: float


def train(
    model: nn.Module,
    data: ImageData,
    config: ClientConfig,
    *,
    normalization: Normalization,
    augmentation: str,
    seed: int,
    report: Callable[[Epoch], None] | None = None,
) -> Epoch:
    """Train a model in place.

    Args:
        model: Its weights are the start.
        data: uint8 images [N, ch, H, W] with labels [N].
        config: Epochs, batch size and optimiser.
        normalization: The model's input space.
        augmentation: A key of :data:`fl_app.data.AUGMENTATIONS`, applied anew in every epoch.
        seed: Fixes the order of the images, their augmentation, and dropout.
        report: Called after every epoch.

    Returns:
        The last epoch.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "batches"))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    cosine = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.epochs) if config.schedule == "cosine" else None
    )
    # Convolutions are up to 1.7 times faster on pixels whose channels lie side by side.
    model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    epoch = Epoch(0, float("nan"), 0.0)
    with seeded_torch(seed, "dropout"):
        for number in range(1, config.epochs + 1):
            epoch = _one_epoch(
                model, optimizer, data, config, number=number, generator=generator,
                prepare=lambda images: normalize(augment(images, augmentation, generator), *normalization),
            )  # fmt: skip
            if cosine is not None:
                cosine.step()
            if report is not None:
                report(epoch)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return epoch


def _one_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: ImageData,
    config: ClientConfig,
    *,
    number: int,
    generator: torch.Generator,
    prepare: Callable[[torch.Tensor], torch.Tensor],
) -> Epoch:
    total, seen = torch.zeros(2), 0
    order = torch.randperm(len(data.labels), generator=generator)
    for chosen in torch.split(order, config.batch_size):
        if len(chosen) == 1 < min(config.batch_size, len(data.labels)):
            continue  # a leftover: batch norm has no variance of one image
        labels = data.labels[chosen]
        logits = model(prepare(data.images[chosen]))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        hits = (logits.detach().argmax(1) == labels).sum()
        total += torch.stack([loss.detach() * len(labels), hits])
        seen += len(labels)
    mean = total / seen
    return Epoch(number, float(mean[0]), float(mean[1]))
