"""Fed-ET: the student learns the consensus labels of the uploads, and in part the view of dissenting uploads.

Paper: Cho, Manoel, Joshi, Sim, Dimitriadis, Heterogeneous Ensemble Knowledge Transfer for Training Large Models in
    Federated Learning, IJCAI 2022, https://arxiv.org/abs/2204.12703; in one shot, as the baseline of FENS (Allouah et
    al., NeurIPS 2024, https://arxiv.org/abs/2411.07182). Read version: a summary; no equation was checked against the
    text.
Symbols: s_k(x) -> decisions, sm(f_k(x) / T); a_k(x) -> confidence; s -> consensus; s_div -> dissent; S(x) -> student;
    lambda -> diversity_weight; T -> kd_temperature, in the paper 1.
Where: the weights by variance -> confidence; consensus and dissent -> Judgement; the server's loss -> transfer_loss.
Deviations: one round, so that nothing of the student goes back to the clients. Optimiser, rate, batch and epochs of
    the one-shot form are unpublished: they are FedKD's, the other baseline on real images of that comparison. As there,
    the ensemble judges each image once, unchanged. Without dissent there is no diversity term. With T other than 1 that
    term has the factor T^2, as in distillation. With Tally's pool as the job's teacher, the pool's prediction is the
    consensus, and a client with another decision dissents.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..core.options import config_class, option, presets
from ..distillation.learner import Learner, build_teacher, learn_from_images
from ..distillation.losses import cross_entropy
from ..distillation.settings import OPTIMIZER, ProxyStudentOptions, shared
from ..method import POOLS, Job, Method, Need, Outcome, Progress


@config_class("fed-et")
class FedEtConfig(ProxyStudentOptions):
    """Options of Fed-ET; the weight is that of FENS's comparison (appendix B.1), the schedule FedKD's."""

    kd_temperature: float = shared("kd_temperature", 1.0)  # of the soft decisions
    diversity_weight: float = option(
        0.05, "weight lambda of the clients who disagree; 0: labels alone", low=0.0, setting=False
    )

    preset = presets({"quick": {"epochs": 12}})


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: T epochs over the proxy images; the result is the last epoch's student."""
    config: FedEtConfig = job.config
    teacher = build_teacher(job, Judgement(config.kd_temperature))
    if job.teacher is not None:
        teacher.combiner = Judgement(config.kd_temperature, teacher.combiner)
    loss = partial(transfer_loss, weight=config.diversity_weight, temperature=config.kd_temperature)
    recipe = config.distill_recipe(optimizer=OPTIMIZER)
    learner = Learner(job, teacher, recipe, augmentation=config.augmentation, loss=loss, asked_once=True)
    return learn_from_images(job, progress, learner)


class Judgement(nn.Module):
    """The clients' joint judgement of an image: their consensus, and the dissent of the others.

    Args:
        temperature: T > 0 of the clients' soft decisions.
        pool: Computes the consensus in place of the weighted sum: a module [M, B, C] -> logits [B, C].
    """

    def __init__(self, temperature: float = 1.0, pool: nn.Module | None = None) -> None:
        super().__init__()
        self._temperature, self._pool = temperature, pool

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C] to [B, 2, C].

        For each image, row 0 is the consensus ``s = sum_k a_k s_k``. Row 1 is ``s_div``, the same sum over the clients
        with ``argmax s_k != argmax s`` alone, with weights scaled to sum to one; zeros if there are none.
        """
        decisions = torch.softmax(logits / self._temperature, dim=2)
        weights = confidence(decisions)
        consensus = torch.einsum("mb,mbc->bc", weights, decisions)
        if self._pool is not None:
            consensus = torch.softmax(self._pool(logits), dim=1)
        dissenting = weights * (decisions.argmax(2) != consensus.argmax(1))
        total = dissenting.sum(0)
        share = dissenting / torch.where(total > 0, total, torch.ones_like(total))
        return torch.stack([consensus, torch.einsum("mb,mbc->bc", share, decisions)], dim=1)


def confidence(decisions: Tensor) -> Tensor:
    """Return ``a_k = Var_c(s_k) / sum_j Var_c(s_j)``: a client that is sure of an image counts more.

    Args:
        decisions: s, probabilities [M, B, C].

    Returns:
        Weights [M, B] that sum to one over M; equal ones where no client prefers a class.
    """
    variance = decisions.var(2, correction=0)
    total = variance.sum(0)
    equal = torch.full_like(variance, 1 / len(variance))
    return torch.where(total > 0, variance / torch.where(total > 0, total, torch.ones_like(total)), equal)


def transfer_loss(student: Tensor, judgement: Tensor, *, weight: float = 0.05, temperature: float = 1.0) -> Tensor:
    """Return ``mean_i CE(S_i, argmax s_i) + lambda T^2 mean_i KL(s_div,i || sm(S_i / T))``.

    The loss of Fed-ET's server (Cho et al., IJCAI 2022). An image without dissent has no second part; the mean is over
    the whole batch.

    Args:
        student: Logits S [B, C], unnormalised.
        judgement: Consensus and dissent [B, 2, C] of :class:`Judgement`.
        weight: lambda >= 0.
        temperature: T > 0.

    Returns:
        A scalar, at least zero.
    """
    consensus, dissent = judgement.unbind(1)
    # x log x is 0 at 0: a row of zeros adds nothing, not even to the gradient.
    log_student = torch.log_softmax(student / temperature, dim=1)
    divergence = (torch.xlogy(dissent, dissent) - dissent * log_student).sum(1).mean()
    return cross_entropy(student, consensus.argmax(1)) + weight * temperature**2 * divergence


METHOD = Method(
    name="fed-et",
    title="Fed-ET",
    source="Cho et al., IJCAI 2022, as in Allouah et al., NeurIPS 2024",
    config=FedEtConfig,
    fit=fit,
    needs=frozenset({Need.PROXY_IMAGES}),
    teachers=POOLS,
)
