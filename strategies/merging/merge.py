"""Merges trained models in one call, without Flower, Ray or a run folder."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..combiners.outcomes import build_ensemble, load_model
from ..compute.in_process import InProcess
from ..core import refusals
from ..core.checkpoints import (
    OpenFile,
    client_name_of,
    model_file,
    no_checkpoints,
    odd_form,
    open_checkpoint,
    read_checkpoint,
    read_classes,
    same_training_notes,
    scan_checkpoints,
    unwrap_state,
    write_tensors,
)
from ..core.durable import atomic_write, make_empty_folder, make_folder, store_errors
from ..core.errors import OptionError, StoreError, UploadError, blaming, shorten_list
from ..core.facts import (
    CLASSIFIER,
    CLIENT_NAME,
    MODEL_ERRORS,
    UNKNOWN_SHAPE,
    UNNAMED,
    Agreed,
    Agreement,
    State,
    UploadFacts,
    base_of,
    default_normalization,
    holds_images,
    kind_of,
    unnamed_note,
    weights_alone,
)
from ..core.layout import evaluating
from ..core.names import match_names, own_names
from ..core.options import meant
from ..core.outputs import logits_of
from ..core.places import expand_user
from ..method import ASSUMED, METHODS, EnsembleSpec, Job, Method, Need, Normalization, Outcome, Upload
from ..run import CARD_FILE
from ..run.ensembles import FOLDER_NAME, save_ensemble
from ..run.files import save_weights
from ..run.journal import Journal
from ..run.run_folder import STUDENT_FILE
from ..run.stage import check_finite
from ..scores.sums import Answers
from ..scores.values import as_json, describe, differences
from ..teacher.ensemble import Ensemble
from ..teacher.weight_space import open_weights
from ..uploads.builders import (
    Model,
    check_described,
    check_shape,
    check_student,
    choose_config,
    choose_student,
    named_builders,
)
from ..uploads.checks import (
    ModelSignature,
    RenamedTensors,
    Signature,
    Signatures,
    check_arrays,
    check_measured,
    check_upload,
    fits,
)
from ..uploads.forms import FormedBuilder, formed_builders, forms_of, unformed
from ..uploads.needs import check_labelled
from ..uploads.tensors import tensor_form
from ..weights.adapters import Adapter
from .adapters import MergedAdapter, adapter_state, describe_merge, open_adapters, open_start
from .card import write_card
from .copies import Copies, bare_module, copies_of, lost_buffer, maker_of
from .shared_base import SharedBase

Value = TypeVar("Value")
PerModel = Sequence[Value] | Mapping[str, Value]
Trained = nn.Module | Mapping[str, torch.Tensor] | str | Path
Kept = State | str | Path


STATES = "state-dict"  # the architecture of weights without a module

# What a user gives to a merge: models in any form, and values per model.


def name_models(models: object) -> dict[str, Trained]:
    """Return client -> its model, whatever holds them.

    Raises:
        OptionError: There is no model, one of another type, or a name that no client may have.
    """
    if isinstance(models, str | Path):
        models = _models_in(expand_user(models))
    # A module may yield its layers.
    alone = isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)
    if alone or not isinstance(models, Iterable):
        raise OptionError(
            f"models is {_kind(models)}: must be a list of models, a mapping of client name -> model, or a folder of "
            "checkpoints"
        )
    named = dict(models) if isinstance(models, Mapping) else {f"client-{k:03}": one for k, one in enumerate(models)}
    if not named:
        raise OptionError("models is empty: must hold at least one model")
    for client, one in named.items():
        if not (isinstance(client, str) and CLIENT_NAME.fullmatch(client)):
            raise OptionError(f"client name is {client!r}: must be up to 64 letters, digits, '.', '_' and '-'")
        _check_form(f"model {client!r}", one)
    return named


def _check_form(what: str, given: object) -> None:
    if not isinstance(given, nn.Module | Mapping | str | Path):
        raise OptionError(f"{what} is {_kind(given)}: must be a module, a state dict or a checkpoint file")


def _models_in(folder: Path) -> dict[str, Path]:
    """Return client -> its checkpoint, by file name, and log what else the folder holds."""
    if not folder.is_dir():
        what = "is one file" if folder.is_file() else "does not exist"
        raise OptionError(
            f"models is {str(folder)!r}, which {what}: must be a folder of checkpoints, or a list of them"
        )
    if (inside := model_file(folder)) is not None:
        raise OptionError(
            f"models is {str(folder)!r}, which holds one model, {inside.name}: must be a folder of several, or a list"
        )
    with store_errors(folder):
        found = scan_checkpoints(folder)
    named = dict[str, Path]()
    for path in found.taken:
        if (client := client_name_of(path)) in named:
            raise OptionError(
                f"{named[client]} and {path.name} both give the client name {client!r}: must be a mapping of client "
                "name -> file"
            )
        named[client] = path
    if not named:
        raise OptionError(no_checkpoints(found))
    found.report("models")
    return named


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def by_name(values: PerModel[Value] | None, named: Mapping[str, Trained], what: str) -> dict[str, Value]:
    """Return client -> its value; empty if none are given.

    Args:
        values: In the order of the models, or by client name; numbers of numpy and torch become Python's.
        named: Client -> its model.

    Raises:
        OptionError: There are more or fewer than models.
    """
    if values is None:
        return {}
    if isinstance(values, Mapping):
        if odd := sorted(set(values) ^ set(named), key=str):
            raise OptionError(f"{what} and models differ in {odd[0]!r}: must have the same names")
        return {client: _plain(value) for client, value in values.items()}
    if not isinstance(values, Sequence | np.ndarray | torch.Tensor) or isinstance(values, str):
        raise OptionError(f"{what} is {_kind(values)}: must be a list with one entry per model, or a mapping by name")
    if len(values) != len(named):
        raise OptionError(f"{what} has {len(values)} entries: must have one per model, {len(named)}")
    return dict(zip(named, map(_plain, values), strict=True))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic | torch.Tensor) else value


def keep_weights(client: str, trained: Trained) -> State | str | Path:
    """Return a file's name, or a copy of the tensors, which their owner may train further; tied ones stay one.

    Arrays of numpy and of a Flower message become tensors.

    Raises:
        UploadError: An entry of a state dict is no tensor, or has no values.
    """
    if isinstance(trained, str | Path):
        return trained
    with blaming(f"model {client!r}"):
        state = (
            bare_module(trained).state_dict()
            if isinstance(trained, nn.Module)
            else unwrap_state({key: _as_tensor(value) for key, value in trained.items()}, f"model {client!r}")
        )
    for key, value in state.items():
        if not (isinstance(key, str) and isinstance(value, torch.Tensor)):
            raise refusals.no_tensor(f"{key!r} of its state dict", _kind(value)).of(f"model {client!r}")
        if odd := "without values yet" if is_lazy(value) else odd_form(value):
            raise refusals.no_tensor(f"tensor {key!r}", odd).of(f"model {client!r}")
    copies = dict[Any, torch.Tensor]()
    return {
        key: copies.setdefault(_place(key, value), value.detach().to("cpu", copy=True)) for key, value in state.items()
    }


def _as_tensor(value: Any) -> Any:
    """Return an array of numpy, or of a Flower message, as a tensor; anything else as it is."""
    if type(value).__name__ == "Array" and callable(getattr(value, "numpy", None)):
        value = value.numpy()
    try:
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
    except TypeError:  # an array of texts
        return value


def _place(key: str, value: torch.Tensor) -> Any:
    """Return what two names of one tensor have in common."""
    if is_lazy(value) or value.layout != torch.strided or value.is_quantized or not value.numel():
        return key
    return value.data_ptr(), value.dtype, value.shape, value.stride()


_AGAINST = "other model"  # that a result is compared with
EXAMPLES = ("image", "images", "img", "pixel_values", "input_ids", "features", "inputs", "input", "data", "x")
LABELS = ("label", "labels", "fine_label", "target", "targets", "y")


def read_batch(batch: Any, num_classes: int, input_shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples [B, ...] and the labels [B] of a batch.

    Args:
        batch: A tuple or list that begins with both, or a dict that has them under one of :data:`EXAMPLES` and
            :data:`LABELS`; tensors or arrays.
        num_classes: C.
        input_shape: Of one example.

    Raises:
        OptionError: It is something else, images have their channels elsewhere, there is not one label per example, or
            a label is not 0 to C - 1.
    """
    if isinstance(batch, Mapping):
        names = [next((name for name in known if name in batch), None) for known in (EXAMPLES, LABELS)]
        if None in names:
            raise OptionError(
                f"a batch is a dict of {', '.join(map(str, batch))[:200]}: must have examples under one of "
                f"{', '.join(EXAMPLES)}, and labels under one of {', '.join(LABELS)}"
            )
        parts = [batch[name] for name in names]
    else:
        parts = list(batch[:2]) if isinstance(batch, tuple | list) else []
    parts = [torch.stack(part) if _are_tensors(part) else part for part in parts]
    try:
        examples, labels = map(torch.as_tensor, parts)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(_odd_batch(batch, parts, num_classes)) from error
    if labels.dim() == 2 and labels.shape[1] == num_classes > 1:
        if not bool(((labels == 0) | (labels == 1)).all() & (labels.sum(dim=1) == 1).all()):
            raise OptionError(
                f"labels have shape {list(labels.shape)}: must be one per example, [{len(examples)}], or one-hot"
            )
        labels = labels.int().argmax(dim=1)
    wanted = labels.reshape(-1)  # [B, 1] would be compared with each of B answers
    if not examples.dim() or len(wanted) != len(examples):
        raise OptionError(f"labels have shape {list(labels.shape)}: must be one per example, [{len(examples)}]")
    if examples.dim() == 4 and holds_images(input_shape) and examples.shape[1] != input_shape[0]:
        shape = list(examples.shape)  # a layer that flattens takes them
        raise OptionError(f"a batch has images {shape}: must be [B, ch, H, W], as input_shape {input_shape} says")
    if examples.is_floating_point() and not bool(examples.isfinite().all()):
        raise OptionError("examples have NaN or Inf: must be finite numbers")
    odd = wanted[(wanted < 0) | (wanted >= num_classes) | (wanted != wanted.long())] if num_classes else wanted[:0]
    if len(odd):
        raise OptionError(f"a label is {odd[0].item()}: must be the number of a class, 0 to {num_classes - 1}")
    return examples.float() if examples.is_floating_point() else examples, wanted.long()


