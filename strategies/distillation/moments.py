"""The mean and the deviation that generated images have per channel, where a generator standardises them.

FLBoost's generator ends in a normalisation, so its images have mean 0 and deviation 1 over a batch. In its published
code that is the models' input space. Where models take another space, images are moved into it: ``x s + m``. These
moments m and s are those of a named data set, or are estimated from models (:func:`estimate_moments`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.facts import PIXELS
from ..method import Job, Progress
from ..teacher.copies import build_module
from ..teacher.ensemble import load_member

MOMENTS = ("none", "models", *PIXELS)
NEIGHBOURS = 0.9  # guessed correlation of neighbouring pixels, and of a pixel's channels


@dataclass(frozen=True)
class ImageMoments:
    """The moments of images in the models' input space.

    Attributes:
        mean: m [ch, 1, 1].
        deviation: s [ch, 1, 1].
    """

    mean: Tensor
    deviation: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Move standardised images [B, ch, H, W] to these moments."""
        return images * self.deviation + self.mean

    @classmethod
    def of(cls, job: Job, named: str, progress: Progress) -> ImageMoments | None:
        """Return the moments for a job; None for "none".

        Args:
            named: One of :data:`MOMENTS`.

        Raises:
            OptionError: The data set has another number of channels, or no model shows its moments.
        """
        if named == "none":
            return None
        check_moments(job, named)
        if named == "models":
            found = estimate_moments((load_member(upload, job.builders) for upload in job.uploads), job.input_shape[0])
            assert found is not None  # noqa: S101  the check has looked at the same layers
            mean, deviation = found
            progress.record({
                "note": f"images get the mean {_shown(mean)} that models show, and a deviation of "
                f"{float(deviation):.2f}, which takes neighbouring pixels to be correlated by {NEIGHBOURS}"
            })  # fmt: skip
            deviation = deviation.expand_as(mean)
        else:
            (m, s), (centre, scale) = (
                map(torch.tensor, facts) for facts in (PIXELS[named], (job.normalization.mean, job.normalization.std))
            )
            mean, deviation = (m - centre) / scale, s / scale
        return cls(*(values.float().view(-1, 1, 1).to(job.device) for values in (mean, deviation)))


def check_moments(job: Job, named: str) -> None:
    """Refuse moments that no model shows, or of a data set with another number of channels than the job's images.

    Args:
        job: Its builders and input space; uploads may be missing.
        named: One of :data:`MOMENTS`.

    Raises:
        OptionError: Names the possible values.
    """
    names = sorted({upload.architecture for upload in job.uploads} or job.builders)
    if (
        named == "models"
        and estimate_moments((build_module(job.builders[name]) for name in names), job.input_shape[0]) is None
    ):
        raise OptionError(
            "setting 'flboost.moments' is 'models', and no client's model begins with a convolution without bias and "
            "a batch normalisation: must be 'none', or the name of a data set"
        )
    if named in PIXELS and len(PIXELS[named][0]) != job.input_shape[0]:
        fitting = [name for name, (mean, _) in PIXELS.items() if len(mean) == job.input_shape[0]]
        raise OptionError(
            f"setting 'flboost.moments' is {named!r}, and the examples' shape is {tuple(job.input_shape)}: must be "
            f"one of none, models, {', '.join(fitting)}"
        )


@torch.no_grad()
def estimate_moments(models: Iterable[nn.Module], channels: int) -> tuple[Tensor, Tensor] | None:
    """Return the mean [ch] and one deviation of the images that models were trained on, in their input space.

    A convolution without bias, then a batch normalisation: its running mean is ``sum_c (sum_uv W_ocuv) m_c`` up to the
    padding, linear in the mean m. Least squares over outputs o and models give m. Its running variance is
    ``s^2 w_o^T R w_o`` for one deviation s, if R holds the correlations of the pixels in a patch. These are unknown.
    Here they fall by the factor :data:`NEIGHBOURS` per step aside or down, and between channels.

    Args:
        channels: ch.

    Returns:
        None where no model has such a beginning.
    """
    sums, means, spreads, variances = [], [], [], []
    for model in models:
        layers = [layer for layer in model.modules() if not list(layer.children())]
        conv, norm = next((pair for pair in pairwise(layers) if isinstance(pair[0], nn.Conv2d)), (None, None))
        if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d) or conv.bias is not None:
            continue
        if norm.running_mean is None or norm.running_var is None or conv.weight.shape[1] != channels:
            continue
        weight = conv.weight.double()
        sums.append(weight.sum((2, 3)))
        means.append(norm.running_mean.double())
        spreads.append(torch.einsum("ocuv,cd,up,vq,odpq->o", weight, *_correlations(weight), weight))
        variances.append(norm.running_var.double())
    if not sums:
        return None
    mean = torch.linalg.lstsq(torch.cat(sums), torch.cat(means)[:, None]).solution[:, 0]
    spread, variance = torch.cat(spreads), torch.cat(variances)
    return mean, (spread @ variance / (spread @ spread)).sqrt()


def _correlations(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the guessed correlations of channels [ch, ch], of rows [u, u] and of columns [v, v] of a patch."""
    _, channels, height, width = weight.shape
    between = torch.full((channels, channels), NEIGHBOURS, dtype=weight.dtype).fill_diagonal_(1.0)
    steps = [torch.arange(side, dtype=weight.dtype) for side in (height, width)]
    rows, columns = (NEIGHBOURS ** (step[:, None] - step).abs() for step in steps)
    return between, rows, columns


def _shown(values: Tensor) -> str:
    return ", ".join(f"{value:.2f}" for value in values.tolist())
