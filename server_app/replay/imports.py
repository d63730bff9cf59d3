"""Imports checkpoints of other projects as stored uploads, which a replay then distils."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fl_app.config import AppConfig
from fl_app.models import ARCHITECTURES, HEAD_FORM, USERS_FORM, is_users, known_name
from fl_app.models.uploaded import SUMS
from server_app.launch.console import oneshot
from server_app.launch.guard import sigterm_as_interrupt
from server_app.settings.build import build_job, held_out
from server_app.settings.read import Settings, read_settings
from strategies.core import refusals
from strategies.core.checkpoints import (
    ADAPTER_CONFIG,
    SUFFIXES,
    checkpoint_bytes,
    client_name_of,
    is_adapter,
    no_checkpoints,
    read_checkpoint,
    read_classes,
    same_training_notes,
    scan_checkpoints,
)
from strategies.core.durable import MIB, make_folder, read_json, staged, store_errors, sync_folder
from strategies.core.errors import OptionError, StoreError, UploadError, blaming, shorten_list
from strategies.core.facts import (
    ADAPTER,
    CLIENT_NAME,
    STATISTICS,
    UNKNOWN_SHAPE,
    UNNAMED,
    Agreed,
    Agreement,
    UploadFacts,
    default_normalization,
    is_head,
    kind_of,
    unnamed_note,
)
from strategies.core.options import Scalar, reject_unknown
from strategies.core.places import nearest_existing
from strategies.core.scan import Scan
from strategies.core.toml import read_toml_file
from strategies.merging.adapters import open_adapters
from strategies.method import METHODS, Job
from strategies.run import FACTS_FILE, runs_folder
from strategies.run.run_folder import RunFolder, default_run_dir, open_run
from strategies.run.uploads import equal_notes
from strategies.uploads.builders import check_described
from strategies.uploads.checks import Signature, Signatures, check_outputs, check_size, check_upload
from strategies.uploads.tensors import tensor_form

# The map file's table for files without one of their own; no checkpoint has this name, because a file has a suffix.
_KEYS = "keys"
_FACTS = ("name", "architecture", "num-examples", "label-counts", _KEYS)


@dataclass(frozen=True)
class Entry:
    """A checkpoint to import.

    Attributes:
        facts: The known facts of its upload, with its client name.
        keys: Prefix of its tensors' names -> prefix of the architecture's own names, or False to leave them out.
    """

    path: Path
    facts: UploadFacts
    keys: Mapping[str, str | bool] = field(default_factory=dict)


def list_checkpoints(
    folder: Path, map_file: Path | None, *, architecture: str, known: Collection[str], num_classes: int
) -> tuple[list[Entry], Scan]:
    """List the checkpoints of a folder by file name, and what else it holds; of subfolders only saved models are taken.

    Args:
        map_file: A TOML file: a table per file name with ``name``, ``architecture``, ``num-examples``,
            ``label-counts`` and ``keys``, all optional. A table ``keys`` holds for the files without their own. None
            for no map.
        architecture: The architecture of files without one in the map.
        known: The server's architectures, which the map has to fit, as its ``num_classes``.

    Raises:
        OptionError: There are no checkpoints, the map is invalid, or two files give the same client name.
        UploadError: A number in the map is invalid.
        StoreError: The folder cannot be read.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is not a folder: must be one with checkpoints ({', '.join(SUFFIXES)})")
    with store_errors(folder):
        found = scan_checkpoints(folder)
    if architecture == ADAPTER:
        adapters = tuple(filter(is_adapter, found.taken))
        found = replace(found, taken=adapters, others=(*found.others, *sorted(set(found.taken) - set(adapters))))
    files = found.taken
    if not files:
        raise OptionError(no_checkpoints(found))
    tables = {} if map_file is None else _read_map(map_file, [path.name for path in files])
    shared = tables.get(_KEYS, {})
    entries = [
        _entry(
            path,
            {"architecture": architecture, _KEYS: shared, **tables.get(path.name, {})},
            known,
            num_classes,
            where=f"{path}:" if map_file is None else _where(map_file, path.name),
        )
        for path in files
    ]
    _refuse_same_names(entries)
    return entries, found