def _check_alike(logits: Mapping[str, torch.Tensor]) -> None:
    if (other := logits.get(_AGAINST)) is not None and _sums_to_one(other):
        raise OptionError("against returns probabilities, which sum to 1: must be logits, those before its softmax")
    for name, own in logits.items():
        if other is not None and other.shape != own.shape:
            raise OptionError(f"against returns {list(other.shape)}: must be logits {list(own.shape)}, as the {name}")


def _sums_to_one(answers: torch.Tensor) -> bool:
    return bool((answers >= 0).all()) and bool(((answers.reshape(len(answers), -1).sum(1) - 1).abs() < 1e-4).all())


def _are_tensors(part: Any) -> bool:
    """Say whether a batch's part is a list of one tensor per example, all of one shape."""
    alike = isinstance(part, list | tuple) and part and all(isinstance(each, torch.Tensor) for each in part)
    return bool(alike) and len({each.shape for each in part}) == 1


def _odd_batch(batch: Any, parts: Sequence[Any], num_classes: int) -> str:
    """Return what is wrong with a batch that holds no tensors."""
    labels = parts[1] if len(parts) > 1 else ()
    if isinstance(labels, list | tuple | np.ndarray) and len(labels) and isinstance(labels[0], str):
        return f"a label is the text {labels[0]!r:.80}: must be the number of a class, 0 to {num_classes - 1}"
    return f"a batch is a {type(batch).__name__}: must be a pair of examples and labels, as tensors or arrays"


