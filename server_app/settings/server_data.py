"""The server's own images: the test images, and those that a method may use."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fl_app.data import ImageData, Split, images_in, images_of, normalize, open_data, open_facts, server_share
from fl_app.data import Normalization as FromData
from fl_app.feature_cache import PASS, FeatureCache, FeatureSource
from fl_app.models.feature_heads import memory_of
from fl_app.models.features import FeatureFunction, as_read
from fl_app.project import FAILURES, function_of, one_line, scores_in
from strategies.core.durable import MIB
from strategies.core.errors import OptionError
from strategies.core.facts import STATISTICS, in_percent
from strategies.core.places import state_root
from strategies.method import Need, Normalization
from strategies.scores.sums import Answers
from strategies.scores.values import describe
from strategies.teacher.ensemble import Ensemble

if TYPE_CHECKING:
    from server_app.settings.read import Settings


def open_half(settings: Settings, half: str) -> Split:
    """Open the training or the test half of the configured data set.

    The test half of a server without held-out examples has none, and the facts that all parties share. With
    'evaluate.on' 'clients' or 'none' the server opens none, whatever its folder holds.

    Raises:
        DataError: The data set is missing; the error names the remedy.
        OptionError: The backbone of texts is unknown or not installed.
    """
    data, unscored = settings.app.data, settings.app.evaluate.on in ("clients", "none")
    targets = bool(settings.app.model.train)
    facts = open_facts(data, absent=unscored, targets=targets) if half == "test" else None
    models = () if settings.choice.uploads == STATISTICS else settings.app.model.all_named()
    found = open_data(data, half, targets=targets) if facts is None else facts
    return as_read(found, settings.app.features, models)


def proxy_images(settings: Settings, input_shape: tuple[int, int, int], seed: int) -> torch.Tensor | None:
    """Return the server's images without labels [N, ch, H, W]; None for a method that does not use them.

    Raises:
        DataError: The file of the images is missing or damaged.
        OptionError: The method needs images, and no setting names any.
    """
    data, method = settings.app.data, settings.learner
    if Need.PROXY_IMAGES not in method.needs:
        return None
    if data.proxy_file:
        return images_in(data.proxy_file, input_shape)
    if data.proxy_name:
        return images_of(data.proxy_name, input_shape, root=data.root, limit=data.proxy_limit, seed=seed)
    if data.proxy:
        train = open_half(settings, "train")
        return train.take(server_share(train, seed=seed, proxy=data.proxy)).images
    raise OptionError(
        f"method {method.name!r} needs that {Need.PROXY_IMAGES.value}: set 'data.proxy', a share of the "
        "training images that no client gets (0.2, for example), 'data.proxy-name', another data set, or "
        "'data.proxy-file', a file with images"
    )


def labelled_images(settings: Settings, seed: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the server's share of the training images with their labels; None for a method without labels.

    Raises:
        OptionError: The method trains on labelled images, and the server has none.
    """
    labelled, data = settings.plan.labelled, settings.app.data
    if labelled == "unused":
        return None
    if not data.proxy:
        if labelled == "required":
            raise OptionError(
                f"setting '{settings.choice.name}.train-on' is 'server' and 'data.proxy' 0: needs a larger "
                "'data.proxy', such as 0.05, the share of the training images that only the server has, with labels"
            )
        return None
    train = open_half(settings, "train")
    share = train.take(server_share(train, seed=seed, proxy=data.proxy))
    return share.images, share.labels


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
        groups: The group of each image, such as its patient, int64 [N]; None if each is its own.
        metric: The headline score.
    """

    data: ImageData
    normalization: Normalization
    passed: Callable[[int], None] | None = None
    functions: tuple[FeatureFunction, ...] = ()
    classes: tuple[str, ...] = ()
    groups: npt.NDArray[np.int64] | None = None
    metric: str = "accuracy"
    member_passes = 1  # for the members' scores and the ensemble's together

    def __call__(self, epoch: int, model: nn.Module) -> dict[str, float]:  # noqa: ARG002  an Observer gets both
        """Return the accuracy and the headline score of a model, in % or nats: the observer of a server stage."""
        if self.metric == "accuracy":
            return {"accuracy": self.accuracy(model)}
        found = self._described(self._logits(model))
        score, scale = found["scores"].get(self.metric), 100 if in_percent(self.metric) else 1
        return {"accuracy": found["accuracy"], **({self.metric: round(scale * score["value"], 4)} if score else {})}

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

    def of_model(self, name: str) -> HeldOut:  # noqa: ARG002  as of :class:`OwnScores`
        """Return the same for one model."""
        return self

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

    def accuracy(self, model: nn.Module) -> float:
        """Return the share of images that the model labels correctly, in %; the model's mode is restored."""
        hits = self._logits(model).argmax(1) == self.data.labels
        return round(100 * int(hits.sum()) / len(hits), 2)

    def scored(self, model: nn.Module) -> dict[str, Any]:
        """Return all scores of a model, as :func:`strategies.scores.values.describe`, and its effects.

        ``effects`` are those of :meth:`strategies.scores.sums.Answers.effects` in base64: of the accuracy bits, else
        float32. The model's mode is restored.
        """
        return self._described(self._logits(model), effects=True)

    @torch.no_grad()
    def _logits(self, model: nn.Module) -> torch.Tensor:
        was_training, found = model.training, []
        model.eval()
        for images, _ in self.batches(next(model.parameters()).device):
            found.append(model(images).float().cpu())
            self._count(_models_of(model))
        model.train(was_training)
        return torch.cat(found)

    @torch.no_grad()
    def member_scores(self, ensemble: Ensemble) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return every member's scores, and the ensemble's with its effects, from one pass over the images."""
        alone, together = [], []
        for images, _ in self.batches(next(ensemble.parameters()).device):
            logits = ensemble.member_logits(images)
            combined = ensemble.combine(logits, images)
            # A member's output "unknown" comes after the classes, and is left out.
            alone.append(logits[..., : combined.shape[1]].float().cpu())
            together.append(combined.float().cpu())
            self._count(len(ensemble.members))
        members = [self._described(logits) for logits in torch.cat(alone, dim=1)]
        return members, self._described(torch.cat(together), effects=True)

    def _described(self, logits: torch.Tensor, *, effects: bool = False) -> dict[str, Any]:
        answers = Answers.of(logits, self.data.labels)
        found = describe(answers.sums(self.groups), self.classes)
        if effects:
            packed = {
                name: np.packbits(values == 1) if name == "accuracy" else values.astype("<f4")
                for name, values in answers.effects().items()
            }
            found["effects"] = {name: to_text(values) for name, values in packed.items()}
        return found

    @cached_property
    def digest(self) -> str:
        """What tells these examples from others: SHA-256 of the images and labels."""
        digest = hashlib.sha256()
        for tensor in (self.data.images, self.data.labels):
            digest.update(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def to_text(array: npt.NDArray[Any]) -> str:
    """Return an array's bytes in base64."""
    return base64.b64encode(array.tobytes()).decode()


