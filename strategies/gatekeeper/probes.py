"""Synthetic images that probe models: noise, images inverted from a model, and the smallest trigger that fools one.

Paper: Wang, Yao, Shan, Li, Viswanath, Zheng, Zhao, Neural Cleanse: Identifying and Mitigating Backdoor Attacks in
    Neural Networks, IEEE S&P 2019, https://doi.org/10.1109/SP.2019.00031. Read version: a summary of the paper.
Symbols: m -> masks; Delta -> patterns; lambda -> SPARSITY; y_t -> targets.
Where: ``A(x, m, Delta) = (1 - m) x + m Delta``, Eq. (2) -> stamped; the minimum of ``CE(f(A(x)), y_t) + lambda |m|_1``,
    Eq. (3) -> search_triggers.
Deviations: x are images inverted from the clients' models, because the server has none of the clients' images. lambda
    is fixed; the paper adapts it to an attack rate of 99 %. All targets are searched in one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.gpu import eager
from ..distillation.inverted import jitter
from ..teacher.augment import Standardize
from ..teacher.batchnorm import batchnorm_loss

INVERSION_LR = 0.1  # Adam's, of inverted pixels
SMOOTHNESS = 0.02  # weight of their roughness
STATISTICS = 0.1  # weight of the batch-normalisation loss
COARSE = 4  # side of the noise that is upsampled to an image
TRIGGER_LR = 0.3  # Adam's, of masks and patterns
SPARSITY = 0.05  # weight of a mask's size
FAINT = -2.0  # initial logit of a mask
AT_ONCE = 256  # images in one forward pass

Shape = tuple[int, int, int]
Tick = Callable[[], None]


def noise_images(count: int, shape: Shape, rng: torch.Generator) -> Tensor:
    """Return pixels [count, ch, H, W] in [0, 1]: a third each uniform, normal, and smooth.

    Args:
        count: At least 1.
        shape: (channels, height, width).
        rng: Draws the images.
    """
    channels, height, width = shape
    uniform = torch.rand((count, *shape), generator=rng)
    normal = (0.5 + 0.25 * torch.randn((count, *shape), generator=rng)).clamp(0, 1)
    coarse = torch.rand((count, channels, COARSE, COARSE), generator=rng)
    smooth = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    kinds = torch.stack([uniform, normal, smooth])
    return kinds[torch.arange(count) % 3, torch.arange(count)]


def invert(
    model: nn.Module,
    labels: Tensor,
    shape: Shape,
    standardize: Standardize,
    *,
    steps: int,
    rng: torch.Generator,
    tick: Tick,
) -> Tensor:
    """Return pixels [B, ch, H, W] in [0, 1] that a model predicts as these classes.

    They minimise ``CE(f(x), y) + 0.02 TV(x) + 0.1 L_BN(x)`` by Adam, TV the sum of squared differences of neighbours.

    Args:
        model: Frozen, in eval mode.
        labels: y [B].
        shape: (channels, height, width).
        standardize: From pixels to the model's input.
        steps: Steps of Adam.
        rng: Draws the start and the jitter.
        tick: Called at every step.
    """
    channels, height, width = shape
    coarse = torch.rand((len(labels), channels, COARSE, COARSE), generator=rng)
    start = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    free = torch.logit(0.1 + 0.2 * start).to(labels.device).requires_grad_()
    optimizer = eager(torch.optim.Adam)([free], lr=INVERSION_LR)
    with torch.enable_grad(), batchnorm_loss([model]) as statistics:
        for _ in range(steps):
            pixels = torch.sigmoid(free)
            logits = model(standardize(jitter(pixels, 1, rng)))
            loss = F.cross_entropy(logits, labels) + SMOOTHNESS * _roughness(pixels) + STATISTICS * statistics()
            (free.grad,) = torch.autograd.grad(loss, [free])
            optimizer.step()
            tick()
    return torch.sigmoid(free).detach()


def _roughness(pixels: Tensor) -> Tensor:
    down = (pixels[..., 1:, :] - pixels[..., :-1, :]).square().sum()
    return (down + (pixels[..., 1:] - pixels[..., :-1]).square().sum()) / len(pixels)


@dataclass(frozen=True)
class Triggers:
    """The triggers found for each target class of one model.

    Attributes:
        masks: m [T, 1, H, W] in [0, 1].
        patterns: Delta [T, ch, H, W], pixels in [0, 1].
        success: Of the images not predicted as the target, the share that the trigger moves to it [T].
    """

    masks: Tensor
    patterns: Tensor
    success: Tensor

    @property
    def sizes(self) -> Tensor:
        """``|m|_1`` of each target [T], in pixels."""
        return self.masks.sum((1, 2, 3))


def stamp_trigger(images: Tensor, mask: Tensor, pattern: Tensor) -> Tensor:
    """Return ``(1 - m) x + m Delta``, Eq. (2)."""
    return (1 - mask) * images + mask * pattern


def search_triggers(
    model: nn.Module, images: Tensor, classes: int, standardize: Standardize, *, steps: int, tick: Tick
) -> Triggers:
    """Return the smallest trigger found for each class: Eq. (3) of Neural Cleanse, from the same start for all.

    Args:
        model: Frozen, in eval mode.
        images: Pixels [B, ch, H, W] in [0, 1].
        classes: C; every class is a target.
        standardize: From pixels to the model's input.
        steps: Steps of Adam.
        tick: Called at every step.
    """
    group = max(1, AT_ONCE // len(images))
    found = [
        _search(model, images, targets.to(images.device), standardize, steps=steps, tick=tick)
        for targets in torch.split(torch.arange(classes), group)
    ]
    masks, patterns = (torch.cat(parts) for parts in zip(*found, strict=True))
    before = predict_labels(model, images, standardize)
    success = [
        step_images(before, predict_labels(model, stamp_trigger(images, masks[t], patterns[t]), standardize), t)
        for t in range(classes)
    ]
    return Triggers(masks, patterns, torch.tensor(success))


def _search(
    model: nn.Module, images: Tensor, targets: Tensor, standardize: Standardize, *, steps: int, tick: Tick
) -> tuple[Tensor, Tensor]:
    count, (batch, channels, height, width) = len(targets), images.shape
    mask = torch.full((count, 1, 1, height, width), FAINT, device=images.device).requires_grad_()
    pattern = torch.zeros((count, 1, channels, height, width), device=images.device).requires_grad_()
    optimizer = eager(torch.optim.Adam)([mask, pattern], lr=TRIGGER_LR, betas=(0.5, 0.9))
    wanted = targets.repeat_interleave(batch)
    with torch.enable_grad():
        for _ in range(steps):
            shown = stamp_trigger(images, torch.sigmoid(mask), torch.sigmoid(pattern))
            logits = model(standardize(shown.flatten(0, 1)))
            loss = F.cross_entropy(logits, wanted, reduction="sum") / batch + SPARSITY * torch.sigmoid(mask).sum()
            mask.grad, pattern.grad = torch.autograd.grad(loss, [mask, pattern])
            optimizer.step()
            tick()
    return torch.sigmoid(mask).detach()[:, 0], torch.sigmoid(pattern).detach()[:, 0]


def step_images(before: Tensor, after: Tensor, target: int) -> float:
    """Return the share of predictions [B] that were not the target before and are after; NaN if all were."""
    others = before != target
    return float((after[others] == target).float().mean()) if others.any() else float("nan")


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor, standardize: Standardize) -> Tensor:
    """Return logits [N, C] in float32 of pixels [N, ch, H, W]."""
    return torch.cat([model(standardize(part)).float() for part in torch.split(images, AT_ONCE)])


def predict_labels(model: nn.Module, images: Tensor, standardize: Standardize) -> Tensor:
    """Return the predicted classes [N] of pixels [N, ch, H, W]."""
    return logits_of(model, images, standardize).argmax(1)


def choose_images(images: Sequence[Tensor], most: int, rng: torch.Generator) -> Tensor:
    """Return at most ``most`` of all clients' images, drawn at random."""
    pool = torch.cat(list(images))
    return pool[torch.randperm(len(pool), generator=rng)[:most].to(pool.device)]
