"""The parts of a feature function's fingerprint, and its features of one fixed input."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from strategies.core.fingerprint import PROBE
from strategies.core.seeds import derive_seed, seeded_torch
from strategies.statistics.sums import projection

from .backbones import Backbone

NOISE_SIDE = 32  # pixels of the probe's image, a side
TEXT = "Zwölf Boxkämpfer jagen Viktor: 42 quick brown foxes (0.5 %) jump over the lazy dog's bed -- don't they?"


@functools.lru_cache(maxsize=4)
def weights_digest(backbone: Backbone) -> str:
    """Return the sha256 of a backbone's weights as they are read, before any of them is folded."""
    with seeded_torch(0, "backbone"):
        state = backbone.build().state_dict()
    digest = hashlib.sha256()
    for key in sorted(key for key in state if not key.endswith("num_batches_tracked")):
        value = state[key].detach().contiguous()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode() + value.numpy().tobytes())
    return digest.hexdigest()


def noise_image(mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return one seeded image of noise, normalised as a data set says [1, ch, 32, 32]."""
    draws = np.random.Generator(np.random.PCG64(derive_seed(0, "features", "probe")))
    pixels = torch.from_numpy(draws.random((1, len(mean), NOISE_SIDE, NOISE_SIDE), dtype=np.float32))
    shift, scale = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (mean, std))
    return (pixels - shift) / scale


def probed(function: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> torch.Tensor:
    """Return 16 numbers of the features of one example, float32 [16].

    They are the features' coordinates in 16 fixed orthonormal directions, so that every feature counts. A function of
    fewer than 16 features has zeros at the end.
    """
    features = function(example)
    numbers = features @ projection(features.shape[1], min(PROBE, features.shape[1]), 0)
    found = torch.zeros(PROBE)
    found[: numbers.shape[1]] = numbers[0].float()
    return found
