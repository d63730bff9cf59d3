"""Noise images: smooth random fields with the spectra of natural images.

The amplitude of natural images falls with spatial frequency f about as ``f^-1``. Here the exponent is drawn for every
image, from nearly white noise to a few large blobs.

Source: Field, *Relations between the statistics of natural images and the response properties of cortical cells*, JOSA
A 1987.

Fields lack objects with edges that occlude one another, as in the dead-leaves model of natural images (Lee, Mumford and
Huang, *Occlusion models for natural images*, IJCV 2001). Networks learn more from such images than from spectra alone
(Baradad et al., *Learning to see by looking at noise*, NeurIPS 2021). :func:`overlay_shapes` adds such shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.facts import holds_images, is_head
from ..core.seeds import build_module
from ..method import Job, ModelBuilder, Normalization, Observer, State, Upload

EXPONENTS = (0.5, 3.0)  # drawn uniformly between them
# Images whose spectra are in memory together: AT_ONCE of up to 3 x 32 x 32 values each, fewer larger ones.
AT_ONCE = 1024
VALUES_AT_ONCE = AT_ONCE * 3 * 32 * 32
# A shape covers the pixels where a field, with an exponent between these two, exceeds LEVEL + SPREAD |normal|.
OUTLINES = (1.5, 3.5)
LEVEL = 0.3
SPREAD = 0.7
COVERED = 0.7  # share of images that get a layer's shapes
PLAIN = 0.5  # share of these images whose shapes have one colour

Shape = tuple[int, int, int]


def noise_batches(count: int, shape: Shape, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield random fields as pixels in [0, 1], in batches [b, ch, H, W], so that memory need not hold all of them.

    ``pixel = (1 + tanh(gain (field + offset))) / 2``: brightness and contrast differ from image to image. The channels
    of a colour image share a part of their field; the size of this part differs from image to image.

    Args:
        count: At least 1.
        shape: (channels, height, width).
        rng: A CPU generator, so that the images do not depend on the device.
    """
    most = max(1, min(AT_ONCE, VALUES_AT_ONCE // math.prod(shape)))
    for first in range(0, count, most):
        yield _batch(min(most, count - first), shape, rng)


def overlay_shapes(images: Tensor, layers: int, rng: torch.Generator) -> Tensor:
    """Return images with shapes laid over them in layers, each shape a part of another image or of one colour.

    In a layer seven of ten images get shapes: the regions where a smooth random field is high, less than half of the
    image. One such image in two shows a random image of the batch there, without shapes; the others show one random
    colour.

    Args:
        images: Pixels [B, ch, H, W] in [0, 1]; not changed.
        layers: At least 0.
        rng: A CPU generator.
    """
    count, channels, height, width = images.shape
    low, high = OUTLINES

    def uniform(values: int = 1) -> Tensor:
        return torch.rand(count, values, 1, 1, generator=rng)

    over = images
    for _ in range(layers):
        exponent = low + (high - low) * uniform().flatten()
        field = random_fields(count, 1, exponent, (height, width), rng)
        shape = field > LEVEL + SPREAD * torch.randn(count, 1, 1, 1, generator=rng).abs()
        others = images[torch.randperm(count, generator=rng)]
        filling = torch.where(uniform() < PLAIN, uniform(channels), others)
        over = torch.where(shape & (uniform() < COVERED), filling, over)
    return over


def random_fields(count: int, channels: int, exponent: Tensor, size: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Return Gaussian fields [count, channels, H, W] whose amplitude falls as ``f^-b``, each of mean 0 and variance 1.

    Args:
        count: Images.
        exponent: b of every image [count].
        size: (H, W), not both 1.
        rng: A CPU generator.
    """
    height, width = size
    white = torch.randn(count, channels, height, width, generator=rng)
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None, :])
    frequency[0, 0] = torch.inf  # fields have no constant component
    spectrum = torch.fft.rfft2(white) * frequency ** -exponent.view(-1, 1, 1, 1)
    fields: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    return fields / fields.std((2, 3), keepdim=True, correction=0).clamp_min(1e-12)


def _batch(count: int, shape: Shape, rng: torch.Generator) -> Tensor:
    channels, *size = shape
    low, high = EXPONENTS
    exponent = low + (high - low) * torch.rand(count, generator=rng)
    common = random_fields(count, 1, exponent, (size[0], size[1]), rng)

    def normal(values: int = 1) -> Tensor:
        return torch.randn(count, values, 1, 1, generator=rng)

    if channels == 1:
        inputs = torch.exp(0.5 + 0.7 * normal()) * (common + normal())
    else:
        own = random_fields(count, channels, exponent, (size[0], size[1]), rng)
        shared = torch.rand(count, 1, 1, 1, generator=rng)
        field = shared.sqrt() * common + (1 - shared).sqrt() * own
        inputs = torch.exp(0.6 * normal()) * (0.6 * field + 0.5 * normal() + 0.3 * normal(channels))
    return (torch.tanh(inputs) + 1) / 2


# Heads on one frozen backbone in the space of its features, and noise features in place of noise images.
#
# A head that was trained from a common start has moved by a sum of its own examples' features. So the clients' rows,
# less their mean over the classes, span the directions in which heads differ, and real features vary there. Noise
# features are Gaussian sums of these rows, of norm 1. Isotropic noise hardly touches those directions: all heads
# answer it alike.

WEIGHT = "head.weight"
BASIS = 512  # rows of the clients' heads that noise is made of, drawn where there are more


def to_feature_space(job: Job) -> Job:
    """Return the job in the space of features, where every upload and the student are heads on one frozen backbone.

    Its inputs are features times sqrt(d), [B, d, 1, 1], whose entries have a size near 1. Its weights are divided by
    sqrt(d). Any other job, and one with shards, is returned as it is.
    """
    if job.shards is not None or not is_head(job.student) or {u.architecture for u in job.uploads} != {job.student}:
        return job
    width = int(build_module(job.builders[job.student]).state_dict()[WEIGHT].shape[1])
    return replace(
        job,
        uploads=tuple(replace(one, read=partial(_read, one, 1 / math.sqrt(width))) for one in job.uploads),
        builders={job.student: partial(_alone, job.builders[job.student])},
        input_shape=(width, 1, 1),
        normalization=Normalization((0.0,), (1.0,)),
        start=None if job.start is None else scale_head(job.start, 1 / math.sqrt(width)),
        observer=None if job.observer is None else partial(_observe_on_images, job.builders[job.student], job.observer),
    )


def generate_noise(job: Job, count: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield noise for a job's models in batches: images in [0, 1], or features of the form of :func:`to_feature_space`.

    Args:
        count: At least 1.
        rng: A CPU generator.
    """
    if holds_images(job.input_shape):
        yield from noise_batches(count, job.input_shape, rng)
        return
    rows = _spanning([upload.read()[WEIGHT] for upload in job.uploads], rng)
    size = math.sqrt(rows.shape[1])
    for first in range(0, count, AT_ONCE):
        drawn = torch.randn(min(AT_ONCE, count - first), len(rows), generator=rng) @ rows
        yield (size * functional.normalize(drawn, dim=1))[:, :, None, None]


def _spanning(heads: list[Tensor], rng: torch.Generator) -> Tensor:
    """Return at most :data:`BASIS` rows of norm 1 [R, d], less the mean over the classes of their head."""
    rows = torch.cat([head.float() - head.float().mean(0) for head in heads])
    rows = rows[rows.isfinite().all(1) & (rows.norm(dim=1) > 0)]
    if not len(rows):  # heads that tell their classes apart by no feature
        return torch.eye(heads[0].shape[1])
    chosen = torch.randperm(len(rows), generator=rng)[:BASIS].sort().values
    return functional.normalize(rows[chosen], dim=1)


def scale_head(state: Mapping[str, Tensor], factor: float) -> State:
    """Return a head's weights, its rows times a factor."""
    return {key: value * factor if key == WEIGHT else value for key, value in state.items()}


def to_image_space(state: Mapping[str, Tensor]) -> State:
    """Return the weights of a head of a job that :func:`to_feature_space` made, as its head on images has them."""
    return scale_head(state, math.sqrt(state[WEIGHT].shape[1]))


def _read(upload: Upload, factor: float) -> State:
    return scale_head(upload.read(), factor)


def _alone(builder: ModelBuilder) -> nn.Module:
    head: Any = builder()
    alone: nn.Module = head.on_features()
    with torch.no_grad():
        alone.get_parameter(WEIGHT).div_(math.sqrt(alone.get_parameter(WEIGHT).shape[1]))
    return alone


def _observe_on_images(builder: ModelBuilder, observer: Observer, epoch: int, model: nn.Module) -> Mapping[str, float]:
    """Show the observer of a job the head on images that a head on features stands for."""
    whole = builder()
    whole.load_state_dict(to_image_space(model.state_dict()))
    return observer(epoch, whole.eval())
