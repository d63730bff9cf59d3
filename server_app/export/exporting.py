"""Exports a run: the models that it holds, as programs of torch.export and ONNX, each read back and compared."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_app.data import Normalization, Split
from fl_app.models.feature_heads import FeatureHead, WholeHead
from fl_app.models.features import FeatureFunction
from fl_app.project import FAILURES, one_line
from server_app.launch.guard import sigterm_as_interrupt
from server_app.replay.request import answering_of, check_models, foreign_models, is_foreign
from server_app.report.card import as_given
from server_app.settings.build import architectures
from server_app.settings.choices import CHOICES
from server_app.settings.read import known_settings, read_settings
from strategies.combiners.combiners import build_combiner
from strategies.core.durable import MIB, locked, make_folder, read_json, sha256_file, staged, store_errors
from strategies.core.errors import ComputeError, OptionError, StoreError
from strategies.core.facts import ADAPTER, holds_images
from strategies.core.offline import QUIET
from strategies.core.places import expand_user
from strategies.core.seeds import generator, seeded_torch
from strategies.method import Job, Upload
from strategies.run.ensembles import FOLDER_NAME, load_ensemble
from strategies.run.files import write_json
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
        scores: Model -> its scores on the run's held-out examples, as in result.json; without those that have none.
    """

    models: Mapping[str, nn.Module]
    input_shape: Shape
    num_classes: int
    normalization: Normalization | None
    weights_sha256: str
    classes: tuple[str, ...] = ()
    scores: Mapping[str, Any] = field(default_factory=dict)

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
        result = folder.result() or {}
    if outcome is None:
        raise StoreError(f"{run}: has no result: must be a finished run")
    shape: Shape = tuple(info["input-shape"])
    if not (classes := int(info["num-classes"])):
        how = "adapter/ by PeftModel.from_pretrained" if info["student"] == ADAPTER else "student.safetensors in Python"
        raise OptionError(f"{run}: its models map to no logits of classes, which an export needs: load {how}")
    normalization = stored_normalization(info)
    split = Split(torch.zeros(0, dtype=torch.int64), classes, shape, normalization, "none", _no_examples)
    builders, student = _builders(run, info, model, split)
    spec, members = load_ensemble(run, builders) if (run / FOLDER_NAME).is_dir() else (None, ())
    if is_foreign(info):
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
    scores = {
        row["kind"]: row["scores"] for row in result.get("table", ()) if row["kind"] in models and row.get("scores")
    }
    names = tuple(result.get("classes", ()))
    stored = StoredModels(models, shape, classes, first, str(outcome.get("weights-sha256", "")), names, scores)
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
    if not is_foreign(info):
        settings = read_settings({**known_settings(info["settings"]), "resume": "", "run-dir": ""})
        seed = int(info.get("data-seed", settings.app.seed))
        return architectures(settings, split, FeatureFunction(settings.app.features, seed, *split.normalization))
    if not model:
        raise OptionError(
            f"{run} is a run of another project: needs --model, as module:attribute that returns its nn.Module"
        )
    return foreign_models(model, info), info["student"]


def _no_examples(positions: Tensor) -> Tensor:
    raise StoreError(f"an export reads no examples, but {len(positions)} were asked for")


