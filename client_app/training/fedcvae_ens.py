"""Local training of FedCVAE-Ens: a conditional variational autoencoder, whose decoder the client uploads.

Paper: Heinbaugh, Luz-Ricca, Shao, Data-Free One-Shot Federated Learning Under Very High Statistical Heterogeneity, ICLR
    2023, https://openreview.net/forum?id=_hb4vM3jspB; in the setting of FENS (Allouah et al., NeurIPS 2024).
Symbols: beta -> KL_WEIGHT; z ~ N(mu, sigma^2) -> the noise that Cvae.forward shifts and scales; b -> the batch.
Where: the reconstruction error -> reconstruction; KL(N(mu, sigma^2) || N(0, 1)) -> divergence.
Deviations: none known. Images are pixels in [0, 1], not normalised, because the error compares them with a sigmoid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from client_app.training.local import Epoch, Training, minimise
from fl_app.data import augment
from fl_app.data.preprocessing import unit_pixels
from strategies.core.errors import DataError
from strategies.core.seeds import generator

KL_WEIGHT = 1.0  # the plain evidence lower bound, as published


def train(model: nn.Module, training: Training) -> Epoch:
    """Train a CVAE in place; see :func:`client_app.training.local.train`.

    Args:
        model: A :class:`fl_app.models.client_nets.Cvae`.
        training: At least 2 images; its normalisation is not used.

    Returns:
        The last epoch; its accuracy is NaN, because a CVAE predicts no labels.

    Raises:
        DataError: No batch has two images, which batch normalisation needs, or float images are outside [0, 1].
    """
    data, config = training.data, training.config
    if min(len(data.labels), config.batch_size) < 2:
        raise DataError(
            f"a CVAE cannot be trained on {len(data.labels)} examples in batches of {config.batch_size}: both must be "
            "at least 2"
        )
    rng = generator(training.seed, "latent")

    def objective(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(len(images), config.latent, generator=rng)
        logits, mean, log_variance = model(images, labels, noise)
        loss = reconstruction(logits, images) + KL_WEIGHT * divergence(mean, log_variance)
        return loss, torch.tensor(float("nan"))

    def prepare(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        return unit_pixels(augment(images, training.augmentation, rng))

    return minimise(model, training, objective, prepare)


def reconstruction(logits: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Return the error of decoded images, summed over pixels and averaged over the batch, a scalar.

    It is the binary cross-entropy of the pixels for grey images, and the squared error for coloured ones.

    Args:
        logits: Of the decoded pixels [B, ch, H, W].
        images: Pixels in [0, 1] [B, ch, H, W].
    """
    if images.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(images)
    return F.mse_loss(logits.sigmoid(), images, reduction="sum") / len(images)


def divergence(mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """Return ``KL(N(mu, sigma^2) || N(0, 1)) = -1/2 sum_j (1 + log sigma_j^2 - mu_j^2 - sigma_j^2)``, batch mean.

    Args:
        mean: mu [B, d].
        log_variance: log sigma^2 [B, d].

    Returns:
        A scalar, at least zero.
    """
    return -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
