"""A frozen backbone as one feature function: from a data set's pixels to features of norm 1, with its fingerprint."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.fingerprint import packed
from strategies.core.seeds import seeded_torch
from strategies.statistics.privacy import normalised
from strategies.statistics.sums import projection
from strategies.statistics.uploaded import FeatureSums

from .backbones import Backbone, backbone_of
from .features_config import FeaturesConfig
from .fingerprints import noise_image, probed, weights_digest
from .fused import fused

# More images a pass are up to twice as slow on a CPU above 64 pixels a side, because the maps leave its cache.
BATCH = 16


@dataclass(frozen=True)
class FeatureFunction:
    """The feature function of a run, a value: its module is built once per process.

    Attributes:
        config: The settings.
        seed: Of the run; draws the projection.
        mean: Of the data set's normalisation, per channel.
        std: Of the data set's normalisation, per channel.
    """

    config: FeaturesConfig = field(default_factory=FeaturesConfig)
    seed: int = 0
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    @property
    def backbone(self) -> Backbone:
        """The backbone by its name.

        Raises:
            OptionError: It is unknown or not installed, or a setting does not fit it.
        """
        found = backbone_of(self.config.backbone, self.config.weights, self.config.weights_sha256)
        if (self.config.side or found.side) % found.multiple:
            raise OptionError(
                f"setting 'features.side' is {self.config.side}: must be a multiple of {found.multiple} for "
                f"{self.config.backbone!r}"
            )
        if self.config.dim > found.features:
            raise OptionError(f"setting 'features.dim' is {self.config.dim}: must be at most {found.features}")
        return found

    @property
    def side(self) -> int:
        """Height and width of the backbone's input."""
        return self.config.side or self.backbone.side

    @property
    def features(self) -> int:
        """The number of features after the projection, d."""
        return self.config.dim or self.backbone.features

    @property
    def module(self) -> Extractor:
        """The frozen module, in eval mode."""
        return _extractor(self)

    @property
    def fields(self) -> dict[str, Any]:
        """The names and values of which the fingerprint consists."""
        kept = self.config.dim
        return {**_raw(self), "dim": kept, **({"dim-seed": self.seed} if kept else {}), "norm": 1}

    @property
    def raw(self) -> str:
        """The fields before projection and normalisation, which name the backbone's own features in a cache."""
        return json.dumps(_raw(self))

    @property
    def fingerprint(self) -> torch.Tensor:
        """The fields as they travel, uint8 [1024]."""
        return packed(self.fields)

    @property
    def probe(self) -> torch.Tensor:
        """Features of one fixed input, float32 [16]."""
        return _probe(self)

    @property
    def non_negative(self) -> bool:
        """Whether no feature is negative."""
        return self.backbone.non_negative and not self.config.dim

    def sums(self, num_classes: int, noise: float = 0.0, method: str = "ridge") -> FeatureSums:
        """Return an empty upload of this function's sums.

        Args:
            num_classes: C.
            noise: What a budget demands of them.
            method: Of the run, which decides what second moments it needs.
        """
        return FeatureSums(
            num_classes,
            self.features,
            self.fingerprint,
            self.probe,
            non_negative=self.non_negative,
            noise=noise,
            second=self.config.second(method),
        )


class Extractor(nn.Module):
    """From a model's input, normalised as the data set says, to features of norm 1 in float64.

    Grey images are repeated to three channels. Images are resized bilinearly without antialiasing, in float32.
    """

    def __init__(self, function: FeatureFunction, net: nn.Module) -> None:
        super().__init__()
        backbone = function.backbone
        self._side, self.net = function.side, net.requires_grad_(False)
        shift, scale, mean, std = (
            torch.tensor(numbers).view(1, -1, 1, 1)
            for numbers in (function.mean, function.std, backbone.mean, backbone.std)
        )
        self._constants = shift, scale, mean, std
        kept = function.config.dim
        self._projection = projection(backbone.features, kept, function.seed) if kept else None
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [B, 1 or 3, H, W] to features [B, d]."""
        return self.finished(self.pooled(images))

    @torch.no_grad()
    def pooled(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [B, 1 or 3, H, W] to the backbone's own features, in float32."""
        return torch.cat([self._batch(batch) for batch in torch.split(images, BATCH)])

    def finished(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map the backbone's features to those of the function: projected, of norm 1, in float64."""
        precise = pooled.double()
        return normalised(precise if self._projection is None else precise @ self._projection)

    def _batch(self, images: torch.Tensor) -> torch.Tensor:
        shift, scale, mean, std = self._constants
        pixels = (images * scale + shift).clamp(0, 1).expand(-1, 3, -1, -1)
        if pixels.shape[-2:] != (self._side, self._side):
            pixels = F.interpolate(pixels, size=(self._side, self._side), mode="bilinear", antialias=False)
        prepared = ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)
        found: torch.Tensor = self.net(prepared)
        return found


class FeatureHead(nn.Module):
    """A linear head on a feature function; the frozen backbone is no part of its weights."""

    def __init__(self, function: FeatureFunction, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(function.features, num_classes)
        self.function = function

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images, normalised as the data set says [B, ch, H, W], to logits [B, C]."""
        features = self.function.module(images.cpu()).to(self.head.weight)
        logits: torch.Tensor = self.head(features)
        return logits


def head_of(function: FeatureFunction, num_classes: int) -> nn.Module:
    """Return an untrained :class:`FeatureHead`."""
    return FeatureHead(function, num_classes)


@functools.lru_cache(maxsize=4)
def _extractor(function: FeatureFunction) -> Extractor:
    with seeded_torch(0, "backbone"):
        net = function.backbone.build()
    return Extractor(function, fused(net.eval()).to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def _raw(function: FeatureFunction) -> dict[str, Any]:
    backbone = function.backbone
    return {
        "format": 1,
        "backbone": backbone.name,
        "weights": weights_digest(backbone),
        "side": function.side,
        "resize": "bilinear, no antialias",
        "channels": "grey repeated",
        "mean": list(backbone.mean),
        "std": list(backbone.std),
        "precision": "float32",
    }


@functools.lru_cache(maxsize=4)
def _probe(function: FeatureFunction) -> torch.Tensor:
    return probed(function.module, noise_image(function.mean, function.std))
