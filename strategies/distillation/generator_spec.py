"""A generator that the server shares with its clients, and its description in a request's config.

FedGen (:mod:`strategies.methods.fed_gen`) sends its generator's weights as the array record ``generator``. The config
entries that begin with ``generator-`` describe its architecture and its use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core import refusals
from .generators import ConditionalGenerator, FeatureGenerator

LEVELS = ("features", "images")
NOISES = ("normal", "uniform")
MOST = 2**16  # of any whole number that describes a generator
MOST_VALUES = 2**26  # of a batch: its examples, or layers, and what they are made from; 256 MiB


@dataclass(frozen=True)
class GeneratorSpec:
    """A request's description of the generator that comes with it.

    Attributes:
        level: ``"features"``: it makes inputs of the model's last linear layer; ``"images"``: inputs of the model.
        noise: ``"normal"``: N(0, 1); ``"uniform"``: U[0, 1).
        classes: C.
        shape: (channels, height, width) of its images.
        batch: b_g, the number of examples that it makes for the first term.
        weight: gamma_t, the weight of both terms, at least 0.
    """

    level: str
    noise: str
    latent: int
    classes: int
    width: int
    shape: tuple[int, int, int]
    batch: int
    weight: float
    epochs: int

    def as_config(self) -> dict[str, str | int | float]:
        """Return the description as entries of a request's config."""
        channels, height, width = self.shape
        return {
            "generator-level": self.level,
            "generator-noise": self.noise,
            "generator-latent": self.latent,
            "generator-classes": self.classes,
            "generator-width": self.width,
            "generator-image-channels": channels,
            "generator-image-height": height,
            "generator-image-width": width,
            "generator-batch": self.batch,
            "generator-weight": self.weight,
            "generator-epochs": self.epochs,
        }

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> GeneratorSpec:
        """Return the description in a request's config.

        Raises:
            UploadError: A key is missing, or its value out of range. Also: a batch would have more than
                :data:`MOST_VALUES` values.
        """
        spec = cls(
            level=_word(said, "generator-level", LEVELS),
            noise=_word(said, "generator-noise", NOISES),
            latent=_whole(said, "generator-latent"),
            classes=_whole(said, "generator-classes"),
            width=_whole(said, "generator-width"),
            shape=(
                _whole(said, "generator-image-channels"),
                _whole(said, "generator-image-height"),
                _whole(said, "generator-image-width"),
            ),
            batch=_whole(said, "generator-batch"),
            weight=_weight(said, "generator-weight"),
            epochs=_whole(said, "generator-epochs"),
        )
        made = math.prod(spec.shape) if spec.level == "images" else spec.width
        values = spec.batch * (spec.latent + spec.classes + made)
        if values > MOST_VALUES:
            raise refusals.bad_request(
                "generator-batch", spec.batch, f"small enough for {MOST_VALUES} values in all, not {values}"
            )
        return spec

    def build(self, features: int) -> nn.Module:
        """Return an untrained generator (noise [B, Z], labels [B]) -> inputs of the model, or of its last layer.

        Args:
            features: Inputs of the model's last linear layer; unused at the level of images.

        Raises:
            OptionError: No generator makes images of this shape.
        """
        if self.level == "images":
            return ConditionalGenerator(self.latent, self.classes, self.shape)
        return FeatureGenerator(self.latent, self.classes, features, self.width)


def draw_noise(noise: str, count: int, latent: int, rng: torch.Generator) -> Tensor:
    """Return noise [count, latent]: N(0, 1) for ``"normal"``, U[0, 1) for ``"uniform"``."""
    draw = torch.randn if noise == "normal" else torch.rand
    return draw(count, latent, generator=rng)


def _word(said: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str:
    if said.get(key) not in allowed:
        raise refusals.bad_request(key, said.get(key), f"one of {', '.join(allowed)}")
    return str(said[key])


def _whole(said: Mapping[str, Any], key: str) -> int:
    value = said.get(key)
    if type(value) is not int or not 1 <= value <= MOST:
        raise refusals.bad_request(key, value, f"a whole number from 1 to {MOST}")
    return value


def _weight(said: Mapping[str, Any], key: str) -> float:
    value = said.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise refusals.bad_request(key, value, "a finite number at least 0")
    return float(value)
