"""Linear heads on a frozen backbone: classifiers of images whose weights are those of the head alone.

A head's weights carry the fingerprint of its feature function, so that no other function's head can be loaded.

Ensembles, students and epochs ask for the features of the same images again and again: a process keeps
the last ones.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.durable import MIB
from strategies.core.facts import STATISTICS, backbone_in, is_head, kind_of
from strategies.core.fingerprint import check_fingerprint

from .features import FeatureFunction


class FeatureMemory:
    """The backbone's features of the images that were seen last, by a digest of each image.

    The members of an ensemble, its student and all epochs of a server stage ask for the same images.

    Args:
        extract: From images [B, ch, H, W] to features [B, d] in float32.
        most_mib: The size of all features together; the oldest go first.
    """

    def __init__(self, extract: Callable[[Tensor], Tensor], most_mib: float) -> None:
        self._extract, self._most, self._rows = extract, most_mib * MIB, dict[bytes, Tensor]()

    def __call__(self, images: Tensor) -> Tensor:
        """Return features [B, d] of images [B, ch, H, W]; those that are not known are extracted."""
        keys = digests(images)
        places = {key: number for number, key in enumerate(keys) if key not in self._rows}
        fresh = dict[bytes, Tensor]()
        if places:
            fresh = dict(zip(places, self._extract(images[list(places.values())]).unbind(), strict=True))
        found = torch.stack([fresh[key] if key in fresh else self._rows[key] for key in keys])
        self._keep({key: row.clone() for key, row in fresh.items()})
        return found

    def holds(self, images: Tensor) -> bool:
        """Return whether the features of all these images are known."""
        return all(key in self._rows for key in digests(images))

    def learn(self, images: Tensor, rows: Tensor) -> None:
        """Take the features [B, d] of images [B, ch, H, W] that were extracted elsewhere."""
        self._keep(dict(zip(digests(images), rows.clone().unbind(), strict=True)))

    def _keep(self, fresh: dict[bytes, Tensor]) -> None:
        self._rows.update(fresh)
        room = int(self._most // (4 * next(iter(fresh.values())).numel())) if fresh else len(self._rows)
        for key in list(self._rows)[: max(0, len(self._rows) - room)]:
            del self._rows[key]


def memory_of(function: FeatureFunction) -> FeatureMemory:
    """Return this process' memory of a backbone, which functions share that differ in what follows the backbone."""
    return _memory(function.whole)


@functools.lru_cache(maxsize=4)
def _memory(function: FeatureFunction) -> FeatureMemory:
    return FeatureMemory(lambda images: function.module.pooled(images), function.config.cache_mib)


# The last images that each function was asked for, with their features: all members of an ensemble ask one by one.
_LAST: dict[FeatureFunction, tuple[weakref.ref[Tensor], int, Tensor]] = {}


def recalled(function: FeatureFunction, images: Tensor) -> Tensor:
    """Return a function's features [B, d] in float64 of images [B, ch, H, W], from memory where they are known."""
    with torch.inference_mode(mode=False):  # a head that trains outside of it may use them
        images = images.clone() if images.is_inference() else images  # such a tensor counts no changes
        last = _LAST.get(function)
        if last is not None and last[0]() is images and last[1] == images._version:
            return last[2]
        found = function.module.finished(memory_of(function)(images.detach().cpu()))
        _LAST[function] = (weakref.ref(images), images._version, found)
        return found


def digests(images: Tensor) -> list[bytes]:
    """Return a digest of every image [B, ...] of one shape and type."""
    what = f"{tuple(images.shape[1:])} {images.dtype}".encode()
    rows = images.contiguous().numpy().reshape(len(images), -1)
    return [hashlib.blake2b(row.data, digest_size=16, key=what[:64]).digest() for row in rows]


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
        found = state_dict.get(f"{prefix}fingerprint")
        if found is not None and found.shape == self.fingerprint.shape:
            check_fingerprint(found.cpu(), self.fingerprint.cpu())
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
        noise: The deviation of the noise that a privacy budget demands of sums.
    """
    found: dict[str, Callable[[], nn.Module]] = {}
    for name in names:
        own = of_backbone(function, backbone_in(name))
        if is_head(name):
            found[name] = functools.partial(FeatureHead, own, num_classes)
        elif kind_of(name) == STATISTICS:
            found[name] = functools.partial(own.sums, num_classes, noise)
    return found
