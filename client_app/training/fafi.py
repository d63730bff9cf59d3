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

from client_app.training.local import Epoch, Training, hits, minimise
from client_app.training.losses import loss_of
from fl_app.data.preprocessing import RATIO, enlarged, uniform, unit_pixels

if TYPE_CHECKING:
    from fl_app.models.client_nets import PrototypeNet


# Views of images for contrastive learning: a part enlarged, mirrored, with other colours or none.
#
# FAFI (Zeng et al., ICML 2025) draws two for every image. A view is a part of 20 to 100 % of the area, mirrored or not.
# With chance 0.8 brightness, contrast and saturation change by up to 40 %, and the hue by a tenth of the circle. With
# chance 0.2 the view is grey. The published code draws once for a whole batch.
#
# Deviations: crops begin and end between pixels. The order of the four changes of colour is drawn once for a batch.
# Images of one channel have no saturation and no hue.


AREA = (0.2, 1.0)
STRENGTH, HUE = 0.4, 0.1
JITTERED, GREYED = 0.8, 0.2  # chances
GREY = (0.2989, 0.587, 0.114)  # weights of red, green and blue


def view(images: torch.Tensor, rng: torch.Generator, *, flips: bool, each: bool = True) -> torch.Tensor:
    """Return one view of every image.

    Args:
        images: Pixels in [0, 1], [B, ch, H, W] with 1 or 3 channels; left unchanged.
        flips: Whether half of the views are mirrored.
        each: Draw for each image; otherwise once for all.

    Returns:
        [B, ch, H, W], in [0, 1].
    """
    count = len(images) if each else 1
    seen = enlarged(images, AREA, RATIO, rng, draws=count)
    if flips:
        seen = torch.where(_chance(0.5, count, rng), seen.flip(3), seen)
    seen = torch.where(_chance(JITTERED, count, rng), jitter(seen, count, rng), seen)
    if images.shape[1] == 3:
        seen = torch.where(_chance(GREYED, count, rng), grey(seen).expand_as(seen), seen)
    return seen


def jitter(images: torch.Tensor, count: int, rng: torch.Generator) -> torch.Tensor:
    """Change colours by amounts that are drawn ``count`` times, 1 or B, in an order that is drawn once."""
    changes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        brighten,
        change_contrast,
        saturate,
        rotate_hue,
    ]
    changes = changes if images.shape[1] == 3 else changes[:2]
    for number in torch.randperm(len(changes), generator=rng).tolist():
        low, high = (-HUE, HUE) if changes[number] is rotate_hue else (1 - STRENGTH, 1 + STRENGTH)
        images = changes[number](images, uniform((count, 1, 1, 1), low, high, rng))
    return images


def brighten(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return images [B, ch, H, W] times factors [B or 1, 1, 1, 1], in [0, 1]."""
    return (images * factor).clamp(0, 1)


def change_contrast(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Move every pixel away from its image's mean grey, or towards it."""
    mean = grey(images).mean((1, 2, 3), keepdim=True)
    return (mean + factor * (images - mean)).clamp(0, 1)


def saturate(images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Move every pixel of images [B, 3, H, W] away from its grey, or towards it."""
    pale = grey(images)
    return (pale + factor * (images - pale)).clamp(0, 1)


def rotate_hue(images: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Turn the hue of images [B, 3, H, W] by shares of the circle [B or 1, 1, 1, 1]; value and saturation stay.

    A hue h in sixths of the circle has channels ``max - spread * clamp(min(k, 4 - k), 0, 1)``, ``k = (n + h) mod 6``
    with n = 5, 3, 1.
    """
    red, green, blue = images.unbind(1)
    high, low = images.amax(1), images.amin(1)
    spread = high - low
    safe = torch.where(spread > 0, spread, torch.ones_like(spread))
    # The channel that is the largest decides the third of the circle.
    by_blue = torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixth = torch.where(high == red, (green - blue) / safe, by_blue) + 6 * shift[:, 0]
    offsets = torch.tensor([5.0, 3.0, 1.0]).view(3, 1, 1)
    k = (offsets + sixth[:, None]) % 6
    return high[:, None] - spread[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)


def grey(images: torch.Tensor) -> torch.Tensor:
    """Return the grey values [B, 1, H, W] of images [B, ch, H, W]."""
    if images.shape[1] == 1:
        return images
    return (images * torch.tensor(GREY).view(3, 1, 1)).sum(1, keepdim=True)


def _chance(share: float, count: int, rng: torch.Generator) -> torch.Tensor:
    return torch.rand((count, 1, 1, 1), generator=rng) < share


TEMPERATURE = 0.07


def train(model: PrototypeNet, training: Training) -> Epoch:
    """Train an encoder and prototypes in place; see :func:`client_app.training.local.train`.

    Args:
        model: Maps images to logits ``v P^T`` and features.
        training: An augmentation that mirrors has mirrored views; other parts of it are not used.

    Returns:
        The last epoch; its accuracy is that of the first views.

    Raises:
        DataError: Float images have values outside [0, 1].
    """
    config = training.config
    criterion, classes = loss_of(config, training.data.labels), len(model.prototypes)
    flips = training.augmentation.endswith("flip")
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in training.normalization)

    def objective(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(inputs)
        logits, directions, both = outputs[:, :classes], F.normalize(outputs[:, classes:], dim=1), labels.repeat(2)
        loss = 2 * criterion(logits, both) + supervised_contrast(directions, both, TEMPERATURE)
        return loss + prototypes_apart(model.prototypes), hits(logits[: len(labels)], labels)

    def prepare(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        pixels = unit_pixels(images)
        views = [view(pixels, rng, flips=flips, each=config.views == "image") for _ in range(2)]
        return (torch.cat(views) - mean) / deviation

    return minimise(model, training, objective, prepare)


def supervised_contrast(directions: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the mean over anchors i of ``-(1/|J(i)|) sum_{j in J(i)} log sm_{a != i}(v_i . v_a / t)_j``.

    Khosla et al., *Supervised Contrastive Learning*, NeurIPS 2020, its outer form; J(i) are the others of i's class.

    Args:
        directions: v, unit vectors [N, F].
        labels: [N]; each class that occurs has at least two.
        temperature: t.
    """
    self = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    shares = (directions @ directions.T / temperature).masked_fill(self, -torch.inf).log_softmax(1)
    positives = (labels[:, None] == labels) & ~self
    return -(shares.masked_fill(~positives, 0.0).sum(1) / positives.sum(1)).mean()


def prototypes_apart(prototypes: torch.Tensor) -> torch.Tensor:
    """Return ``(1/C) sum_c -log sm(P P^T)[c, c]``, a scalar, for prototypes P [C, F]."""
    return F.cross_entropy(prototypes @ prototypes.T, torch.arange(len(prototypes)))