FACTS = "export.json"
TORCH, ONNX = "torch", "onnx"
SUFFIXES = {TORCH: ".pt2", ONNX: ".onnx"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # the extra "export"
TOLERANCE = 1e-5  # largest difference of two logits, in units of the largest logit, or of 1
_TRACED = 3  # examples in the batch that is traced; 1 would be taken for a constant
_BATCHES = (1, 2, 7)  # of the comparison
_MOST_BYTES = 1 << 30  # larger weights stand in a file of their own, because one of ONNX ends at 2 GiB
Run = Callable[[Tensor], Tensor]


def export_run(
    run: Path, *, only: str = "", model: str = "", out: Path | None = None, log: Callable[[str], None]
) -> dict[str, Any]:
    """Write the models of a finished run, and say what they take and return.

    Args:
        only: ``"torch"`` or ``"onnx"``; empty for both.
        model: ``module:attribute`` that builds the models of a run of another project.
        out: The folder of the files; None for ``export`` in the run folder. Files of an earlier export are replaced,
            except those of the same models in the other form. Hidden files are left as they are, but for the folders
            that killed exports left.

    Returns:
        The content of ``export.json``.

    Raises:
        OptionError: Packages are missing, or the folder holds something else.
        StoreError: The run has no result, a file is damaged, or the disk refuses.
        ComputeError: A model cannot be exported, or a file differs from its model.
    """
    kinds = (only,) if only else tuple(SUFFIXES)
    check_packages(kinds)
    target = expand_user(out if out is not None else run / "export").resolve()
    _earlier(target)
    stored = stored_models(run, model)
    if not stored.models:
        raise StoreError(f"{run}: its result has neither a student nor an ensemble")
    with store_errors(target):
        make_folder(target)
        # Inside the target, which may be a file system of its own; no export minds hidden names.
        with sigterm_as_interrupt(), staged(target, "export", _is_part) as part:
            differences = {}
            for name in stored.models:
                log(f"{name}: {', '.join(kinds)}")
                differences.update(write_programs(stored, name, part, kinds))
            made = _facts(run, stored, part, differences)
            with locked(target, wait=True):  # another export may publish into it
                facts = _published(made, part, target)
    return {"folder": str(target), **facts}


def _earlier(target: Path) -> dict[str, Any]:
    """Return the facts of an earlier export in a folder; empty without one."""
    facts = read_json(target / FACTS) if (target / FACTS).exists() else {}
    ours = isinstance(facts, dict) and isinstance(facts.get("files"), dict)
    known = {FACTS, *facts["files"]} if ours else set()
    found = [target] if target.is_file() else list(target.iterdir()) if target.exists() else []
    if others := sorted(path for path in found if path.name not in known and path.name[0] != "."):
        raise OptionError(f"{others[0]} is not a file of an export: must be a new folder, or that of an earlier export")
    return facts if ours else {}


def _is_part(folder: Path) -> bool:
    """Return whether a folder is one that an export fills, or has left."""
    suffixes = {path.suffix for path in folder.iterdir()}
    return bool(suffixes) and suffixes <= {*SUFFIXES.values(), ".data"}


def _published(facts: Mapping[str, Any], part: Path, target: Path) -> dict[str, Any]:
    """Move files into the folder in place of an earlier export's; return the facts with the files that are kept."""
    earlier = _earlier(target)
    whole = {**facts, "files": {**_kept(earlier, facts, target), **facts["files"]}}
    names = {*earlier.get("files", {}), *whole["files"]}
    # If it ends here, the next export knows all files, and keeps those that are whole.
    write_json(target / FACTS, {**earlier, "files": {**earlier.get("files", {}), **whole["files"]}})
    for file in part.iterdir():
        file.replace(target / file.name)
    for file in target.iterdir():
        if file.name in names - whole["files"].keys():
            file.unlink()
    write_json(target / FACTS, whole)
    return whole


def _kept(earlier: Mapping[str, Any], facts: Mapping[str, Any], target: Path) -> dict[str, Any]:
    """Return the entries of the files of the same models that this export does not write."""
    if earlier.get("weights_sha256") != facts["weights_sha256"]:
        return {}
    return {
        name: entry
        for name, entry in earlier["files"].items()
        if name not in facts["files"] and (target / name).exists() and sha256_file(target / name) == entry["sha256"]
    }


def export_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return what an export wrote, as lines."""
    shape = ", ".join(map(str, facts["input"]["shape"]))
    files = [
        f"{name}  {entry['bytes'] / MIB:.2f} MiB, differs from the model by {entry['difference']:.0e}"
        for name, entry in facts["files"].items()
        if "difference" in entry
    ]
    return [
        *files,
        f"input {facts['input']['name']}: [{shape}], {facts['input']['range']}",
        f"folder: {facts['folder']}",
    ]


def _facts(run: Path, stored: StoredModels, folder: Path, differences: Mapping[str, float]) -> dict[str, Any]:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(folder.iterdir())
    }
    return {
        "run": run.absolute().name,
        "weights_sha256": stored.weights_sha256,
        "input": {
            "name": stored.input_name,
            "shape": ["batch", *stored.input_shape],
            "range": as_given(stored.input_shape, stored.normalization)
            or "pixels from 0 to 1; the file normalises them",
        },
        "output": {
            "name": "logits",
            "shape": ["batch", stored.num_classes],
            **({"classes": list(stored.classes)} if stored.classes else {}),
        },
        **({"scores": dict(stored.scores)} if stored.scores else {}),
        "files": {
            name: {**entry, **({"difference": differences[name]} if name in differences else {})}
            for name, entry in files.items()
        },
    }


def check_packages(kinds: tuple[str, ...]) -> None:
    """Refuse ONNX without its packages, and name the remedy."""
    if ONNX in kinds and (missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]):
        raise OptionError(
            f"ONNX needs {', '.join(missing)}, which are not installed: pip install 'oneshot-fl[export]', or add "
            f"--only {TORCH}"
        )


def write_programs(stored: StoredModels, name: str, folder: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Write one of the stored models in every wanted form, and compare each file with the model.

    Returns:
        File -> its largest difference from the model, over the largest logit or 1.

    Raises:
        ComputeError: The model cannot be traced or translated, or a file differs from it.
    """
    module, found = stored.models[name], {}
    with _quiet(), torch.no_grad():
        batch = {0: torch.export.Dim("batch")}
        program = _tried(
            f"the {name} cannot be traced by torch.export",
            lambda: torch.export.export(module, (stored.examples(_TRACED),), dynamic_shapes=(batch,)),
        )
        for kind in kinds:
            file = folder / f"{name}{SUFFIXES[kind]}"
            write = partial(WRITERS[kind], program, file, stored)
            run = _tried(f"the {name} cannot be written as {file.name}", write)
            found[file.name] = _difference(module, run, stored, f"{file.name}, read back,")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's advice to those who wrote a module; an error says the same."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _difference(module: nn.Module, run: Run, stored: StoredModels, what: str) -> float:
    largest = 0.0
    for count in _BATCHES:
        inputs = stored.examples(count)
        wanted, given = module(inputs), run(inputs)
        scale = max(1.0, float(wanted.abs().max()))
        largest = max(largest, float((given - wanted).abs().max()) / scale)
    if not largest <= TOLERANCE:
        raise ComputeError(f"{what} differs from the model by {largest:.1e}: must be at most {TOLERANCE:g}")
    return largest


def _save_torch(program: Any, file: Path, stored: StoredModels) -> Run:  # noqa: ARG001  the form of a writer
    torch.export.save(program, file)
    loaded: Run = torch.export.load(file).module()
    return loaded


def _save_onnx(program: Any, file: Path, stored: StoredModels) -> Run:
    from onnxscript import optimizer

    large = sum(tensor.nbytes for tensor in program.state_dict.values()) > _MOST_BYTES
    translated: Any = torch.onnx.export(
        program, input_names=[stored.input_name], output_names=["logits"], optimize=False, verbose=False
    )
    # With a limit of 0 nothing is folded: every tensor of the model keeps its name, and can be read and replaced.
    optimizer.fold_constants(translated.model, input_size_limit=0)
    optimizer.remove_unused_nodes(translated.model)
    translated.save(str(file), external_data=large)
    session = _session(file)
    return lambda inputs: torch.from_numpy(session.run(["logits"], {stored.input_name: inputs.numpy()})[0])


def _session(file: Path) -> Any:
    # Before its first import, or onnxruntime reports to its makers; the second is the name in other versions.
    os.environ.update({**QUIET, "ORT_TELEMETRY_DISABLED": "1"})
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    # Its errors share no class but Exception.
    refusals = tuple(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except refusals as error:
        raise RuntimeError(f"onnxruntime refuses it: {error}") from error


WRITERS: Mapping[str, Callable[[Any, Path, StoredModels], Run]] = {TORCH: _save_torch, ONNX: _save_onnx}


def _tried(what: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except FAILURES as error:
        raise ComputeError(f"{what}: {one_line(error)}") from error
