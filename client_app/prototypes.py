"""Local training of FAFI: an encoder and a prototype per class, drawn together by two views of every image.

Paper: Zeng, Huang, Zhou, Wu, Wan, Chen, Cai, Does One-shot Give the Best Shot? Mitigating Model Inconsistency in
    One-shot Federated Learning, ICML 2025, https://openreview.net/forum?id=2XvF67vbCK. Read version: the abstract, and
    a summary of the repository https://github.com/zenghui9977/FAFI_ICML25 at 26cf90e.
Symbols: v = e(x) / ||e(x)|| -> directions; P -> prototypes [C, F]; b -> images of a batch, which has 2b views.
Where: L = 2 CE(v P^T, y) + SupCon(v) + the prototypes' term -> train; SupCon -> supervised_contrast.
Deviations: the code has the first term twice, under two names; here it is one term, doubled. Views are drawn for each
    image (client.views); in the code once for a batch. Views are mirrored where the data set's augmentation mirrors. In
    the code a client with fewer images than a batch never trains; here its batch has all its images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from client_app.local_training import Epoch, hits, minimise
from client_app.losses import loss_of
from client_app.views import view
from fl_app.data import ImageData, Normalization
from fl_app.data.preprocessing import unit_pixels

if TYPE_CHECKING:
    from fl_app.config import ClientConfig
    from fl_app.models.prototypes import PrototypeNet

TEMPERATURE = 0.07


def train(
    model: PrototypeNet,
    data: ImageData,
    config: ClientConfig,
    *,
    normalization: Normalization,
    augmentation: str,
    seed: int,
    report: Callable[[Epoch], None] | None = None,
) -> Epoch:
    """Train an encoder and prototypes in place; see :func:`client_app.local_training.train`.

    Args:
        model: Maps images to logits ``v P^T`` and features.
        data: Images [N, ch, H, W], uint8 or float32 in [0, 1], with labels [N].
        config: Epochs, batch size, optimiser, loss of the labels, and how views are drawn.
        normalization: The model's input space.
        augmentation: A key of :data:`fl_app.data.AUGMENTATIONS`; one that mirrors has mirrored views.
        seed: Fixes the order of the images, their views, and dropout.
        report: Called after every epoch.

    Returns:
        The last epoch; its accuracy is that of the first views.

    Raises:
        DataError: Float images have values outside [0, 1].
    """
    criterion, classes = loss_of(config, data.labels), len(model.prototypes)
    flips = augmentation.endswith("flip")
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in normalization)

    def objective(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(inputs)
        logits, directions, both = outputs[:, :classes], F.normalize(outputs[:, classes:], dim=1), labels.repeat(2)
        loss = 2 * criterion(logits, both) + supervised_contrast(directions, both, TEMPERATURE)
        return loss + prototypes_apart(model.prototypes), hits(logits[: len(labels)], labels)

    def prepare(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        pixels = unit_pixels(images)
        views = [view(pixels, rng, flips=flips, each=config.views == "image") for _ in range(2)]
        return (torch.cat(views) - mean) / deviation

    return minimise(model, data, config, objective=objective, prepare=prepare, seed=seed, report=report)


def supervised_contrast(directions: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the mean over anchors i of ``-(1/|J(i)|) sum_{j in J(i)} log sm_{a != i}(v_i . v_a / t)_j``.

    Khosla et al., *Supervised Contrastive Learning*, NeurIPS 2020, its outer form; J(i) are the others of i's class.

    Args:
        directions: v, unit vectors [N, F].
        labels: [N]; each class that occurs has at least two.
        temperature: t.

    Returns:
        A scalar.
    """
    self = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    shares = (directions @ directions.T / temperature).masked_fill(self, -torch.inf).log_softmax(1)
    positives = (labels[:, None] == labels) & ~self
    return -(shares.masked_fill(~positives, 0.0).sum(1) / positives.sum(1)).mean()


def prototypes_apart(prototypes: torch.Tensor) -> torch.Tensor:
    """Return ``(1/C) sum_c -log sm(P P^T)[c, c]``, a scalar, for prototypes P [C, F]."""
    return F.cross_entropy(prototypes @ prototypes.T, torch.arange(len(prototypes)))
