"""The client's half of heads on a frozen backbone: one forward pass per image, then epochs of the head alone.

The head is trained on features times sqrt(d), whose entries have a size near 1, so that the learning rates of other
models suit it. The factor is in the weights that are sent, which take features of norm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from client_app.training import private
from client_app.training.local import Epoch, Training, hits, minimise
from client_app.training.losses import loss_of
from fl_app.data import ImageData, Normalization
from fl_app.feature_cache import FeatureCache, FeatureSource
from fl_app.models.feature_heads import FeatureHead
from fl_app.models.features import FeatureFunction
from fl_app.privacy import PrivacyConfig

NONE = Normalization((0.0,), (1.0,))  # features are no pixels


class ClientHead(FeatureHead):
    """The head that a client trains.

    Args:
        function: Its feature function.
        num_classes: C.
        cache: Of the client's features; None for none.
    """

    def __init__(self, function: FeatureFunction, num_classes: int, cache: FeatureCache | None = None) -> None:
        super().__init__(function, num_classes)
        self.source = FeatureSource(function, cache)


def train(model: ClientHead, training: Training) -> Epoch:
    """Train a head in place on features of the images themselves, without augmentation; return the last epoch."""
    criterion = loss_of(training.config, training.data.labels)

    def objective(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.head(rows)
        return criterion(logits, labels), hits(logits, labels)

    with _enlarge_features(model, training) as of_rows:
        return minimise(model.head, of_rows, objective, lambda rows, _: rows)


def train_privately(model: ClientHead, training: Training, privacy: PrivacyConfig) -> float:
    """Train a head in place by DP-SGD, and return the epsilon that was spent; the backbone is public."""
    with _enlarge_features(model, training) as of_rows:
        return private.train(model.head, of_rows, privacy)


@contextmanager
def _enlarge_features(model: ClientHead, training: Training) -> Iterator[Training]:
    """Yield the training on features times sqrt(d), float32 [N, d]; the head takes such features within the block."""
    factor, data = math.sqrt(model.head.in_features), training.data
    rows = torch.cat([factor * rows for rows, _ in model.source.batches(data, training.normalization)]).float()
    with torch.no_grad():
        model.head.weight /= factor
    yield replace(training, data=ImageData(rows, data.labels), normalization=NONE, augmentation="none")
    with torch.no_grad():
        model.head.weight *= factor
