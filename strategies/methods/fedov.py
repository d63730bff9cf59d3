"""FedOV: the server keeps open-set classifiers; those who do not know a sample leave the vote to those who do.

Paper: Diao, Li, He, Towards Addressing Label Skews in One-Shot Federated Learning, ICLR 2023,
    https://openreview.net/forum?id=rzrqh85f4Sc; named as a baseline by FENS (Allouah et al., NeurIPS 2024,
    https://arxiv.org/abs/2411.07182). Read version: a summary of the paper and of its code.
Symbols: C -> job.num_classes; the classifiers have C + 1 outputs, the last is "unknown"; v -> voters.
Where: the server's vote -> OpenSet; the clients' training -> the app's task "open-set".
Deviations: none known of the vote; the paper reports every v, and its default is all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.options import config_class, option
from ..method import EnsembleSpec, Job, Method, Need, Outcome, Progress, Upload
from ..teacher.ensemble import load_member

# The vote of open-set classifiers, which predict for themselves whether a sample is unknown to them.


class OpenSet(nn.Module):
    """The sum of the class probabilities over the members to which a sample is least unknown.

    FedOV (Diao et al., ICLR 2023), prediction: ``p_k = sm(z_k)`` is over C + 1 outputs, of which the last is "unknown".
    The v members with the smallest ``p_k,C`` vote, ties in their order. The prediction is the class c < C with the
    largest ``sum_k p_k,c``.

    Args:
        voters: v, the number of members that vote on each sample; 0, or more than M, for all.

    Raises:
        ValueError: ``voters`` is negative or not a single number.
    """

    voters: Tensor

    def __init__(self, voters: int | Tensor = 0) -> None:
        super().__init__()
        value = torch.as_tensor(voters, dtype=torch.int64)
        if value.dim() or value < 0:
            raise ValueError(f"voters is {value.tolist()}: must be a whole number from 0")
        self.register_buffer("voters", value.clone())

    def forward(self, logits: Tensor) -> Tensor:
        """Combine member logits [M, B, C + 1] to the logarithm of the summed probabilities [B, C]."""
        # In log space throughout: a probability that underflows to 0 would have an infinite logarithm.
        log_shares = torch.log_softmax(logits, dim=2)
        order = log_shares[..., -1].argsort(dim=0, stable=True)
        # From the buffer, which may have been loaded; a slice by it would be a constant of an exported program.
        silent = (torch.arange(len(logits), device=logits.device) >= self.voters) & (self.voters > 0)
        ordered = log_shares[..., :-1].gather(0, order[..., None].expand(-1, -1, logits.shape[2] - 1))
        return ordered.masked_fill(silent[:, None, None], -torch.inf).logsumexp(0)


@config_class("fedov")
class FedOvConfig:
    """Options of FedOV."""

    voters: int = option(0, "clients v who vote on a sample, those to whom it is least unknown; 0: all", low=0)


def fit(job: Job, progress: Progress) -> Outcome:
    """Name the ensemble of all uploads and who votes in it; nothing is trained."""
    vote = OpenSet(job.config.voters)
    for done, upload in enumerate(job.uploads, 1):
        _check_outputs(job, upload)
        progress.report(done, len(job.uploads))
    return Outcome(ensemble=EnsembleSpec.of(job, "open-set", vote.state_dict()))


@torch.no_grad()
def _check_outputs(job: Job, upload: Upload) -> None:
    """Refuse a model of C outputs, whose last class would be taken for "unknown"."""
    outputs = load_member(upload, job.builders).eval()(torch.zeros(1, *job.input_shape)).shape[1]
    if outputs != job.num_classes + 1:
        raise OptionError(
            f"the model of {upload.client} has {outputs} outputs: method 'fedov' needs {job.num_classes + 1}, one per "
            'class and one for "unknown"'
        )


METHOD = Method(
    name="fedov",
    title="FedOV",
    source="Diao et al., ICLR 2023",
    config=FedOvConfig,
    fit=fit,
    needs=frozenset({Need.IMAGES}),
    kind="ensemble",
    uploads="open-set",
)
