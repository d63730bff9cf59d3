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

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from client_app.destruction import destroy
from client_app.local_training import Epoch, hits, minimise
from client_app.losses import loss_of
from client_app.sam import statistics_at_rest
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization, augment, normalize
from fl_app.models import penultimate
from strategies.core.seeds import generator

# The true logit is lowered by this much, which removes it from the softmax.
LOWERED = 1e4
# Of the published code: the weight of mixed features; the change of a pixel from 0 to 1 in each step that makes a
# destroyed image look known.
MIXUP_WEIGHT = 0.01
ATTACK_STEP = 0.002


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
    """Train an open-set classifier in place; see :func:`client_app.local_training.train`.

    Args:
        model: Maps images to C + 1 logits; the last one means "unknown".
        data: uint8 images [N, ch, H, H] with labels [N], in 0 .. C - 1.
        config: Epochs, batch size, optimiser, loss of the labels, and the weights of the added terms.
        normalization: The model's input space.
        augmentation: A key of :data:`fl_app.data.AUGMENTATIONS`, applied before an image is destroyed.
        seed: Fixes the order of the images, their augmentation and destruction, and dropout.
        report: Called after every epoch.

    Returns:
        The last epoch; its accuracy is measured among the C classes.
    """
    criterion, rng = loss_of(config, data.labels), generator(seed, "unknown")

    def objective(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = features_and_logits(model, inputs)
        known = criterion(outputs[1], labels)
        unknown = unknown_loss(
            model,
            inputs,
            labels,
            outputs=outputs,
            normalization=normalization,
            attack_steps=config.attack_steps,
            rng=rng,
        )
        return known + unknown, hits(outputs[1][:, :-1], labels)

    def prepare(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        return normalize(augment(images, augmentation, rng), *normalization)

    return minimise(model, data, config, objective=objective, prepare=prepare, seed=seed, report=report)


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
        rng: A CPU generator.

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
        rng: A CPU generator.

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
