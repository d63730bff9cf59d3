"""Losses on logits; each returns a scalar and lets the gradient flow through every argument.

Letters: B batch, C classes; sm is the softmax over classes.
"""

from __future__ import annotations

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
        A scalar, summed over classes and averaged over the batch; zero where the two agree.
    """
    return temperature**2 * _kl(teacher, student, temperature).mean()


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

    Returns:
        A scalar.
    """
    return F.cross_entropy(logits, labels)


def _kl(p_logits: Tensor, q_logits: Tensor, temperature: float) -> Tensor:
    """Return KL(p || q) = sum_c p_c (log p_c - log q_c) per sample [B]."""
    log_p = torch.log_softmax(p_logits / temperature, dim=1)
    log_q = torch.log_softmax(q_logits / temperature, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)
