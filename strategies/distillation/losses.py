"""Losses on logits; each returns a scalar and passes gradients to every argument.

Letters: B batch, C classes; sm is the softmax over classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_kl(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the distillation loss ``T^2 * mean_i KL(sm(t_i / T) || sm(s_i / T))``.

    Hinton, Vinyals, Dean, *Distilling the Knowledge in a Neural Network*, 2015, section 2; at T = 1 it is l_dis of
    DENSE ("model distillation").

    Args:
        student: Logits [B, C], unnormalised.
        teacher: Logits [B, C], unnormalised.
        temperature: T > 0; the factor T^2 keeps the size of the gradient.

    Returns:
        A scalar, summed over classes and averaged over the batch; zero if the two agree.
    """
    return temperature**2 * _kl(teacher, student, temperature).mean()


def logit_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Return ``mean_i (1/C) sum_c |s_ic - t_ic|``, the L1 distance of logits.

    The distillation loss of FedKD's published code (Gong et al., AAAI 2022), which FENS uses too.

    Args:
        student: Logits [B, C], unnormalised.
        teacher: Logits [B, C], unnormalised.

    Returns:
        A scalar, at least zero; unlike :func:`soft_kl` it changes if a constant is added to all logits.
    """
    return (student - teacher).abs().mean()


def adversarial_divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``-T^2 * mean_i omega_i KL(sm(t_i / T) || sm(s_i / T))``, omega_i = [argmax t_i != argmax s_i].

    l_div of DENSE ("transferability"), with the mask of its Eq. (6); there T = 1. Minimised, it moves images to where
    the student still disagrees with the teacher. The mean is over the whole batch, not over the masked part.

    Args:
        teacher: Logits [B, C], unnormalised.
        student: Logits [B, C], unnormalised.
        temperature: T > 0.

    Returns:
        A scalar, at most zero.
    """
    disagree = (teacher.argmax(1) != student.argmax(1)).to(teacher.dtype)
    return -(temperature**2) * (disagree * _kl(teacher, student, temperature)).mean()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``mean_i -log sm(logits_i)[y_i]``; l_CE of DENSE ("similarity").

    Args:
        logits: [B, C], unnormalised.
        labels: Classes [B], whole numbers in [0, C).
    """
    return F.cross_entropy(logits, labels)


def hard_cross_entropy(
    logits: Tensor, labels: Tensor, exponent: float = 1.0, *, differentiated: bool = False
) -> Tensor:
    """Return ``mean_i (1 - p_i)^exponent * -log p_i`` with ``p_i = sm(logits_i)[y_i]``; L_H of Co-Boosting.

    Its Eqs. (5), (6): samples that the ensemble already classifies correctly count less.

    Args:
        logits: [B, C], unnormalised.
        labels: Classes [B], whole numbers in [0, C).
        exponent: At least 0; at 0 this is :func:`cross_entropy`.
        differentiated: Whether the gradient passes through the factor, as Eq. (6) has it; else it is a constant, as in
            the published code.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    difficulty = (1 - (-(losses if differentiated else losses.detach())).exp()) ** exponent
    return (difficulty * losses).mean()


def information(logits: Tensor) -> Tensor:
    """Return ``sum_c q_c log10 q_c``, q the batch mean of sm(logits): minus the entropy of the classes in a batch.

    L_ie of DAFL (Chen et al., ICCV 2019, section 3.3), with the logarithm of its published code. Its minimum, -log10 C,
    is reached if every class is equally likely.

    Args:
        logits: [B, C], unnormalised.

    Returns:
        A scalar, at most zero.
    """
    # In log space throughout: a share that underflows to 0 has an infinite logarithm, and its gradient would be NaN.
    log_share = torch.logsumexp(torch.log_softmax(logits, dim=1), dim=0) - math.log(len(logits))
    return (log_share.exp() * log_share).sum() / math.log(10)