class OneLine:
    """Takes lines about a progress and shows the newest one.

    Attributes:
        live: Whether a line replaces the one before it; None for a notebook or a terminal.
    """

    def __init__(self, live: bool | None = None) -> None:
        self.live = sys.stdout.isatty() or hasattr(builtins, "__IPYTHON__") if live is None else live
        self._length = 0

    def __call__(self, line: str) -> None:
        """Show a line."""
        shown = f"\r{line.ljust(self._length)}" if self.live else f"{line}\n"
        self._length = len(line)
        sys.stdout.write(shown)
        sys.stdout.flush()

    def __enter__(self) -> OneLine:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line."""
        if self.live and self._length:
            sys.stdout.write("\n")
        self._length = 0


class Further(TypedDict, total=False):
    """Fields of :class:`.method.Job` that :func:`merge` takes by name, and the sizes of the training sets.

    Attributes:
        num_examples: Training examples per model, in their order or by client name; default: the sums of the label
            counts, else unknown.
        start: The model that all models were trained from, in any form; methods that merge updates need it. Of
            adapters it is the base, which may lie in a folder of Hugging Face, or the adapter that all began with.
        folder: A new or empty folder for a merge of weights that are larger than memory: every merged tensor is written
            when it is there, as ``model.safetensors`` or shards of 5 GB and their index, and ``outcome.student`` reads
            each when it is asked for. None to hold the result in memory.
    """

    config: Any
    student: str
    normalization: Normalization
    seed: int
    threads: int
    device: str
    proxy: torch.Tensor | None
    labelled: tuple[torch.Tensor, torch.Tensor] | None
    teacher: EnsembleSpec | str | None
    num_examples: PerModel[int]
    start: Trained
    folder: str | Path


@dataclass(frozen=True)
class Result:
    """The result of :func:`merge`; its models are on the CPU, in eval mode.

    Attributes:
        method: The method's key.
        clients: The names of the merged models.
        outcome: The method's own outcome.
        job: The method's whole input.
    """

    method: str
    clients: tuple[str, ...]
    outcome: Outcome = field(repr=False)
    job: Job = field(repr=False)

    @cached_property
    def student(self) -> nn.Module | None:
        """The one resulting model, from normalised examples [B, ...] to logits [B, C]; None if the method has none.

        Of merged adapters it is the merge on the base of a :class:`.shared_base.SharedBase`, if ``model`` was one.
        """
        if self.adapter is not None and isinstance(base := unformed(self.job.builders[self.job.student]), SharedBase):
            return base.with_adapter(self.adapter.adapter)
        return None if self.outcome.student is None else load_model(self.outcome, self.job)

    @cached_property
    def ensemble(self) -> Ensemble | None:
        """The resulting ensemble, from normalised examples [B, ...] to logits [B, C]; None if the method has none."""
        return None if self.outcome.ensemble is None else build_ensemble(self.job, self.outcome.ensemble)

    @cached_property
    def adapter(self) -> MergedAdapter | None:
        """The merged LoRA adapter; None if the models were none."""
        return describe_merge(self.method, self.job, self.outcome)

    def evaluate(
        self, loader: Iterable[tuple[torch.Tensor, torch.Tensor]], against: nn.Module | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the scores of ``student`` and ``ensemble``, those that there are.

        Args:
            loader: Batches of normalised examples [B, ...] and labels [B], [B, 1] or one-hot, as tensors or arrays:
                pairs, longer tuples that begin with them, or dicts that have them under a usual name. Also a dataset of
                pairs.
            against: Another model from such examples to logits [B, C], as a client's own or another merge's result;
                its output is read by :func:`strategies.core.outputs.logits_of`.

        Returns:
            Of each model ``accuracy`` in %, ``scores`` with 95 % intervals, the confusion matrix and more; see
            :func:`strategies.scores.values.describe`. With ``against`` also ``gain``: by score, how much better than it
            the model is on the same examples, above 0 if it is, with its 95 % interval.

        Raises:
            OptionError: The loader yields no example, not one label per example, or a label that is no class; or
                ``against`` returns anything but logits of these classes.
        """
        if isinstance(loader, torch.utils.data.Dataset) and not isinstance(loader, torch.utils.data.IterableDataset):
            loader = torch.utils.data.DataLoader(loader, batch_size=256)
        if not isinstance(loader, Iterable):
            raise OptionError(f"loader is {_kind(loader)}: must be batches of examples and labels, as a DataLoader")
        if against is not None and not isinstance(against, nn.Module):
            raise OptionError(f"against is {_kind(against)}: must be a module, as a result's student or ensemble")
        models: dict[str, nn.Module] = {
            name: model for name in ("student", "ensemble") if (model := getattr(self, name)) is not None
        }
        models |= {} if against is None else {_AGAINST: against}
        answered: dict[str, list[torch.Tensor]] = {name: [] for name in models}
        truth = list[torch.Tensor]()
        with torch.no_grad(), nullcontext() if against is None else evaluating(against):
            for batch in loader:
                examples, wanted = read_batch(batch, self.job.num_classes, own := self.job.input_shape)
                shape = list(examples.shape)
                truth.append(wanted)
                for name, model in models.items():
                    try:
                        output = model(examples)
                    except MODEL_ERRORS as error:
                        raise OptionError(
                            f"the {name} does not take a batch of {examples.dtype} {shape}: must be like "
                            f"normalised examples [B, {', '.join(map(str, own))}]: {error!s:.200}"
                        ) from error
                    try:
                        answered[name].append(logits_of(output).float())
                    except TypeError as error:
                        raise OptionError(f"the {name} {error}") from error
        if not sum(map(len, truth)):
            raise OptionError("loader yields no example: must yield at least one batch of examples and labels")
        labels = torch.cat(truth).long()
        logits = {name: torch.cat(parts) for name, parts in answered.items()}
        _check_alike(logits)
        answers = {name: Answers.of(each, labels) for name, each in logits.items()}
        found = {name: describe(each.sums()) for name, each in answers.items() if name != _AGAINST}
        for name in found if against is not None else ():
            before, after = (answers[each].effects() for each in (_AGAINST, name))
            found[name]["gain"] = as_json(differences(before, after, labels.numpy(), logits[name].shape[1]))
        return found

    def save(self, folder: str | Path, scores: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Write ``student.safetensors`` and ``ensemble/``, those that there are, and ``model_card.md``.

        Of merged adapters it is the folder that :meth:`.adapters.MergedAdapter.save` writes.

        Args:
            folder: The folder, new or not; :func:`load_ensemble_module` reads the ensemble.
            scores: What :meth:`evaluate` has returned, for the card.

        Raises:
            OptionError: An argument is something else.
            StoreError: The folder holds a model that this result does not replace, or the disk refuses.
        """
        if self.adapter is not None:
            self.adapter.save(folder)
            return
        if not isinstance(folder, str | Path) or "\0" in str(folder):
            raise OptionError(f"folder is {folder!r}: must be the name of a folder, new or not")
        odd = {} if scores is None else scores.values() if isinstance(scores, Mapping) else [scores]
        if not all(isinstance(each, Mapping) and "scores" in each for each in odd):
            raise OptionError(f"scores are {str(scores)[:80]}: must be what evaluate() has returned")
        place = expand_user(folder)
        parts = {STUDENT_FILE: self.outcome.student, FOLDER_NAME: self.outcome.ensemble}
        builders = {name: unformed(build) for name, build in self.job.builders.items()}
        members = {up.architecture for up in self.job.uploads} if self.outcome.ensemble is not None else set()
        if lost := lost_buffer({name: build for name, build in builders.items() if name in members}):
            raise StoreError(
                f"the models differ in buffer {lost}, which is not in their state_dict, so a saved ensemble would lose "
                "it: must be registered with persistent=True"
            )
        with store_errors(place):
            if other := [name for name, part in parts.items() if part is None and (place / name).exists()]:
                raise StoreError(f"{place / other[0]} is of another result: must be a folder without it")
            make_folder(place)
        if self.outcome.student is not None:
            save_weights(place / STUDENT_FILE, self.outcome.student)
        if self.outcome.ensemble is not None:
            forms = forms_of(self.job.builders)
            save_ensemble(place / FOLDER_NAME, self.outcome.ensemble, self.job.uploads, forms)
        makers = {name: maker for name, build in builders.items() if name != STATES and (maker := maker_of(build))}
        card = write_card(self.method, self.job, self.outcome, makers=makers, scores=scores or {})
        with store_errors(place):
            atomic_write(place / CARD_FILE, card.encode())


def merge(
    models: Sequence[Trained] | Mapping[str, Trained] | str | Path,
    method: str = "tally",
    *,
    num_classes: int | None = None,
    input_shape: tuple[int, int, int] | None = None,
    model: Model | None = None,
    label_counts: PerModel[Sequence[int]] | None = None,
    log: Callable[[str], None] | None = None,
    **further: Unpack[Further],
) -> Result:
    """Merge trained models into one model or an ensemble, in this process.

    Args:
        models: Modules, state dicts, checkpoint files, or PEFT's folders of LoRA adapters; a mapping of client
            name -> one of these; or the folder that holds such files or folders, each named after its client.
        method: A key of :data:`.method.METHODS`.
        num_classes: C; None for a method that merges the weights of any model, as ``"ties"``.
        input_shape: See :attr:`.method.Job.input_shape`; None as for the number of classes.
        model: A callable that returns a fresh module, or architecture name -> callable. Modules need none: their
            layers are copied, and a student starts from what the layers' own ``reset_parameters`` draw. Parameters
            that all modules freeze, but not all of theirs, stay as they are. State dicts and files need none where
            their weights alone are merged; the result is then ``outcome.student``, without a module.
        label_counts: Training examples per class [M][C], in the order of the models or by client name; None if unknown.
        log: Takes a line about the progress; None shows one line that is written over, in a notebook or on a terminal.
        further: Fields of the job, such as ``config``, ``student`` and ``seed``; see :class:`Further`. Options of the
            method go into its config.

    Returns:
        The result; it depends on the order of clients' names alone, not on that of a mapping.

    Raises:
        OptionError: An argument is out of its range, the method needs an input that is missing, or modules differ in
            more than their weights where it needs one architecture.
        UploadError: A model's weights are damaged, not finite, or of no known architecture, or models that name their
            classes (``id2label``, ``class_to_idx``, ``classes``) differ in them.
        OneShotError: The method ended with a model of NaN or Inf.
    """
    if not isinstance(method, str):
        raise OptionError(f"method is {_kind(method)}: must be a name, one of {', '.join(METHODS)}")
    chosen = METHODS[method]
    _check_further({"log": log, **further}, chosen)
    check_described(chosen, num_classes, input_shape)
    input_shape = None if input_shape is None else check_shape(input_shape)
    num_classes, input_shape = num_classes or 0, UNKNOWN_SHAPE if input_shape is None else input_shape
    named = name_models(models)
    files = [Path(one) for one in named.values() if isinstance(one, str | Path)]
    notes = [*_compare_classes(named), *same_training_notes(files), *_shared_notes(named)]
    named = _as_adapters(named, chosen)
    adapters = open_adapters(named)
    if adapters:
        named = {
            client: one.to_state() if chosen.any_model else _members(one, model) for client, one in adapters.items()
        }
    sizes = further.pop("num_examples", None)
    config = choose_config(further.get("config"), chosen)
    facts = _facts(named, label_counts, sizes, num_classes)
    kept = {client: keep_weights(client, one) for client, one in named.items()}
    start, folder = further.pop("start", None), further.pop("folder", None)
    if start is not None:
        _check_form("start", start)
    copies = _copies(named, model, input_shape if num_classes else None, chosen, config)
    if STATES in copies.builders:  # the counts are checked, and no module says more
        num_classes, input_shape = 0, UNKNOWN_SHAPE
    if adapters and chosen.any_model:
        began: Any = None if start is None else open_start(start)
        own = next(iter(copies.builders))
        uploads = tuple(
            Upload(replace(facts[each], architecture=own), partial(dict, kept[each])) for each in sorted(kept)
        )
    else:
        began = None if start is None else _open(keep_weights("start", start))
        if num_classes:
            uploads = _uploads(kept, facts, copies, notes)
        else:
            uploads, began = _open_uploads(kept, facts, copies, began, notes)
    student = _student(further.get("student"), chosen, uploads, copies)
    classifiers = num_classes and not adapters  # other starts have the models' names already
    began = _as_student(began, Signatures(copies.builders)[student], notes) if classifiers else began
    defaults = {"normalization": default_normalization(input_shape), "device": "auto"}
    given: dict[str, Any] = {
        **defaults,
        **{name: value for name, value in further.items() if value is not None},
        "threads": int(further.get("threads") or 0),
        "student": student,
        "config": config,
        "collect": _collector(folder, chosen, uploads, alone=not (adapters or num_classes)),
    }
    if began is not None or adapters:  # adapters without a start began at the base
        given |= {"start": began, "clients_seed": given.get("seed", 0)}
    job = Job(uploads, copies.builders, num_classes=num_classes, input_shape=input_shape, **given)
    job = _checked(_with_labelled(job), chosen, copied=model is None)
    notes += [
        f"model {name!r} {build.form}" for name, build in job.builders.items() if isinstance(build, FormedBuilder)
    ]
    for said in notes:
        with OneLine() as note:
            (log or note)(said)
    if further.get("normalization") is None and holds_images(input_shape):
        with OneLine() as note:  # a line of its own, which no progress is written over
            (log or note)(ASSUMED)
    with OneLine() as line, Journal(None, log or line, label=method) as journal:
        outcome = check_finite(chosen, InProcess().run(chosen, job, journal))
    clients = tuple(upload.client for upload in uploads)
    return Result(method, clients, outcome, Job(**{**vars(job), "device": "cpu"}))


def _shared_notes(named: Mapping[str, Trained]) -> list[str]:
    """Return a line for models that lie at one place of the memory or the disk, as a list of one module does."""
    places, files = dict[Any, list[str]](), dict[Any, list[str]]()
    for client, one in named.items():
        if isinstance(one, str | Path) and expand_user(one).exists():
            status = expand_user(one).stat()
            files.setdefault((status.st_dev, status.st_ino), []).append(client)
        state = one.state_dict() if isinstance(one, nn.Module) else one if isinstance(one, Mapping) else {}
        places.setdefault(
            tuple(_place(*item) for item in state.items() if isinstance(item[1], torch.Tensor)), []
        ).append(client)
    return [
        f"models {shorten_list(clients)} are one and the same: must be copies, as copy.deepcopy(model)"
        for place, clients in places.items()
        if len(clients) > 1 and not all(isinstance(part, str) for part in place)
    ] + [
        f"models {shorten_list(clients)} are one file: must be a file of each client"
        for clients in files.values()
        if len(clients) > 1
    ]


def _as_student(
    began: Mapping[str, torch.Tensor] | None, wanted: Signature, notes: list[str]
) -> Mapping[str, torch.Tensor] | None:
    """Return the start by the names of the student's tensors."""
    with blaming("start"):
        return None if began is None else _named(began, wanted, notes, "start")


def _with_labelled(job: Job) -> Job:
    """Return a job whose labelled examples are checked tensors."""
    if job.labelled is None:
        return job
    examples, labels = read_batch(job.labelled, job.num_classes, job.input_shape)
    check_labelled(examples, job)
    return replace(job, labelled=(examples, labels))


def _compare_classes(named: Mapping[str, Trained]) -> list[str]:
    """Return a line if some models name their classes and others do not."""
    agreed, unnamed = Agreed(UNNAMED), list[str]()
    for client in sorted(named):
        with blaming(f"model {client!r}"):
            one = named[client]
            place = expand_user(one) if isinstance(one, str | Path) else one
            own = Agreement.of(read_classes(bare_module(place) if isinstance(place, nn.Module) else place))
            agreed.check(own)
        agreed.add(client, own)
        unnamed += [] if own.classes.words else [client]
    return unnamed_note(unnamed, len(named))


def _checked(job: Job, method: Method, *, copied: bool) -> Job:
    """Return the job with its models as plain classifiers, each of which has been tried."""
    # Where the result is an ensemble of other models than classifiers, no student is built.
    if not job.num_classes or kind_of(job.student) != CLASSIFIER:
        return job
    if method.uploads != CLASSIFIER and method.kind != "student":
        return job
    if method.uploads == CLASSIFIER:
        job = replace(job, builders=formed_builders(job))
    check_student(job, trained=method.kind == "student", trained_by_clients=not copied)
    for name in sorted({upload.architecture for upload in job.uploads} - {job.student}):
        if kind_of(name) == CLASSIFIER:
            check_student(replace(job, student=name), trained=False, trained_by_clients=not copied)
    return job


def _as_adapters(named: dict[str, Trained], method: Method) -> dict[str, Trained]:
    """Return PEFT models as their adapters where weights are merged; a classifier of an ensemble is a whole model."""
    return {client: adapter_state(client, one) for client, one in named.items()} if method.any_model else named


def _members(adapter: Adapter, model: Model | None) -> State:
    """Return an adapter's tensors for the classifiers of a shared base."""
    if not isinstance(model, SharedBase):
        raise OptionError("an ensemble of adapters needs model=SharedBase(peft_model), which holds their base")
    return model.fitted(adapter)


def _copies(
    named: Mapping[str, Trained], model: Model | None, input_shape: tuple[int, ...] | None, method: Method, config: Any
) -> Copies:
    """Return the given builders, else those of the modules, which are of one architecture where the method needs it."""
    if model is None and method.any_model and not all(isinstance(one, nn.Module) for one in named.values()):
        return Copies({STATES: _no_module}, {}, "")
    given = None if model is None else named_builders(model, input_shape)
    found = copies_of(named, method.uploads) if given is None else Copies(given, {}, "")
    if found.difference and Need.SAME_ARCHITECTURE in method.all_needs(config):
        raise OptionError(
            f"method {method.name!r} needs one architecture, but {found.difference}: choose another method, or give "
            "model=, a callable that returns the nn.Module of all"
        )
    return found


def _student(asked: str | None, method: Method, uploads: Sequence[Upload], copies: Copies) -> str:
    """Return the architecture of the result; a result that is an ensemble has none of its own, and takes any."""
    own = uploads[0].architecture
    students = {
        name: build for name, build in copies.builders.items() if kind_of(name) == CLASSIFIER
    } or copies.builders
    if asked is None and method.kind == "ensemble":
        asked = next((name for name in (base_of(own), own) if name in students), None)
    try:
        return choose_student(asked, students)
    except OptionError as error:
        why = f", because {copies.difference}; or give model=, if one nn.Module serves all" if copies.difference else ""
        raise OptionError(f"{error}{why}") from error


_TYPES: Mapping[str, tuple[type, str]] = {
    "normalization": (Normalization, "Normalization(mean=(...), std=(...)), one number per channel"),
    "log": (Callable, "a function that takes a line, as print"),  # type: ignore[dict-item]
    "seed": (Integral, "a whole number"),
    "proxy": (torch.Tensor, "a tensor of images [N, ch, H, W]"),
    "labelled": (tuple, "a pair of images [N, ch, H, W] and labels [N]"),
}


def _check_further(further: Mapping[str, Any], method: Method) -> None:
    """Refuse unknown arguments, such as an option of the method, which belongs into its config; check the threads."""
    for name in further:
        if name in {field.name for field in fields(method.config)}:
            wanted = f"{method.config.__name__}({name}=...)"
            raise OptionError(f"merge takes no {name!r}: as an option of {method.name!r} it must be in config={wanted}")
        if name not in (*Further.__annotations__, "log"):
            known = list(Further.__annotations__)
            raise OptionError(f"merge takes no {name!r}: must be one of {', '.join(known)}{meant(name, known)}")
    for name, (kind, wanted) in _TYPES.items():
        if (value := further.get(name)) is not None and not isinstance(value, kind):
            raise OptionError(f"{name} is {_kind(value)}: must be {wanted}")
    threads = further.get("threads") or 0
    if not isinstance(threads, Integral) or int(threads) < 0:
        raise OptionError(f"threads is {threads!r}: must be a whole number at least 0; 0 takes what suits the work")


def _facts(
    named: Mapping[str, Trained],
    label_counts: PerModel[Sequence[int]] | None,
    num_examples: PerModel[int] | None,
    num_classes: int,
) -> dict[str, UploadFacts]:
    """Return client -> its facts, without an architecture yet."""
    records: dict[str, dict[str, Any]] = {client: {"pretrained": True} for client in named}
    for client, counts in by_name(label_counts, named, "label_counts").items():
        if not isinstance(counts, list | tuple) or not all(isinstance(count, Real) for count in counts):
            raise OptionError(
                f"label_counts of {client!r} are {counts!r:.80}: must be a list of numbers, one per class"
            )
        records[client]["label-counts"] = [int(count) if float(count).is_integer() else count for count in counts]
    for client, size in by_name(num_examples, named, "num_examples").items():
        records[client]["num-examples"] = size
    return {
        client: UploadFacts.from_record(record, num_classes, client=client).sized()
        for client, record in records.items()
    }


def _uploads(
    kept: Mapping[str, State | str | Path], facts: Mapping[str, UploadFacts], copies: Copies, notes: list[str]
) -> tuple[Upload, ...]:
    """Return the models as checked uploads, by name; files are read one at a time, and again at each use.

    ``notes`` takes a line for each way in which the names of a model's tensors were taken for the architecture's.
    """
    uploads, signatures = [], Signatures(copies.builders)
    for client in sorted(kept):
        with blaming(f"model {client!r}"):
            own = copies.architectures.get(client) or _architecture(_state(kept[client]), signatures)
            known = replace(facts[client], architecture=own)
            own_notes = list[str]()
            _check(kept[client], known, signatures, own_notes)
            notes += [f"model {client!r}: {said}" for said in own_notes]
            read = partial(_check, kept[client], known, signatures)
        uploads.append(Upload(known, read, partial(_open_checked, kept[client], signatures[own])))
    return tuple(uploads)


def _open_uploads(
    kept: Mapping[str, State | str | Path],
    facts: Mapping[str, UploadFacts],
    copies: Copies,
    start: Mapping[str, torch.Tensor] | None,
    notes: list[str],
) -> tuple[tuple[Upload, ...], Mapping[str, torch.Tensor] | None]:
    """Return any models as uploads, by name, one tensor at a time, and the start, all by the same names.

    The names are those of the module that ``model`` builds, else of the start, else of the first model that all others
    and the start fit: a file of a start may lack counters and tied tensors.
    """
    bare, clients = STATES in copies.builders or bool(copies.architectures), sorted(kept)
    first = kept[clients[0]]

    def opened(wanted: Signature, whose: str) -> tuple[tuple[Upload, ...], Mapping[str, torch.Tensor] | None]:
        said = list[str]()
        began = _as_student(start, wanted, said)
        uploads = _open_as(wanted, kept, facts, copies, said, whose)
        notes.extend(said)
        return uploads, began

    whose = "the others" if start is None else "the start"
    try:
        if bare:
            return opened(_signature(_open(first) if start is None else start), whose)
        return opened(next(iter(Signatures(copies.builders).values())), whose)
    except UploadError:
        if not bare:
            raise
        shapes = [_shapes(_open(kept[client])) for client in clients] + ([] if start is None else [_shapes(start)])
        for client in clients:
            wanted = _signature(_open(kept[client]))
            if all(fits(own, wanted) for own in shapes):
                return opened(wanted, "the others")
        raise


def _open_as(
    wanted: Signature,
    kept: Mapping[str, State | str | Path],
    facts: Mapping[str, UploadFacts],
    copies: Copies,
    notes: list[str],
    whose: str,
) -> tuple[Upload, ...]:
    """Return the checked uploads by a model's names; ``whose`` they are, for errors."""
    uploads, form, said = [], tensor_form("tensors", exact=False), list[str]()
    for client in sorted(kept):
        own = copies.architectures.get(client) or next(iter(copies.builders))
        with blaming(f"model {client!r}"):
            tensors = _named(_open(kept[client]), wanted, said, f"model {client!r}", whose)
            for name, (shape, dtype) in wanted.items():
                if odd := odd_form(tensors[name]):  # a file is opened tensor by tensor
                    raise refusals.no_tensor(f"tensor {name!r}", odd)
                value, kind = tensors[name], dtype
                if value.is_floating_point() and getattr(torch, dtype).is_floating_point:  # of any precision
                    value = value.float() if value.dtype == torch.bfloat16 else value  # which numpy lacks
                    kind = str(value.dtype).removeprefix("torch.")
                check_arrays({name: value}, own, {name: (shape, kind)}, form)
            check_measured(tensors, own, wanted, form)
        read, opened = partial(_read_as, kept[client], wanted), partial(_open_named, kept[client], wanted)
        uploads.append(Upload(replace(facts[client], architecture=own), read, opened))
    notes += said
    return tuple(uploads)


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(state[name].shape) for name in weights_alone(dict.fromkeys(state))}