def _read_map(map_file: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    tables = read_toml_file(map_file, "map")
    for name, table in tables.items():
        if name not in (*names, _KEYS):
            hint = f'; names with dots are quoted, ["{name}.pt"]' if not Path(name).suffix else ""
            raise OptionError(f"map {map_file} names {name!r}: must be the checkpoints {shorten_list(names)}{hint}")
        if not isinstance(table, dict):
            raise OptionError(f"map {map_file}: {name!r} is {type(table).__name__}: must be a table of facts")
        if name != _KEYS and (unknown := sorted(set(table) - set(_FACTS))):
            raise OptionError(f"{_where(map_file, name)} has {unknown[0]!r}: must be {', '.join(_FACTS)}")
    return tables


def _entry(path: Path, facts: Mapping[str, Any], known: Collection[str], num_classes: int, *, where: str) -> Entry:
    if facts["architecture"] not in known:
        raise OptionError(f"{where} architecture is {facts['architecture']!r}: must be {', '.join(known)}")
    client = _client_name(path, facts.get("name"), where)
    with blaming(where.removesuffix(":")):
        found = UploadFacts.from_record(
            {**facts, "pretrained": True}, num_classes, client=client, architecture=facts["architecture"]
        ).sized()
    return Entry(path, found, _prefixes(facts[_KEYS], where))


def _where(map_file: Path, name: str) -> str:
    return f'map {map_file}, ["{name}"]:'


def _client_name(path: Path, named: object, where: str) -> str:
    if named is None:
        fitted = client_name_of(path)
        if not fitted:
            raise OptionError(f"{path}: no client name follows from this file name; give it one by name in --map")
        return fitted
    if not isinstance(named, str) or not CLIENT_NAME.fullmatch(named):
        raise OptionError(f"{where} name is {str(named)[:80]!r}: must match {CLIENT_NAME.pattern}")
    return named


def _prefixes(keys: object, where: str) -> dict[str, str | bool]:
    if not isinstance(keys, dict):
        raise OptionError(f"{where} keys is {type(keys).__name__}: must be a table, old prefix -> new prefix")
    for old, new in keys.items():
        if not isinstance(new, str) and new is not False:
            raise OptionError(
                f"{where} keys has {old!r} = {type(new).__name__}: must be a text, old prefix -> new prefix, or false, "
                "which leaves such tensors out; "
                f'prefixes with dots are quoted, "{old}." = ""'
            )
    return keys


def _refuse_same_names(entries: Sequence[Entry]) -> None:
    taken: dict[str, Entry] = {}
    for entry in entries:
        if (other := taken.setdefault(entry.facts.client, entry)) is not entry:
            raise OptionError(
                f"{other.path.name} and {entry.path.name} both give the client name {entry.facts.client!r}: must be "
                "one file per name; give one of them another by name in --map"
            )


@dataclass(frozen=True)
class ImportRequest:
    """The options of an import.

    Attributes:
        architecture: The architecture of files without one in the map; also ``model.name`` of the new run. Empty where
            the folder holds PEFT's folders of LoRA adapters.
        settings: Settings of the new run: its data set, its student, its server stage.
        skip_bad: Leave out refused files; otherwise one of them refuses the whole import.
    """

    folder: Path
    architecture: str
    settings: Mapping[str, Scalar]
    map_file: Path | None = None
    out: Path | None = None
    skip_bad: bool = False


def import_checkpoints(request: ImportRequest, *, log: Callable[[str], None]) -> dict[str, Any]:
    """Store every checkpoint of a folder as an upload in a new run folder, which is made whole or not at all.

    Returns:
        The run folder, its uploads, the files left out, and the next command.

    Raises:
        OptionError: A setting or the map is invalid.
        UploadError: A file is refused; the error names every refused file, and its reason.
        StoreError: The run folder cannot be made.
        DataError: The data set is missing; the error names the remedy.
    """
    if request.architecture in ("", ADAPTER):
        return _import_adapters(request, log)
    settings = _settings(request)
    images, split = held_out(settings)
    job = build_job(settings, split, images)
    entries, found = list_checkpoints(
        request.folder, request.map_file, architecture=request.architecture, known=job.builders,
        num_classes=job.num_classes,
    )  # fmt: skip
    target = _target(request, settings.app.run_dir)
    facts = {"settings": {**settings.flat, "resume": "", "run-dir": ""}, **_origin(request, entries)}
    return _fill(
        request, entries, found, target, settings.choice.name, log,
        opened=lambda place: open_run(place, settings.choice.name, job, identity={}, facts=facts),
        store=lambda run: _store(run, entries, job, int(settings.app.max_upload_mib * MIB), log),
    )  # fmt: skip


def _import_adapters(request: ImportRequest, log: Callable[[str], None]) -> dict[str, Any]:
    """Import PEFT's folders of LoRA adapters, which a replay merges without their base."""
    folder = request.folder
    with store_errors(folder):
        inside = list(folder.iterdir()) if folder.is_dir() else []
    if inside and not any(map(is_adapter, inside)):
        if deeper := sorted(folder.glob(f"*/*/{ADAPTER_CONFIG}")):  # such as a trainer's checkpoint-100, or a name's
            place = deeper[0].parent.relative_to(folder)
            raise OptionError(
                f"{folder}: {place} is the folder of a LoRA adapter: must be named after its client, directly in "
                f"{folder}; move it up, one of each client"
            )
        raise OptionError(
            f"{folder} holds no folders of LoRA adapters ({ADAPTER_CONFIG}): for other checkpoints needs "
            f"--architecture, one of {', '.join((*ARCHITECTURES, SUMS, HEAD_FORM))}, {USERS_FORM}"
        )
    reject_unknown(request.settings, ["method", "seed", "max-upload-mib"])
    method = str(request.settings.get("method", "fedavg"))
    app = AppConfig.from_settings({key: value for key, value in request.settings.items() if key != "method"})
    check_described(METHODS[method], None, None)
    entries, found = list_checkpoints(folder, request.map_file, architecture=ADAPTER, known=(ADAPTER,), num_classes=0)
    if keyed := [entry.path.name for entry in entries if entry.keys]:
        raise OptionError(f"map {request.map_file} has keys for {keyed[0]!r}: must have none, PEFT names the tensors")
    facts = {
        "method": method, "seed": app.seed, "threads": 0, "student": ADAPTER, "num-classes": 0,
        "input-shape": UNKNOWN_SHAPE, "normalization": list(default_normalization(UNKNOWN_SHAPE)),
        "teacher": "method", **_origin(request, entries),
    }  # fmt: skip
    return _fill(
        request, entries, found, _target(request, ""), method, log,
        opened=lambda place: RunFolder.open_or_create(place, facts),
        store=lambda run: _store_adapters(run, entries, int(app.max_upload_mib * MIB)),
    )  # fmt: skip


def _store_adapters(run: RunFolder, entries: Sequence[Entry], max_bytes: int) -> dict[str, str]:
    """Store the adapters, with one in memory at a time, and return client -> reason of its refusal."""
    refused = dict[str, str]()
    for entry in entries:
        try:
            with blaming(f"checkpoint {entry.path}"):
                check_size(_unpacked_size(entry.path), max_bytes, "its contents")
            adapter = open_adapters({str(entry.path): entry.path})[str(entry.path)]
        except UploadError as error:
            refused[entry.facts.client] = str(error)
            run.round(1).refuse(entry.facts.client, str(error))
            continue
        run.round(1).accept(entry.facts, adapter.to_state())
    return refused


def _origin(request: ImportRequest, entries: Sequence[Entry]) -> dict[str, Any]:
    files = {entry.facts.client: entry.path.name for entry in entries}
    return {"imported-from": request.folder.absolute(), "imported-files": files}


def _fill(  # noqa: PLR0913  what both kinds of import differ in
    request: ImportRequest,
    entries: Sequence[Entry],
    found: Scan,
    target: Path,
    method: str,
    log: Callable[[str], None],
    *,
    opened: Callable[[Path], RunFolder],
    store: Callable[[RunFolder], dict[str, str]],
) -> dict[str, Any]:
    """Make the run folder, whole or not at all, and return the import's result."""
    files = {entry.facts.client: entry.path.name for entry in entries}
    for note in same_training_notes(entry.path for entry in entries):
        log(f"checkpoints in {request.folder}: {note}")
    with _whole_or_absent(target) as staging:
        with opened(staging) as run:
            refused = store(run)
            if refused and not (request.skip_bad and len(refused) < len(entries)):
                raise refusals.refused(_refusal(request, entries, refused))
            uploads = run.round(1).records()
        for reason in refused.values():
            log(f"left out: {reason}")
    return {
        "status": "imported",
        "run_dir": str(target),
        "imported_from": str(request.folder.absolute()),
        "uploads": [
            {"client": u.client, "file": files[u.client], "architecture": u.facts.architecture, "bytes": u.bytes,
             "num_examples": u.facts.num_examples, "label_counts": u.facts.label_counts}
            for u in uploads
        ],
        "refused": len(refused),
        "left_out": [str(path.relative_to(request.folder)) for path in (*found.others, *found.hidden)],
        "refusals": [{"client": client, "file": files[client], "reason": why} for client, why in refused.items()],
        "next": oneshot("replay", target, "--method", method),
    }  # fmt: skip


def import_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the import's result as plain lines."""
    uploads = result["uploads"]
    names, architectures = (max(len(upload[key]) for upload in uploads) for key in ("client", "architecture"))
    lines = [
        f"{upload['client']:<{names}}  {upload['architecture']:<{architectures}}  {upload['bytes'] / MIB:8.2f} MiB"
        for upload in uploads
    ]
    left = result["left_out"]
    others = f", {len(left)} other files left out: {shorten_list(left)}" if left else ""
    lines.append(f"uploads      {len(uploads)} imported, {result['refused']} refused{others}")
    return [*lines, f"run folder   {result['run_dir']}", f"next         {result['next']}"]


def fit(
    state: Mapping[str, torch.Tensor],
    facts: UploadFacts,
    wanted: Signature,
    *,
    prefixes: Mapping[str, str | bool],
    notes: list[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return weights in the architecture's form: its names, order and dtypes, with finite values.

    Half and double precision become the architecture's; names fit by :func:`strategies.core.names.match_names`.

    Args:
        prefixes: Prefix of a name -> prefix of the architecture's own names, or False to leave such tensors out; the
            longest match counts.
        notes: Takes a line for each way in which the names differ and were taken for the same.

    Raises:
        UploadError: The error names the first tensors that are missing, unexpected, or of another shape or kind.
    """
    named = _renamed(state, prefixes)
    return check_upload(named, facts.architecture, wanted, tensor_form("tensors", exact=False), notes)


def _settings(request: ImportRequest) -> Settings:
    if not known_name(request.architecture, sums=True):
        allowed = ", ".join((*ARCHITECTURES, SUMS, HEAD_FORM))
        raise OptionError(f"--architecture is {request.architecture!r}: must be {allowed}, {USERS_FORM}")
    given = request.settings
    if (named := given.get("model.name", request.architecture)) != request.architecture:
        raise OptionError(
            f"setting 'model.name' is {named!r}: must be that of --architecture, {request.architecture!r}; "
            "the server's own is 'model.student'"
        )
    if given.get("resume"):
        raise OptionError(f"setting 'resume' is {given['resume']!r}: must be empty, an import makes a new run folder")
    # Sums are no model, so the server's result has another architecture.
    sums = kind_of(request.architecture) == STATISTICS
    chosen = {**given, "model.name": request.architecture}
    if sums:
        chosen = {"model.per-client": request.architecture, **given}
    tables = {} if request.map_file is None else read_toml_file(request.map_file, "map")
    named_by = [table.get("architecture") for table in tables.values() if isinstance(table, dict)]
    own = [name for name in named_by if isinstance(name, str) and is_users(name)]
    if own and not given.get("model.accepted"):
        chosen["model.accepted"] = ", ".join(dict.fromkeys((*read_settings(chosen).app.model.mix(), *own)))
    return read_settings(chosen)


def _target(request: ImportRequest, named: str) -> Path:
    folder = re.sub(r"[^A-Za-z0-9._-]+", "-", request.folder.absolute().name)
    target = default_run_dir(str(request.out or named), f"import-{folder}", parent=runs_folder())
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise StoreError(f"{target} holds something: must be a new folder, or an empty one")
    return target


@contextmanager
def _whole_or_absent(target: Path) -> Iterator[Path]:
    """Yield a hidden folder near the target, which replaces the target if the block succeeds, else is removed."""
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        with store_errors(target):
            staging = stack.enter_context(staged(nearest_existing(target.parent), target.name, _is_import))
        yield staging
        with store_errors(target):
            make_folder(target.parent)
            staging.replace(target)
            sync_folder(target.parent)


def _is_import(folder: Path) -> bool:
    """Return whether a folder is one that an import fills, or has left."""
    try:
        facts = read_json(folder / FACTS_FILE)
    except StoreError:
        return False
    return isinstance(facts, dict) and "imported-from" in facts


def _store(
    run: RunFolder, entries: Sequence[Entry], job: Job, max_bytes: int, log: Callable[[str], None]
) -> dict[str, str]:
    """Store the uploads, with one checkpoint in memory at a time, and return client -> reason of its refusal."""
    signatures, refused = Signatures(job.builders), dict[str, str]()
    agreed, others, unnamed = Agreed(job.agreement), Agreed(UNNAMED), list[str]()
    for entry in entries:
        try:
            notes, facts = list[str](), entry.facts
            with blaming(f"checkpoint {entry.path}"):
                classes = read_classes(entry.path)
                own = Agreement.of_file(classes, job.agreement)
                agreed.check(own)
                others.check(Agreement.of(classes))
            facts = replace(facts, agreement=own)
            state = _read(entry, signatures, max_bytes, notes)
            for note in notes:
                log(f"checkpoint {entry.path}: {note}")
            name = entry.facts.architecture
            if kind_of(name) == STATISTICS or is_head(name):
                with blaming(f"checkpoint {entry.path}"):
                    examples = facts.num_examples
                    warning = check_outputs(name, state, job.builders[name], job.input_shape, num_examples=examples)
                if warning:
                    log(f"checkpoint {entry.path}: {warning}")
        except UploadError as error:
            refused[entry.facts.client] = str(error)
            run.round(1).refuse(entry.facts.client, str(error))
            continue
        run.round(1).accept(facts, state)
        others.add(facts.client, Agreement.of(classes))
        unnamed += [] if classes else [facts.client]
    for note in [*unnamed_note(unnamed, len(entries) - len(refused)), *equal_notes(run.round(1).records())]:
        log(note)
    return refused


def _read(
    entry: Entry, signatures: Mapping[str, Signature], max_bytes: int, notes: list[str]
) -> dict[str, torch.Tensor]:
    with blaming(f"checkpoint {entry.path}"):
        check_size(_unpacked_size(entry.path), max_bytes, "its contents")
    state = read_checkpoint(entry.path)
    with blaming(f"checkpoint {entry.path}"):
        fitted = fit(state, entry.facts, signatures[entry.facts.architecture], prefixes=entry.keys, notes=notes)
        check_size(sum(value.nbytes for value in fitted.values()), max_bytes, "its weights")
    return fitted


def _unpacked_size(path: Path) -> int:
    """Return the unpacked size of a checkpoint in bytes; a torch file is a zip archive, perhaps compressed."""
    if is_adapter(path):
        return sum(map(_unpacked_size, path.glob("adapter_model.*")))
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(info.file_size for info in archive.infolist())
    except (OSError, NotImplementedError, ValueError, zipfile.BadZipFile):
        return checkpoint_bytes(path)


def _renamed(state: Mapping[str, torch.Tensor], prefixes: Mapping[str, str | bool]) -> dict[str, torch.Tensor]:
    renamed, before = dict[str, torch.Tensor](), dict[str, str]()
    for key, value in state.items():
        old = max((prefix for prefix in prefixes if key.startswith(prefix)), key=len, default=None)
        if old is not None and prefixes[old] is False:
            continue
        new = key if old is None else f"{prefixes[old]}{key.removeprefix(old)}"
        if (other := before.setdefault(new, key)) != key:
            raise refusals.same_tensor_name(other, key, new)
        renamed[new] = value
    return renamed


def _refusal(request: ImportRequest, entries: Sequence[Entry], refused: Mapping[str, str]) -> str:
    all_of_them = "" if len(refused) == len(entries) else "; --skip-bad imports the others"
    what = f"{len(refused)} of {len(entries)} checkpoints in {request.folder} are refused, so nothing is imported"
    files: dict[str, list[str]] = {}  # a reason without the begin that names its file -> the files
    for entry in entries:
        if (reason := refused.get(entry.facts.client)) is not None:
            files.setdefault(reason.removeprefix(f"checkpoint {entry.path}"), []).append(entry.path.name)
    reasons = [f"{', '.join(names)}: {why.lstrip(': ')}" for why, names in files.items()]
    return f"{what}{all_of_them}: {'; '.join(reasons)}"
