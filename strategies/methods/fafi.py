"""FAFI: clients train an encoder with prototypes of the classes; the server sums features and averages prototypes.

Paper: Zeng, Huang, Zhou, Wu, Wan, Chen, Cai, Does One-shot Give the Best Shot? Mitigating Model Inconsistency in
    One-shot Federated Learning, ICML 2025, https://openreview.net/forum?id=2XvF67vbCK. Read version: the abstract, and
    a summary of the repository https://github.com/zenghui9977/FAFI_ICML25 at 26cf90e.
Symbols: e_k(x) -> the last F of a member's outputs; P_k -> its tensor "prototypes" [C, F]; n_k -> num_examples.
Where: fusion and prediction -> Prototypes; the clients' loss -> the app's task "prototypes".
Deviations: the published code predicts in training mode, so batch normalisation uses the statistics of each batch of
    test images; here fafi.bn = "running" is the default, and "test-batch" marks its rows. On CIFAR-10 the code tests on
    images that are not normalised; here training and test agree. The abstract names a fusion by informativeness, which
    the code never calls: fafi.fusion = "noise" is its formula, without the mean over clients that would leave the plain
    sum. Noise is drawn once for all samples, and a member's cosine is the mean over the draws.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..combiners.trained import register
from ..core.errors import OptionError
from ..core.options import config_class, option
from ..core.seeds import generator
from ..method import TRANSDUCTIVE, EnsembleSpec, Job, Method, Need, Outcome, Plan, Progress, Upload
from ..teacher.average import recorded_weights
from ..teacher.ensemble import load_member
from ..teacher.frozen import forget_statistics

# Encoders whose features are summed and compared with common prototypes of the classes.


class Prototypes(nn.Module):
    """``(h / ||h||) . P_c`` for the sum h of the members' features.

    FAFI (Zeng et al., ICML 2025), as its published code predicts: ``h(x) = sum_k w_k e_k(x) / sum_k w_k`` of the raw
    features e_k. With directions of noise, ``h(x) = sum_k a_k(x) w_k e_k(x)`` up to a factor that changes nothing, and
    ``a_k(x) = 1 - cos(e_k(x), d_k)``: a member counts more for a sample that it tells from noise.

    Args:
        prototypes: P [C, F].
        weights: w_k >= 0 [M], not all zero.
        noise: d_k [M, F], the mean direction of each member's features for noise; None for the plain sum.
        batch: One bool: whether members' batch normalisation uses the statistics of the batch that it sees, in place of
            those of training. Predictions then depend on the other samples of the batch.

    Raises:
        ValueError: The shapes do not match, or the weights are negative or all zero.
    """

    prototypes: Tensor
    weights: Tensor
    noise: Tensor | None
    batch: Tensor | None

    def __init__(
        self, prototypes: Tensor, weights: Tensor, noise: Tensor | None = None, batch: Tensor | None = None
    ) -> None:
        super().__init__()
        register(self, {"prototypes": (prototypes, 2), "weights": (weights, 1)})
        if not bool((self.weights >= 0).all()) or not float(self.weights.sum()) > 0:
            raise ValueError(f"weights per member are {self.weights.tolist()}: must be from 0, and not all zero")
        if noise is not None and noise.shape != (len(weights), prototypes.shape[1]):
            raise ValueError(f"directions of noise are {list(noise.shape)}: must be [M, F]")
        self.register_buffer("noise", None if noise is None else noise.detach().clone().float())
        self.register_buffer("batch", None if batch is None else batch.clone())

    @property
    def batch_statistics(self) -> bool:
        """Whether members are called with the statistics of their batch, see :class:`.ensemble.Ensemble`."""
        return self.batch is not None and bool(self.batch)

    def forward(self, outputs: Tensor) -> Tensor:
        """Combine member outputs [M, B, C + F], logits and then features, to logits [B, C]."""
        features = outputs[..., len(self.prototypes) :]
        weights = (self.weights / self.weights.sum())[:, None]
        if self.noise is not None:
            cosines = torch.einsum("mbf,mf->mb", F.normalize(features, dim=2), self.noise)
            weights = weights * (1 - cosines)
        fused = torch.einsum("mb,mbf->bf", weights.expand(features.shape[:2]), features)
        return F.normalize(fused, dim=1) @ self.prototypes.T


KEY = "prototypes"  # of an upload's tensor P_k
NOISE_IMAGES = 64
TEST_BATCH = "test-batch"


@config_class("fafi")
class FafiConfig:
    """Options of FAFI."""

    fusion: str = option(
        "size",
        "weights of the clients' features: numbers of examples, or how far a feature is from that of noise",
        choices=("size", "noise"),
    )
    bn: str = option(
        "running",
        "statistics of batch normalisation at inference; test-batch: those of the test images, as in the published "
        "code, which marks the result as transductive",
        choices=("running", TEST_BATCH),
    )


def fit(job: Job, progress: Progress) -> Outcome:
    """Average the prototypes, and name the ensemble of all encoders; nothing is trained."""
    config: FafiConfig = job.config
    weights, noise = [1.0] * len(job.uploads), None
    if config.fusion == "size":
        weights = recorded_weights(job, progress)
    else:
        noise = torch.stack([noise_direction(job, upload) for upload in job.uploads])
    prototypes = torch.stack([_prototypes(job, upload).double() for upload in job.uploads]).mean(0).float()
    batch = torch.tensor(True) if config.bn == TEST_BATCH else None
    fused = Prototypes(prototypes, torch.tensor(weights), noise, batch)
    progress.report(1, 1)
    return Outcome(ensemble=EnsembleSpec.of(job, "prototypes", fused.state_dict()))


@torch.no_grad()
def noise_direction(job: Job, upload: Upload) -> Tensor:
    """Return the mean of ``e_k(n) / ||e_k(n)||`` over normal noise n [F], so that ``cos(e_k(x), .)`` is a mean too."""
    encoder = load_member(upload, job.builders).to(job.device)
    if job.config.bn == TEST_BATCH:
        forget_statistics([encoder])
    images = torch.randn(NOISE_IMAGES, *job.input_shape, generator=generator(job.seed, "fafi", "noise"))
    features = encoder.eval()(images.to(job.device))[:, job.num_classes :]
    return F.normalize(features, dim=1).mean(0).cpu()


def _prototypes(job: Job, upload: Upload) -> Tensor:
    """Return P_k [C, F]."""
    found = upload.read().get(KEY)
    if found is None or found.dim() != 2 or len(found) != job.num_classes:
        shape = "none" if found is None else f"one of shape {tuple(found.shape)}"
        raise OptionError(
            f"method 'fafi' needs that a model has a tensor {KEY!r} of shape ({job.num_classes}, features); the upload "
            f"of {upload.client} has {shape}"
        )
    return found


def plan(config: FafiConfig) -> Plan:
    """Return what a run involves: random draws if noise weighs the encoders, and a mark where test images do."""
    return Plan(random=config.fusion == "noise", mark=TRANSDUCTIVE if config.bn == TEST_BATCH else "")


METHOD = Method(
    name="fafi",
    title="FAFI",
    source="Zeng et al., ICML 2025",
    config=FafiConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE, Need.IMAGES}),
    kind="ensemble",
    uploads="prototypes",
    plan=plan,
)
