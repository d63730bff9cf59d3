"""The client's half of the methods on features of a frozen backbone: sums without any training, or a trained head.

Either takes one forward pass of the backbone per example.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from strategies.core import refusals
from strategies.core.facts import GRAM
from strategies.core.scan import LOG
from strategies.statistics.moments import FeatureMoments
from strategies.statistics.privacy import release_sums
from strategies.statistics.sums import Statistics
from strategies.statistics.uploaded import FeatureSums, examples_of

NOT_MEASURED = Epoch(1, float("nan"), float("nan"))


class ClientSums(FeatureSums):
    """The sums that a client sends, with the function of their features."""

    def __init__(
        self,
        function: FeatureFunction,
        num_classes: int,
        cache: FeatureCache | None = None,
        second: Sequence[str] = (GRAM,),
    ) -> None:
        super().__init__(num_classes, function.features, function.fingerprint, function.probe, second=second)
        self.source = FeatureSource(function, cache)

    @property
    def examples(self) -> int:
        """The number of examples by the sent counts, which carry the noise of a private upload; at least 1."""
        return examples_of(self.counts)

    @property
    def label_counts(self) -> tuple[int, ...]:
        """The number of examples of each class in sums without noise [C]."""
        return tuple(int(count) for count in self.counts.tolist())


def add_up(model: ClientSums, training: Training) -> Epoch:
    """Fill a client's sums with the features of its examples; nothing is trained or drawn."""
    model.fill(*_sums(model, training))
    return NOT_MEASURED


def add_up_privately(model: ClientSums, training: Training, privacy: PrivacyConfig) -> float:
    """Fill a client's sums with the noise of a budget, and return the epsilon that was spent.

    Raises:
        UploadError: The server asks for sums of squares, which carry no noise.
    """
    if model.second != (GRAM,):
        raise refusals.not_private("sums of squares")
    exact = Statistics.of(_features(model, training), *model.get_buffer("sums").shape)
    model.fill(release_sums(exact, privacy.epsilon, privacy.delta), noise=privacy.noise)
    return privacy.epsilon


def check_enough(examples: int, least: int, client: str) -> None:
    """Refuse sums over so few examples that they would reveal much of each; their number is not sent.

    Raises:
        UploadError: Names the setting.
    """
    if examples < least:
        LOG.info("%s has %d examples and sends nothing: 'features.min-examples' is %d", client, examples, least)
        raise refusals.too_few_examples(least)


def _sums(model: ClientSums, training: Training) -> list[Statistics | FeatureMoments]:
    """Add up all features in one pass."""
    sums = model.empty()
    for rows, labels in _features(model, training):
        for part in sums:
            part.include(rows, labels)
    if not float(sums[0].counts.sum()):
        raise refusals.no_features()
    return sums


def _features(model: ClientSums, training: Training) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield features [B, d] with labels [B] of the examples that have any; a text without tokens has no direction."""
    left_out = 0
    for rows, labels in model.source.batches(training.data, training.normalization):
        known = rows.norm(dim=1) > 0
        left_out += len(labels) - int(known.sum())
        yield rows[known], labels[known]
    if left_out:
        LOG.info("%d of %d examples have no features and are left out", left_out, len(training.data.labels))


# The head is trained on features times sqrt(d), whose entries have a size near 1, so that the learning rates of other
# models suit it. The factor is in the weights that are sent, which take features of norm 1.

NONE = Normalization((0.0,), (1.0,))  # features are no pixels


class ClientHead(FeatureHead):
    """The head that a client trains."""

    def __init__(self, function: FeatureFunction, num_classes: int, cache: FeatureCache | None = None) -> None:
        super().__init__(function, num_classes)
        self.source = FeatureSource(function, cache)


def train_head(model: ClientHead, training: Training) -> Epoch:
    """Train a head in place on features of the images themselves, without augmentation; return the last epoch."""
    criterion = loss_of(training.config, training.data.labels)

    def objective(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.head(rows)
        return criterion(logits, labels), hits(logits, labels)

    with _enlarge_features(model, training) as of_rows:
        return minimise(model.head, of_rows, objective, lambda rows, _: rows)


def train_head_privately(model: ClientHead, training: Training, privacy: PrivacyConfig) -> float:
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
