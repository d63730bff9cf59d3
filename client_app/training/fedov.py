"""Local training of FedOV: a classifier with an extra output "unknown", which it learns from destroyed images.

Paper: Diao, Li, He, Towards Addressing Label Skews in One-Shot Federated Learning, ICLR 2023,
    https://openreview.net/forum?id=rzrqh85f4Sc. Read version: a summary of the paper and of its code.
Symbols: C -> the number of classes, and the index of "unknown"; x_dd -> destroyed; x_dd' -> attacked.
Where: destructive augmentation -> client_app.destruction; the five terms of the loss -> open_set_loss.
Deviations: the mixed features are the inputs of the last linear layer. Only clean images enter batch normalisation's
    running statistics; the others are normalised by their own batch. The published code bounds what the attack changes
    by 0.5, which five steps of 0.002 never reach: here nothing bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from client_app.training.local import Epoch, Training, hits, minimise
from client_app.training.losses import loss_of, statistics_at_rest
from fl_app.data import Normalization
from fl_app.data.preprocessing import rectangles, uniform
from fl_app.models import penultimate
from strategies.core.seeds import generator

# Destructive augmentation: it keeps an image's texture and removes the features of its class.
#
# FedOV (Diao, Li, He, ICLR 2023, https://openreview.net/forum?id=rzrqh85f4Sc) draws one of these for every image. They
# work on batches of normalised images; places are in coordinates from -1 to 1, x to the right and y down.
#
# Symbols: H -> the side of an image; h = H / 2, rounded down.
# Deviations: rectangles begin and end between pixels, not at them.


CROPPED = (0.1, 0.33)  # share of the area that a crop leaves
CROP_RATIO = (3 / 4, 4 / 3)  # of its sides
ERASED = (0.33, 0.5)  # share of the area that is erased
ERASED_RATIO = (0.3, 3.3)
# Sides of a blur's kernel, one of each for the two axes in random order, and its standard deviation in pixels. It is so
# large that the kernel is a box to the eye.
LONG_SIDES, SHORT_SIDES, DEVIATIONS = (3, 5, 7, 9), (1, 3, 5), (10.0, 100.0)


def destroy(images: torch.Tensor, rng: torch.Generator, black: torch.Tensor) -> torch.Tensor:
    """Return images that are each destroyed in one of the ways of :data:`DESTRUCTIONS`, drawn at random.

    Args:
        images: Normalised [B, ch, H, H], H at least 4; left unchanged.
        black: The value of a black pixel in the input space [ch, 1, 1].

    Returns:
        [B, ch, H, H].
    """
    destroyed = torch.empty_like(images)
    kinds = torch.randint(len(DESTRUCTIONS), (len(images),), generator=rng)
    for kind, function in enumerate(DESTRUCTIONS):
        chosen = (kinds == kind).nonzero().flatten()
        if len(chosen):
            destroyed[chosen] = function(images[chosen], rng, black)
    return destroyed


def resized_crop(images: torch.Tensor, rng: torch.Generator, black: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Cut out a tenth to a third of each image [B, ch, H, H] and enlarge it to the whole."""
    centre, half = rectangles(len(images), CROPPED, CROP_RATIO, rng)
    return F.grid_sample(images, centre + half * _coordinates(images), padding_mode="border", align_corners=False)