def _models_of(model: nn.Module) -> int:
    return len(model.members) if isinstance(model, Ensemble) else 1


@dataclass(frozen=True)
class OwnScores:
    """A user's function in the place of :class:`.held_out.HeldOut`.

    Attributes:
        function: Takes a module in eval mode, as the project built it, and returns its accuracy in %, or a dict of
            numbers by name, whose first heads the tables where ``"accuracy"`` is not among them. Names of
            :data:`.HEADLINES` are in per cent, a log loss in nats, and others as they are.
        passed: Called after each call with the number of models that it has seen; None for no call.
        option: What names it.
        left_out: Told in one line of scores that are no finite numbers; None: they are an error.
        odd: Such a line -> the models of :meth:`of_model` that it is about.
    """

    name: str
    function: Callable[[nn.Module], Any]
    passed: Callable[[int], None] | None = None
    option: str = "--evaluate"
    left_out: Callable[[str], None] | None = None
    odd: dict[str, list[str]] = field(default_factory=dict)
    num_batches = 1
    member_passes = 2  # alone and in the ensemble
    classes = ()  # which only the project knows

    @classmethod
    def of(cls, name: str) -> OwnScores:
        """Import the function.

        Raises:
            OptionError: It cannot be imported, or is none.
        """
        return cls(name, function_of(name, "--evaluate"))

    def of_model(self, name: str) -> OwnScores:
        """Return the same for one model, whose scores that are no finite numbers are noted in :attr:`odd`."""
        if self.left_out is None:
            return self
        return replace(self, left_out=lambda line: self.odd.setdefault(line, []).append(name))

    @property
    def what(self) -> str:
        """What it is called in errors."""
        return f"{self.option} {self.name!r}"

    def __call__(self, epoch: int, model: nn.Module) -> dict[str, float]:  # noqa: ARG002  an Observer gets both
        """Return the function's scores of a model, as :meth:`asked` does: the observer of a server stage."""
        return self.asked(model)

    def asked(self, model: nn.Module) -> dict[str, float]:
        """Return the function's scores of a model by name; the model's mode is restored.

        Raises:
            OptionError: The function fails, or returns no finite numbers, or an accuracy that is not from 0 to 100.
        """
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                found = self.function(model)
        except (*FAILURES, SystemExit) as error:
            raise OptionError(f"{self.what} fails: {one_line(error)}") from error
        finally:
            model.train(was_training)
        scores = scores_in(found, self.what, self.left_out)
        if self.passed is not None:
            self.passed(len(model.members) if isinstance(model, Ensemble) else 1)
        return scores

    def scored(self, model: nn.Module) -> dict[str, Any]:
        """Return the scores of a model in the form of :meth:`HeldOut.scored`, without intervals."""
        found = self.asked(model)
        shown = {name: value / 100 if in_percent(name) else value for name, value in found.items()}
        scores = {name: {"value": round(value, 6), "low": None, "high": None} for name, value in shown.items()}
        accuracy = round(found["accuracy"], 2) if "accuracy" in found else None
        return {"accuracy": accuracy, "scores": scores, "notes": []}

    def member_scores(self, ensemble: Ensemble) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return every member's scores and the ensemble's."""
        members = ensemble.members
        alone = [self.scored(member) for member in members] if isinstance(members, nn.ModuleList) else []
        return alone, self.scored(ensemble)


Scorer = HeldOut | OwnScores