def jensen_shannon(student: Tensor, teacher: Tensor, temperature: float = 3.0) -> Tensor:
    """Return the divergence of two predictions, ``(KL(M||P) + KL(M||Q)) / 2`` with M = (P + Q) / 2.

    P and Q are sm(s / T) and sm(t / T); all three are clamped to [0.01, 0.99]. This is the competition loss of Adaptive
    DeepInversion (Yin et al., CVPR 2020, section 3.2), in the order of its published code. The paper writes KL(P||M),
    KL(Q||M).

    Args:
        student: Logits [B, C], unnormalised.
        teacher: Logits [B, C], unnormalised.
        temperature: T > 0.

    Returns:
        A scalar, averaged over the batch.
    """
    p, q = (torch.softmax(logits / temperature, dim=1) for logits in (student, teacher))
    middle = ((p + q) / 2).clamp(0.01, 0.99)
    p, q = p.clamp(0.01, 0.99), q.clamp(0.01, 0.99)
    return 0.5 * (middle * (2 * middle.log() - p.log() - q.log())).sum(1).mean()


def total_variation(images: Tensor) -> Tensor:
    """Return the sum of the L2 norms of an image batch's first differences: across, down and along both diagonals.

    The regulariser of DeepInversion (Yin et al., CVPR 2020, R_TV) in the form of its published code: four norms over
    the whole batch, not squared.

    Args:
        images: [B, ch, H, W].

    Returns:
        A scalar, at least zero.
    """
    differences = (
        images[..., :, :-1] - images[..., :, 1:],
        images[..., :-1, :] - images[..., 1:, :],
        images[..., :-1, :-1] - images[..., 1:, 1:],
        images[..., 1:, :-1] - images[..., :-1, 1:],
    )
    return torch.stack([torch.linalg.vector_norm(part) for part in differences]).sum()


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """Return ``exp(-mean_ij(mean_d (z_i - z_j)^2 * mean_p |x_i - x_j|))``, over all pairs i, j of a batch.

    The diversity loss R of FLBoost's published code (Zhang et al., CVPR 2022, L_dis of its Table 4; first in FedGen's):
    different noise should make different images. Pairs with i = j count as zeros.

    Args:
        noise: z [B, Z].
        made: x [B, ...], the generator's output for z.

    Returns:
        A scalar in (0, 1]; 1 if all images, or all noise vectors, are equal.
    """
    apart = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist").square() / noise.shape[1]
    pixels = made.flatten(1)
    return torch.exp(-(apart * torch.cdist(pixels, pixels, p=1.0)).mean() / pixels.shape[1])


def _kl(p_logits: Tensor, q_logits: Tensor, temperature: float) -> Tensor:
    """Return KL(p || q) = sum_c p_c (log p_c - log q_c) per sample [B]."""
    log_p = torch.log_softmax(p_logits / temperature, dim=1)
    log_q = torch.log_softmax(q_logits / temperature, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


# The direction in which a small change of an image changes a prediction most.
#
# The diversification of Co-Boosting (Dai et al., ICLR 2024, Eqs. (9), (10)). The published code of IntactOFL moves its
# images so, too.

PERTURBATION_TEMPERATURE = 4.0  # of the softened probabilities in both published codes


def draw_directions(count: int, classes: int, rng: torch.Generator) -> Tensor:
    """Return u [B, C] drawn from U[-1, 1] by a generator on the CPU, for B images and C classes."""
    return torch.rand((count, classes), generator=rng).mul_(2).sub_(1)


def prediction_gradient(
    predict: Callable[[Tensor], Tensor], inputs: Tensor, directions: Tensor, *, softened: bool = True
) -> Tensor:
    """Return ``grad_x sum_i u_i . sm(z(x_i) / 4)``.

    Args:
        predict: Normalised images [B, ch, H, W] -> logits z [B, C].
        inputs: x [B, ch, H, W], normalised.
        directions: u [B, C], see :func:`draw_directions`.
        softened: False takes the logits themselves, as the text of Co-Boosting.

    Returns:
        The gradient [B, ch, H, W].
    """
    inputs = inputs.detach().requires_grad_()
    values = predict(inputs)
    if softened:
        values = torch.softmax(values / PERTURBATION_TEMPERATURE, dim=1)
    (gradient,) = torch.autograd.grad((directions * values).sum(), inputs)
    return gradient


def step_by_sign(inputs: Tensor, gradient: Tensor, size: float) -> Tensor:
    """Return ``x + size * sign(gradient)``: where the gradient is not 0, each pixel moves by ``size``."""
    return torch.add(inputs.detach(), gradient.sign(), alpha=size)
