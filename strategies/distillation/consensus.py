"""Losses between a student and members that are weighted sample by sample.

Letters: M members, B batch, C classes; ``weights`` a [M, B], with ``sum_k a_ki = 1`` over all members of an ensemble.
The losses are those of FLBoost (Zhang, Shen, Ding, Tao, Duan, CVPR 2022), Eqs. (3), (4) and (6) of its submission, in
the forms of the text and of the published code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from ..teacher.ensemble import Ensemble

DISCREPANCIES = ("logits", "kl", "mse")
CE_FORMS = ("per-sample", "batch-mean", "mean-output")
DIRECTIONS = ("teacher-first", "student-first", "mse")
MEANS = ("probabilities", "logits")


def discrepancy(student: Tensor, members: Tensor, weights: Tensor, form: str) -> Tensor:
    """Return ``mean_i sum_k a_ki d(s_i, f_ki)``, L_md, which the generator maximises.

    Args:
        student: Logits s [B, C].
        members: Logits f [M, B, C] of all members, or of some.
        weights: a [M, B].
        form: ``"logits"``: d is ``(1/C) sum_c |s_c - f_c|`` with f as a constant (the published code); ``"kl"``: d is
            ``KL(sm(s) || sm(f))`` (the paper); ``"mse"``: d is ``(1/C) sum_c (s_c - f_c)^2``.

    Returns:
        A scalar, at least zero.
    """
    if form == "logits":
        apart = (student - members.detach()).abs().mean(2)
    elif form == "mse":
        apart = (student - members).square().mean(2)
    else:
        log_s, log_f = torch.log_softmax(student, dim=1), torch.log_softmax(members, dim=2)
        apart = (log_s.exp() * (log_s - log_f)).sum(2)
    return (weights * apart).sum(0).mean()


def weighted_cross_entropy(members: Tensor, labels: Tensor, weights: Tensor, form: str) -> Tensor:
    """Return the members' cross-entropy L_cls, which the generator minimises.

    Args:
        members: Logits f [M, B, C] of all members, or of some.
        labels: y [B], whole numbers in [0, C).
        weights: a [M, B].
        form: ``"per-sample"``: ``mean_i sum_k a_ki CE(f_ki, y_i)`` (the paper); ``"batch-mean"``:
            ``sum_k mean_i(a_ki) mean_i(CE(f_ki, y_i))`` (the published code); ``"mean-output"``:
            ``mean_i CE(sum_k a_ki f_ki, y_i)``, which needs all members (FedGen and FedDF in the text, section 3.3).
    """
    if form == "mean-output":
        return F.cross_entropy((weights[:, :, None] * members).sum(0), labels)
    losses = F.cross_entropy(members.flatten(0, 1), labels.repeat(len(members)), reduction="none").view_as(weights)
    if form == "per-sample":
        return (weights * losses).sum(0).mean()
    return (weights.mean(1) * losses.mean(1)).sum()


@dataclass(frozen=True)
class Lesson:
    """The members' targets for one batch, in two tensors for any number of members and of steps on the batch.

    Attributes:
        answers: Teacher first: q = sum_k a_k sm(f_k) [B, C]; student first: m = sum_k a_k log sm(f_k) [B, C]; squares:
            sum_k a_k f_k [B, C].
        constant: The loss's part that depends on the members alone; a scalar.
        direction: One of :data:`DIRECTIONS`.
    """

    answers: Tensor
    constant: Tensor
    direction: str
    scale: float

    @classmethod
    @torch.no_grad()
    def of(cls, members: Tensor, weights: Tensor, *, mean: str, direction: str, per_class: bool) -> Lesson:
        """Return the lesson of a batch.

        Args:
            members: Logits f [M, B, C] of all members.
            weights: a [M, B].
            mean: ``"probabilities"``: the student is pulled to each member; ``"logits"``: to the one distribution
                ``sm(sum_k a_k f_k)``, as in FedDF.
            direction: ``"teacher-first"``: KL(member || student); ``"student-first"``: KL(student || member);
                ``"mse"``: the mean over classes of squared differences of logits, for probabilities too.
            per_class: Whether the mean is over classes too, which adds a factor 1/C.
        """
        if mean == "logits":
            members, weights = (weights[:, :, None] * members).sum(0, keepdim=True), torch.ones_like(weights[:1])
        if direction == "mse":
            answers = (weights[:, :, None] * members).sum(0)
            apart = (weights[:, :, None] * members.square()).sum(0) - answers.square()
            return cls(answers, apart.mean(), direction, 1.0)
        log_f = torch.log_softmax(members, dim=2)
        scale = 1.0 / members.shape[2] if per_class else 1.0
        if direction == "student-first":
            answers = (weights[:, :, None] * log_f).sum(0)
            return cls(answers, answers.new_zeros(()), direction, scale)
        shares = weights[:, :, None] * log_f.exp()
        return cls(shares.sum(0), (shares * log_f).sum((0, 2)).mean(), direction, scale)

    @classmethod
    @torch.no_grad()
    def of_ensemble(
        cls, ensemble: Ensemble, images: Tensor, weights: Tensor, *, mean: str, direction: str, per_class: bool
    ) -> Lesson:
        """Return an ensemble's lesson on a batch; see :meth:`of`.

        Args:
            images: Normalised images [B, ch, H, W], or other inputs of the members.
            weights: a [M, B].
            mean: As in :meth:`of`; or ``"pool"``: the student is pulled to the combiner's output, regardless of a.
            direction: As in :meth:`of`.
            per_class: Whether the mean is over classes too.
        """
        logits = ensemble.member_logits(images)
        if mean == "pool":
            logits, mean = ensemble.combine(logits, images)[None], "probabilities"
            weights = torch.ones_like(weights[:1])
        return cls.of(logits, weights, mean=mean, direction=direction, per_class=per_class)

    def loss(self, student: Tensor) -> Tensor:
        """Return ``mean_i sum_k a_ki d_ki``, KL in the lesson's direction or squares, times its factor.

        Args:
            student: Logits s [B, C]; gradients pass through them.

        Returns:
            A scalar, at least zero.
        """
        if self.direction == "mse":
            return self.constant + (student - self.answers).square().mean()
        log_s = torch.log_softmax(student, dim=1)
        if self.direction == "student-first":
            return self.scale * (log_s.exp() * (log_s - self.answers)).sum(1).mean()
        return self.scale * (self.constant - (self.answers * log_s).sum(1).mean())
