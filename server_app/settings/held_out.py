"""The held-out images, which no client holds, and the accuracy of models on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fl_app.data import ImageData, normalize
from fl_app.data import Normalization as FromData
from fl_app.feature_cache import MIB, FeatureCache
from fl_app.feature_source import PASS, FeatureSource
from fl_app.models.feature_memory import memory_of
from fl_app.models.features import FeatureFunction
from strategies.core.places import state_root
from strategies.method import Normalization
from strategies.teacher.ensemble import Ensemble

BATCH = 500


@dataclass(frozen=True)
class HeldOut:
    """The held-out images with their normalisation.

    Attributes:
        data: uint8 [N, ch, H, W] and labels [N].
        normalization: The models' input space.
        passed: Called after each batch with the number of models that have seen it; None for no call.
        functions: The feature functions of models that are asked; their features of these images are extracted once
            per machine.
        classes: The names of the classes, in the order of their numbers; empty where numbers are their names.
    """

    data: ImageData
    normalization: Normalization
    passed: Callable[[int], None] | None = None
    functions: tuple[FeatureFunction, ...] = ()
    classes: tuple[str, ...] = ()
    member_passes = 1  # for the members' scores and the ensemble's together

    def __call__(self, epoch: int, model: nn.Module) -> dict[str, float]:  # noqa: ARG002  an Observer gets both
        """Return ``{"accuracy": %}`` of a model: the observer of a server stage."""
        return {"accuracy": self.accuracy(model)}

    def batches(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield normalised images [B, ch, H, W] with their labels [B]."""
        for function in self.functions:
            self._remember(function)
        sizes = self._sizes()
        images_labels = zip(torch.split(self.data.images, sizes), torch.split(self.data.labels, sizes), strict=True)
        for images, labels in images_labels:
            pixels = normalize(images, self.normalization.mean, self.normalization.std)
            yield pixels.to(device), labels.to(device)

    def _remember(self, function: FeatureFunction) -> None:
        """Fill this process' memory with the features of all images, from this user's cache where they are in it."""
        memory, images, most = memory_of(function), self.data.images, function.config.cache_mib
        mean, std = self.normalization.mean, self.normalization.std
        if 4 * len(images) * function.backbone.features > most * MIB or memory.holds(normalize(images[-1:], mean, std)):
            return
        source = FeatureSource(function, FeatureCache(state_root("") / "features", most))
        pooled = source.pooled(self.data, FromData(mean, std))
        for part, rows in zip(torch.split(images, PASS), pooled, strict=True):
            memory.learn(normalize(part, mean, std), rows)

    @property
    def num_batches(self) -> int:
        """The number of batches in :meth:`batches`."""
        return len(self._sizes())

    def _sizes(self) -> list[int]:
        """Return the sizes of the batches.

        A single last image joins the batch before: normalisation by a batch's own statistics needs two.
        """
        sizes = [len(part) for part in torch.split(self.data.labels, BATCH)]
        return [*sizes[:-2], BATCH + 1] if sizes[1:] and sizes[-1] == 1 else sizes

    def _count(self, models: int) -> None:
        if self.passed is not None:
            self.passed(models)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the share of images that the model labels correctly, in %; the model's mode is restored."""
        was_training = model.training
        model.eval()
        device = next(model.parameters()).device
        hits = 0
        for images, labels in self.batches(device):
            hits += int((model(images).argmax(1) == labels).sum())
            self._count(_models_of(model))
        model.train(was_training)
        return percent(hits, len(self.data.labels))

    @torch.no_grad()
    def member_accuracies(self, ensemble: Ensemble) -> tuple[list[float], float]:
        """Return every member's accuracy and the ensemble's, in %, from one pass over the images."""
        device = next(ensemble.parameters()).device
        alone, together = torch.zeros(len(ensemble.members), dtype=torch.long), 0
        for images, labels in self.batches(device):
            logits = ensemble.member_logits(images)
            combined = ensemble.combine(logits, images)
            # A member's output "unknown" comes after the classes, and is left out.
            alone += (logits[..., : combined.shape[1]].argmax(2) == labels).sum(1).cpu()
            together += int((combined.argmax(1) == labels).sum())
            self._count(len(ensemble.members))
        total = len(self.data.labels)
        return [percent(int(hits), total) for hits in alone], percent(together, total)


def percent(hits: int, total: int) -> float:
    """Return a share in %, rounded to the resolution of 10,000 images."""
    return round(100 * hits / total, 2)


def _models_of(model: nn.Module) -> int:
    return len(model.members) if isinstance(model, Ensemble) else 1
