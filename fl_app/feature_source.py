"""The features of some images: from a cache on the disk, else by one pass of the backbone over each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger

import torch

from fl_app.data import ImageData, Normalization, normalize
from fl_app.data.preprocessing import check_pixels
from fl_app.feature_cache import FeatureCache, key_of
from fl_app.models.features import Extractor, FeatureFunction

# Flower's own logger, so that its lines reach the log of the run.
LOG = getLogger("flwr")

PASS = 256  # images decoded to floats at a time
EVERY = 10.0  # seconds between two lines on the progress


@dataclass(frozen=True)
class FeatureSource:
    """Features: from the cache where they are in it, else by one pass through the backbone.

    Attributes:
        function: The run's feature function.
        cache: Of the features; None for none.
    """

    function: FeatureFunction
    cache: FeatureCache | None = None

    def batches(self, data: ImageData, normalization: Normalization) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield features [B, d] in float64 with labels [B]."""
        extractor = self.function.module
        labels = torch.split(data.labels, PASS)
        for rows, own in zip(self.pooled(data, normalization), labels, strict=True):
            yield extractor.finished(rows), own

    def pooled(self, data: ImageData, normalization: Normalization) -> Iterator[torch.Tensor]:
        """Yield the backbone's own features [B, d] in float32, :data:`PASS` images at a time.

        Raises:
            DataError: Images are floats outside [0, 1].
        """
        check_pixels(data.images, "the data set")
        extractor = self.function.module
        if self.cache is None:
            yield from _extracted(extractor, data, normalization)
            return
        shape = (len(data.labels), self.function.backbone.features)
        key = key_of(self.function.raw, data.images)
        if (cached := self.cache.read(key, shape)) is not None:
            LOG.info("features of %d examples are read from the cache", len(data.labels))
            yield from (torch.from_numpy(cached[start : start + PASS].copy()) for start in range(0, shape[0], PASS))
            return
        with self.cache.writing(key, shape) as kept:
            for rows in _extracted(extractor, data, normalization):
                kept.add(rows)
                yield rows


def _extracted(extractor: Extractor, data: ImageData, normalization: Normalization) -> Iterator[torch.Tensor]:
    """Yield raw features [B, d]; the log has examples per second and the time left."""
    began = shown = time.monotonic()
    for start in range(0, len(data.labels), PASS):
        images = data.images[start : start + PASS]
        yield extractor.pooled(normalize(images, *normalization))
        done, now = start + len(images), time.monotonic()
        if now - shown > EVERY:
            rate, shown = done / (now - began), now
            left = (len(data.labels) - done) / rate
            LOG.info("features: %d of %d examples, %.0f a second, %.0f s left", done, len(data.labels), rate, left)