def _signature(state: Mapping[str, torch.Tensor]) -> Signature:
    """Return the signature of a state by the model's own names; what is in a file of safetensors is not tied."""
    names = own_names(weights_alone(dict.fromkeys(state)))
    if isinstance(state, dict):
        return ModelSignature({own: state[name] for own, name in names.items()})
    values = ((own, state[name]) for own, name in names.items())
    return {own: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for own, value in values}


def _named(
    tensors: Mapping[str, torch.Tensor], wanted: Signature, notes: list[str], where: str, whose: str = "the others"
) -> Mapping[str, torch.Tensor]:
    """Return tensors by a model's names; ``notes`` takes a line for each way in which they differ."""
    found = weights_alone(dict.fromkeys(tensors))
    names = match_names(found, wanted, getattr(wanted, "ties", None))
    if names.missing or names.extra:
        raise refusals.other_keys(f"tensors do not fit {whose}", names.missing, names.extra)
    notes += [f"{where}: {note}" for note in names.notes]
    return tensors if names.sources.keys() == found.keys() and not names.notes else RenamedTensors(tensors, names)


def _open_named(kept: Kept, wanted: Signature) -> Mapping[str, torch.Tensor]:
    return _named(_open(kept), wanted, [], "")


def _open_checked(kept: Kept, wanted: Signature) -> Mapping[str, torch.Tensor]:
    """Return tensors that :func:`_check` has passed, in its names and dtypes, each read when it is asked for."""
    tensors = _open(kept)
    names = match_names(weights_alone(dict.fromkeys(tensors)), wanted, getattr(wanted, "ties", None))
    return RenamedTensors(tensors, names, wanted)