def blur(images: torch.Tensor, rng: torch.Generator, black: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Blur each image [B, ch, H, H] by a Gaussian of a kernel of its own, with mirror padding."""
    count, channels, side, _ = images.shape
    reach = min(max(LONG_SIDES) // 2, side - 1)
    sides = torch.stack([_one_of(LONG_SIDES, count, rng), _one_of(SHORT_SIDES, count, rng)])
    sides = torch.where(torch.randint(2, (count,), generator=rng).bool(), sides, sides.flip(0))
    deviation = uniform((count, 1), *DEVIATIONS, rng)
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype)
    exponents = (-0.5 * (offsets / deviation) ** 2).masked_fill(offsets.abs() > sides[..., None] // 2, -math.inf)
    across, down = torch.softmax(exponents, dim=-1).repeat_interleave(channels, dim=1)[:, :, None, None]
    rows = F.pad(images, [reach] * 4, mode="reflect").flatten(0, 1)[None]
    rows = F.conv2d(rows, across, groups=len(across))
    return F.conv2d(rows, down.transpose(2, 3), groups=len(down)).view_as(images)


def erase(images: torch.Tensor, rng: torch.Generator, black: torch.Tensor) -> torch.Tensor:
    """Blacken a rectangle of a third to a half of each image [B, ch, H, H]."""
    centre, half = rectangles(len(images), ERASED, ERASED_RATIO, rng)
    inside = ((_coordinates(images) - centre).abs() < half).all(-1)
    return torch.where(inside[:, None], black, images)


def cut(images: torch.Tensor, rng: torch.Generator, black: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Copy h columns or h rows of each image [B, ch, H, H] over others, or swap its halves: a third each.

    A copy begins at least h / 2 from its original, and both begin in the first h columns or rows. Swapped are the left
    and the right half, or the upper and the lower one.
    """
    count, side = len(images), images.shape[-1]
    half, line = side // 2, torch.arange(side)
    pairs = torch.tensor([(p, q) for p in range(half) for q in range(half) if 2 * abs(p - q) >= half])
    place, source = pairs[torch.randint(len(pairs), (count,), generator=rng)].T[..., None]
    copied = (line >= place) & (line < place + half)
    copies = torch.where(copied, line - place + source, line)
    swap = torch.where(line < half, line + side - half, torch.where(line < side - half, line, line - (side - half)))
    kind = torch.randint(3, (count, 1), generator=rng)
    columns = torch.where(kind == 2, swap, copies)
    lying = torch.where(kind == 2, torch.randint(2, (count, 1), generator=rng), kind).bool()[:, 0]
    return _upright(images, lying, lambda batch: torch.gather(batch, 3, _spread(columns, batch)))


def rotate_part(images: torch.Tensor, rng: torch.Generator, black: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """Turn the left and the right square of h rows of each image [B, ch, H, H], both by one to three quarters."""
    count, half = len(images), images.shape[-1] // 2
    first, quarters = (torch.randint(low, high, (count,), generator=rng) for low, high in ((0, half), (1, 4)))
    rows = first[:, None] + torch.arange(half)
    result = images.clone()
    for image, (place, turns) in enumerate(zip(rows, quarters.tolist(), strict=True)):
        for left in (0, half):
            square = images[image][:, place, left : left + half]
            result[image][:, place, left : left + half] = torch.rot90(square, turns, (1, 2))
    return result


# Each stands for a seventh of the images.
DESTRUCTIONS: tuple[Callable[[torch.Tensor, torch.Generator, torch.Tensor], torch.Tensor], ...] = (
    resized_crop, blur, erase, cut, rotate_part, cut, rotate_part,
)  # fmt: skip


def _upright(images: torch.Tensor, lying: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Change images along their columns, those that are ``lying`` [B] along their rows."""
    chosen = lying[:, None, None, None]
    changed = change(torch.where(chosen, images.transpose(2, 3), images))
    return torch.where(chosen, changed.transpose(2, 3), changed)


def _spread(columns: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Return each image's columns [B, H] for all its channels and rows [B, ch, H, H]."""
    return columns[:, None, None, :].expand(images.shape)


def _one_of(values: tuple[int, ...], count: int, rng: torch.Generator) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(len(values), (count,), generator=rng)]


def _coordinates(images: torch.Tensor) -> torch.Tensor:
    """Return (x, y) of every pixel's centre [H, H, 2]."""
    side = images.shape[-1]
    line = (2 * torch.arange(side) + 1) / side - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=-1)


# The true logit is lowered by this much, which removes it from the softmax.
LOWERED = 1e4
# Of the published code: the weight of mixed features; the change of a pixel from 0 to 1 in each step that makes a
# destroyed image look known.
MIXUP_WEIGHT = 0.01
ATTACK_STEP = 0.002


def train(model: nn.Module, training: Training) -> Epoch:
    """Train an open-set classifier in place; see :func:`client_app.training.local.train`.

    Args:
        model: Maps images to C + 1 logits; the last one means "unknown".
        training: Its images are uint8 [N, ch, H, H] with labels in 0 .. C - 1, augmented before they are destroyed.

    Returns:
        The last epoch; its accuracy is measured among the C classes.
    """
    config, rng = training.config, generator(training.seed, "unknown")
    criterion = loss_of(config, training.data.labels)

    def objective(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = features_and_logits(model, inputs)
        known = criterion(outputs[1], labels)
        unknown = unknown_loss(
            model,
            inputs,
            labels,
            outputs=outputs,
            normalization=training.normalization,
            attack_steps=config.attack_steps,
            rng=rng,
        )
        return known + unknown, hits(outputs[1][:, :-1], labels)

    return minimise(model, training, objective)


def unknown_loss(
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    outputs: tuple[torch.Tensor, torch.Tensor],
    normalization: Normalization,
    attack_steps: int,
    rng: torch.Generator,
) -> torch.Tensor:
    """Return the four terms that FedOV adds to the cross-entropy of the labels; "unknown" is class C in each.

    ``CE(f(x_dd), C) + CE(f(x) without y, C) + w CE(mixed, C) + CE(f(x_dd'), C)``

    Args:
        model: f, in training mode.
        inputs: x, normalised [B, ch, H, H].
        labels: y [B].
        outputs: Inputs of f's last linear layer for x [B, F], and f(x) [B, C + 1].
        normalization: The input space, for black pixels and the length of a step.
        attack_steps: Steps that make destroyed images look known.

    Returns:
        A scalar.
    """
    features, logits = outputs
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in normalization)
    destroyed = destroy(inputs, rng, -mean / deviation)
    attacked = attack(model, destroyed, steps=attack_steps, step=ATTACK_STEP / deviation)
    with statistics_at_rest(model):
        strange = to_unknown(model(destroyed)) + to_unknown(model(attacked))
    mixed = mixed_features(features, labels, rng)
    return strange + to_unknown(without_label(logits, labels)) + MIXUP_WEIGHT * to_unknown(penultimate(model)(mixed))


def to_unknown(logits: torch.Tensor) -> torch.Tensor:
    """Return ``mean_i -log sm(logits_i)[C]``, a scalar, for logits [B, C + 1]; 0 for an empty batch."""
    if not len(logits):
        return logits.sum()
    return -torch.log_softmax(logits, dim=1)[:, -1].mean()


def without_label(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return logits [B, C + 1] with the logit of the true label [B] lowered by :data:`LOWERED`."""
    return logits - LOWERED * F.one_hot(labels, logits.shape[1]).to(logits.dtype)


def mixed_features(features: torch.Tensor, labels: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Mix each image's features with those of another, drawn at random, by one share; pairs of one class are left out.

    Args:
        features: h [B, F].
        labels: y [B].

    Returns:
        ``s h_i + (1 - s) h_j`` [P, F] of the P pairs with different labels; s is uniform in (0, 1), Beta(1, 1).
    """
    other, share = torch.randperm(len(labels), generator=rng), torch.rand((), generator=rng)
    return (share * features + (1 - share) * features[other])[labels != labels[other]]


def attack(model: nn.Module, images: torch.Tensor, *, steps: int, step: torch.Tensor) -> torch.Tensor:
    """Move images in the direction in which the model, as it is used, is less sure that they are unknown.

    Each step adds ``step * sign(grad CE(f(x), C))``, with f in evaluation mode.

    Args:
        model: f, to C + 1 logits; its weights get no gradient, and its mode stays.
        images: Normalised [B, ch, H, W]; left unchanged.
        steps: Number of steps.
        step: Change of each value per step, in the input space [ch, 1, 1].

    Returns:
        [B, ch, H, W], without gradient.
    """
    moved, training = images, model.training
    model.eval()
    for _ in range(steps):
        moved = moved.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(to_unknown(model(moved)), moved)
        moved = moved + step * slope.sign()
    model.train(training)
    return moved.detach()


def features_and_logits(model: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the model's last linear layer [B, F] and its logits [B, C + 1], for images [B, ch, H, W]."""
    seen: list[torch.Tensor] = []
    hook = penultimate(model).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        logits = model(inputs)
    finally:
        hook.remove()
    return seen[0], logits
