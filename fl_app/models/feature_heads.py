"""Linear heads on a frozen backbone: classifiers of images whose weights are those of the head alone.

A head's weights carry the fingerprint of its feature function, so that no other function's head can be loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from strategies.core.facts import STATISTICS, backbone_in, is_head, kind_of
from strategies.core.fingerprint import check_fingerprint

from .feature_memory import recalled
from .features import FeatureFunction


class HeadOnFeatures(nn.Module):
    """A linear head that takes features in place of images, with the weights of a :class:`FeatureHead`."""

    fingerprint: Tensor

    def __init__(self, function: FeatureFunction, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(function.features, num_classes)
        self.register_buffer("fingerprint", function.fingerprint.clone())

    def forward(self, features: Tensor) -> Tensor:
        """Map features of norm 1, [B, d] or [B, d, 1, 1], to logits [B, C]."""
        logits: Tensor = self.head(features.flatten(1))
        return logits

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Refuse the weights of another feature function's head by an ``UploadError``; torch calls it to load any."""
        told = state_dict.get(f"{prefix}fingerprint")
        if told is not None and told.shape == self.fingerprint.shape:
            check_fingerprint(told.cpu(), self.fingerprint.cpu())
        super()._load_from_state_dict(state_dict, prefix, *others)


class FeatureHead(HeadOnFeatures):
    """A linear head on a feature function; the frozen backbone is no part of its weights.

    Gradients reach the head and never the images.
    """

    def __init__(self, function: FeatureFunction, num_classes: int) -> None:
        super().__init__(function, num_classes)
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        """Map images, normalised as the data set says [B, ch, H, W], to logits [B, C]."""
        return super().forward(recalled(self.function, images).to(self.head.weight))

    def on_features(self) -> HeadOnFeatures:
        """Return an untrained head of the same form that takes features."""
        return HeadOnFeatures(self.function, self.head.out_features)


class WholeHead(nn.Module):
    """A head with its backbone among its own modules and no memory of images, from which a program can be made."""

    def __init__(self, head: FeatureHead) -> None:
        super().__init__()
        self.extractor, self.head = head.function.module, head.head

    def forward(self, images: Tensor) -> Tensor:
        """Map images, normalised as the data set says [B, ch, H, W], to logits [B, C]."""
        logits: Tensor = self.head(self.extractor.at_once(images).to(self.head.weight))
        return logits


def head_of(function: FeatureFunction, num_classes: int) -> nn.Module:
    """Return an untrained :class:`FeatureHead`."""
    return FeatureHead(function, num_classes)


def of_backbone(function: FeatureFunction, backbone: str) -> FeatureFunction:
    """Return the feature function of another backbone under the same settings; an empty name changes nothing."""
    return replace(function, config=replace(function.config, backbone=backbone or function.config.backbone))


def feature_builders(
    names: Iterable[str], function: FeatureFunction, num_classes: int, *, noise: float = 0.0
) -> dict[str, Callable[[], nn.Module]]:
    """Return a picklable builder of every head and of all sums among some architectures, by name.

    Args:
        names: ``head+<backbone>``, ``statistics+<backbone>``, ``statistics``, and others, which are left out.
        function: The run's feature function; its settings hold for the other backbones too.
        num_classes: C.
        noise: The deviation of the noise that a privacy budget demands of sums.
    """
    found: dict[str, Callable[[], nn.Module]] = {}
    for name in names:
        own = of_backbone(function, backbone_in(name))
        if is_head(name):
            found[name] = functools.partial(head_of, own, num_classes)
        elif kind_of(name) == STATISTICS:
            found[name] = functools.partial(own.sums, num_classes, noise)
    return found