def _read_as(kept: Kept, wanted: Signature) -> State:
    return weights_alone(dict(_open_named(kept, wanted)))


def _check(
    kept: State | str | Path, facts: UploadFacts, signatures: Signatures, notes: list[str] | None = None
) -> State:
    wanted = signatures[facts.architecture]
    return check_upload(_state(kept), facts.architecture, wanted, tensor_form("tensors", exact=False), notes)


def _state(kept: State | str | Path) -> State:
    return weights_alone(kept if isinstance(kept, dict) else read_checkpoint(expand_user(kept)))


def _open(kept: Kept) -> Mapping[str, torch.Tensor]:
    """Return weights by name; of a safetensors file each tensor is read when it is asked for."""
    if isinstance(kept, dict):
        return kept
    found = open_checkpoint(expand_user(kept))
    for name, value in found.items() if isinstance(found, dict) else ():
        if odd := odd_form(value):
            raise refusals.no_tensor(f"checkpoint {kept}: tensor {name!r}", odd)
    return found


def _collector(
    folder: str | Path | None, method: Method, uploads: Sequence[Upload], *, alone: bool
) -> Callable[[Iterable[tuple[str, torch.Tensor]]], State]:
    """Return what takes the merged tensors.

    Raises:
        OptionError: A folder is given, and the result is more than weights that are merged tensor by tensor.
    """
    if folder is None:
        return dict
    if not (alone and method.any_model):
        raise OptionError(
            "folder is for a merge of weights alone, tensor by tensor: must be None with num_classes, for adapters, "
            f"and for a method that merges no weights; here it is {method.name!r}. result.save(folder) writes those"
        )
    return partial(_write, expand_user(folder), list(open_weights(uploads[0])))


def _write(folder: Path, names: Sequence[str], tensors: Iterable[tuple[str, torch.Tensor]]) -> State:
    """Write merged tensors to a folder as they come, and return them as a mapping that reads each.

    Raises:
        StoreError: The folder holds files, or the disk refuses.
    """
    make_empty_folder(folder)
    with store_errors(folder):
        return cast("State", OpenFile(write_tensors(folder, tensors, names), bare=False))


def _no_module() -> nn.Module:
    raise OptionError(
        "the models were given without their module: the merged weights are result.outcome.student; for a module give "
        "model=, a callable that returns it"
    )


def _architecture(state: State, signatures: Signatures) -> str:
    """Return the only architecture with these names and shapes; a single architecture is compared later, key by key."""
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    fitting = [name for name in signatures if fits(shapes, signatures[name])]
    if len(fitting) == 1 or len(signatures) == 1:
        return next(iter(fitting or signatures))
    raise refusals.fits_no_architecture(fitting, signatures)
