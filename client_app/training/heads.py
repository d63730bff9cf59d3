"""The client's half of heads on a frozen backbone: one forward pass per image, then epochs of the head alone.

The head is trained on features times sqrt(d), whose entries have a size near 1, so that the learning rates of other
models suit it. The factor is in the weights that are sent, which take features of norm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from client_app.training import private
from client_app.training.local import Epoch, hits, minimise
from client_app.training.losses import loss_of
from fl_app.config import ClientConfig
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


def train(
    model: ClientHead,
    data: ImageData,
    config: ClientConfig,
    *,
    normalization: Normalization,
    augmentation: str,  # noqa: ARG001  features are those of the images themselves
    seed: int,
    report: Callable[[Epoch], None] | None = None,
) -> Epoch:
    """Train a head in place; takes the arguments of :func:`client_app.training.local.train`, without augmentation."""
    criterion = loss_of(config, data.labels)

    def objective(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.head(rows)
        return criterion(logits, labels), hits(logits, labels)

    with _enlarge_features(model, data, normalization) as rows:
        return minimise(
            model.head, rows, config, objective=objective, prepare=lambda some, _: some, seed=seed, report=report
        )


def train_privately(
    model: ClientHead,
    data: ImageData,
    config: ClientConfig,
    *,
    privacy: PrivacyConfig,
    normalization: Normalization,
    augmentation: str,  # noqa: ARG001  features are those of the images themselves
    report: Callable[[Epoch], None] | None = None,
) -> float:
    """Train a head in place by DP-SGD, and return the epsilon that was spent; the backbone is public."""
    with _enlarge_features(model, data, normalization) as rows:
        return private.train(
            model.head,
            rows,
            config,
            privacy=privacy,
            normalization=NONE,
            augmentation="none",
            report=report,
        )


@contextmanager
def _enlarge_features(model: ClientHead, data: ImageData, normalization: Normalization) -> Iterator[ImageData]:
    """Yield the data's features times sqrt(d), float32 [N, d]; the head takes such features within the block."""
    factor = math.sqrt(model.head.in_features)
    rows = torch.cat([factor * rows for rows, _ in model.source.batches(data, normalization)]).float()
    with torch.no_grad():
        model.head.weight /= factor
    yield ImageData(rows, data.labels)
    with torch.no_grad():
        model.head.weight *= factor
