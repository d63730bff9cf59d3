"""Heads on one frozen backbone in the space of its features, and noise features in place of noise images.

A head that was trained from a common start has moved by a sum of its own examples' features. So the clients' rows, less
their mean over the classes, span the directions in which heads differ, and real features vary there. Noise features are
Gaussian sums of these rows, of norm 1. Isotropic noise hardly touches those directions: all heads answer it alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.facts import holds_images, is_head
from ..core.seeds import seeded_torch
from ..method import Normalization
from .noise import AT_ONCE, noise_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..method import Job, ModelBuilder, Observer, State, Upload

WEIGHT = "head.weight"
BASIS = 512  # rows of the clients' heads that noise is made of, drawn where there are more


def to_feature_space(job: Job) -> Job:
    """Return the job in the space of features, where every upload and the student are heads on one frozen backbone.

    Its inputs are features times sqrt(d), [B, d, 1, 1], whose entries have a size near 1. Its weights are divided by
    sqrt(d). Any other job, and one with shards, is returned as it is.

    Args:
        job: With its uploads.
    """
    if job.shards is not None or not is_head(job.student) or {u.architecture for u in job.uploads} != {job.student}:
        return job
    with seeded_torch(job.seed, "features"):
        model: Any = job.builders[job.student]()
    width = int(model.state_dict()[WEIGHT].shape[1])
    return replace(
        job,
        uploads=tuple(replace(one, read=partial(_read, one, 1 / math.sqrt(width))) for one in job.uploads),
        builders={job.student: partial(_alone, job.builders[job.student])},
        input_shape=(width, 1, 1),
        normalization=Normalization((0.0,), (1.0,)),
        start=None if job.start is None else scale_head(job.start, 1 / math.sqrt(width)),
        observer=None if job.observer is None else partial(_observed, job.builders[job.student], job.observer),
    )


def generate_noise(job: Job, count: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield noise for a job's models in batches: images in [0, 1], or features of the form of :func:`to_feature_space`.

    Args:
        job: Its uploads are heads where its inputs are features.
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


def _observed(builder: ModelBuilder, observer: Observer, epoch: int, model: nn.Module) -> Mapping[str, float]:
    """Show the observer of a job the head on images that a head on features stands for."""
    whole = builder()
    whole.load_state_dict(to_image_space(model.state_dict()))
    return observer(epoch, whole.eval())
