"""The models that a finished run holds, as modules that begin where a user's image does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_app.data import Normalization, Split
from fl_app.models.feature_heads import FeatureHead, WholeHead
from fl_app.models.features import FeatureFunction
from server_app.replay.foreign_models import answering_of, check_models, foreign_models
from server_app.settings.build import architectures
from server_app.settings.choices import CHOICES
from server_app.settings.read import known_settings, read_settings
from strategies.combiners.combiners import build_combiner
from strategies.core.errors import OptionError, StoreError
from strategies.core.facts import holds_images
from strategies.core.seeds import generator, seeded_torch
from strategies.method import Job, Upload
from strategies.run.ensembles import FOLDER_NAME, load_ensemble
from strategies.run.run_folder import RunFolder, stored_normalization
from strategies.teacher.ensemble import Ensemble

if TYPE_CHECKING:
    from strategies.method import ModelBuilder, State

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class StoredModels:
    """What a run holds.

    Attributes:
        models: ``"student"``, ``"ensemble"`` or both -> a module from inputs [B, *input_shape] to logits [B, C], in
            eval mode, on the CPU. Of images it takes pixels, and normalises them.
        input_shape: (channels, height, width) of images; (F, 1, 1) of rows, (1, 1, L) of texts.
        normalization: Of the pixels, inside the modules; None for rows and texts, which are taken as they are.
        weights_sha256: The digest of the result's weights in the run's facts.
        classes: The names of the classes, in the order of the logits; empty if the result has none.
    """

    models: Mapping[str, nn.Module]
    input_shape: Shape
    num_classes: int
    normalization: Normalization | None
    weights_sha256: str
    classes: tuple[str, ...] = ()

    @property
    def input_name(self) -> str:
        """The name of the input."""
        return "examples" if self.normalization is None else "pixels"

    def examples(self, count: int) -> Tensor:
        """Return inputs [B, *input_shape] drawn at random: pixels, rows, or tokens 0 and 1 of texts."""
        rng = generator(0, "export", count)
        if self.normalization is None and self.input_shape[2] > 1:
            return torch.randint(0, 2, (count, *self.input_shape), generator=rng)
        return torch.rand(count, *self.input_shape, generator=rng)


class Begun(nn.Module):
    """A module that begins where a user's example does: it normalises images for another module."""

    pixel_mean: Tensor  # in an ONNX graph a result may be called "mean"
    pixel_std: Tensor

    def __init__(self, model: nn.Module, normalization: Normalization | None) -> None:
        super().__init__()
        self.model = model
        self._images = normalization is not None
        if normalization is not None:
            self.register_buffer("pixel_mean", torch.tensor(normalization.mean).view(1, -1, 1, 1))
            self.register_buffer("pixel_std", torch.tensor(normalization.std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map examples [B, *input_shape], of images pixels before their normalisation, to logits [B, C]."""
        logits: Tensor = self.model((x - self.pixel_mean) / self.pixel_std if self._images else x)
        return logits


def stored_models(run: Path, model: str = "") -> StoredModels:
    """Load what a run holds.

    Raises:
        OptionError: The run is another project's, and ``model`` names no builder of its models.
        StoreError: The run has no result yet, or a file is damaged.
    """
    with RunFolder.open(run, write=False) as folder:
        info, outcome, weights = folder.info, folder.outcome(), folder.student()
        names = tuple((folder.result() or {}).get("classes", ()))
    if outcome is None:
        raise StoreError(f"{run}: has no result: must be a finished run")
    shape: Shape = tuple(info["input-shape"])
    classes = int(info["num-classes"])
    normalization = stored_normalization(info)
    split = Split(torch.zeros(0, dtype=torch.int64), classes, shape, normalization, "none", _no_examples)
    builders, student = _builders(run, info, model, split)
    spec, members = load_ensemble(run, builders) if (run / FOLDER_NAME).is_dir() else (None, ())
    if _of_another_project(info):
        job = Job((), builders, student, classes, shape, normalization, config=None)
        _check_foreign(model, job, info, weights, members)
    found: dict[str, nn.Module] = {}
    if weights is not None:
        with seeded_torch(0, "export"):
            found["student"] = builders[student]()
        found["student"].load_state_dict(weights)
    if spec is not None:
        combiner = build_combiner(spec.combiner, spec.weights, builders[members[0].architecture])
        found["ensemble"] = Ensemble.from_uploads(members, builders, combiner, precision=spec.precision, form="loop")
    first = normalization if holds_images(shape) else None
    models = {name: Begun(_whole(each), first).eval() for name, each in found.items()}
    stored = StoredModels(models, shape, classes, first, str(outcome.get("weights-sha256", "")), names)
    if "ensemble" in models:
        with torch.no_grad():
            models["ensemble"](stored.examples(2))  # settles members of anybody's code, which a tracer cannot do
    return stored


def _check_foreign(
    text: str, job: Job, info: Mapping[str, Any], student: State | None, members: Sequence[Upload]
) -> None:
    """Refuse models of another project than the stored ones; see :func:`check_models`."""
    stored = {each.architecture: each for each in members}  # those of one architecture have the same names and shapes
    weights: dict[str, State] = {name: each.read() for name, each in stored.items()}
    weights |= {} if student is None else {job.student: student}
    # Members of a method that is not known here may answer with anything.
    known = info.get("method") in CHOICES
    answering = answering_of(CHOICES[info["method"]], job.student, weights) if known else {job.student}
    check_models(text, job, weights, answering & set(weights))


def _whole(module: nn.Module) -> nn.Module:
    """Return a module whose heads on a frozen backbone hold their backbone."""
    if isinstance(module, FeatureHead):
        return WholeHead(module)
    if isinstance(module, Ensemble) and isinstance(module.members, nn.ModuleList):
        module.members = nn.ModuleList(map(_whole, module.members))
    return module


def _builders(run: Path, info: Mapping[str, Any], model: str, split: Split) -> tuple[Mapping[str, ModelBuilder], str]:
    if not _of_another_project(info):
        settings = read_settings({**known_settings(info["settings"]), "resume": "", "run-dir": ""})
        seed = int(info.get("data-seed", settings.app.seed))
        return architectures(settings, split, FeatureFunction(settings.app.features, seed, *split.normalization))
    if not model:
        raise OptionError(
            f"{run} is a run of another project: needs --model, as module:attribute that returns its nn.Module"
        )
    return foreign_models(model, info), info["student"]


def _of_another_project(info: Mapping[str, Any]) -> bool:
    return not isinstance(info.get("settings"), dict)


def _no_examples(positions: Tensor) -> Tensor:
    raise StoreError(f"an export reads no examples, but {len(positions)} were asked for")
