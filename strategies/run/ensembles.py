"""An ensemble on disk: its members as files, the tensors of its combiner, and one JSON file that says how they fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..combiners.combiners import build_combiner
from ..core.durable import make_folder, read_json, store_errors, sync_folder
from ..core.errors import OptionError, StoreError
from ..core.facts import UploadFacts
from ..method import EnsembleSpec, ModelBuilder, Upload
from ..teacher.ensemble import Ensemble
from ..uploads.forms import with_forms
from .files import read_weights, save_weights, write_json
from .uploads import StoredWeights, verify

FOLDER_NAME = "ensemble"
_FACTS = "ensemble.json"


def save_ensemble(
    folder: Path, spec: EnsembleSpec, uploads: Sequence[Upload], architectures: Mapping[str, Any] | None = None
) -> None:
    """Write an ensemble into a folder of its own, which is made beside its place and then takes that of an earlier one.

    Args:
        folder: The folder: new, empty, or an earlier ensemble's, which is replaced and may hold files of the uploads.
        uploads: The uploads it refers to, perhaps more. Stored ones are linked, so that they take no space twice.
        architectures: Architecture name -> how its models are built, as JSON values; kept as they are.

    Raises:
        StoreError: A member has no upload, the folder holds something else, or the disk refuses.
    """
    by_name = {upload.client: upload for upload in uploads}
    if missing := [client for client in spec.clients if client not in by_name]:
        raise StoreError(f"{folder}: ensemble members without an upload: {', '.join(missing)}")
    fresh, old = (folder.with_name(f".{folder.name}.{name}") for name in ("new", "old"))
    with store_errors(folder):
        if others := [path for path in folder.iterdir() if not _ours(path)] if folder.exists() else []:
            raise StoreError(
                f"{others[0]} is not a file of an ensemble: must be a new folder, because it would be lost"
            )
        if old.exists() and not folder.exists():  # a process was killed between the two renames below
            old.replace(folder)
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)
        make_folder(fresh / "members")
        members = [_save_member(fresh, by_name[client]) for client in spec.clients]
        sync_folder(fresh / "members")  # a link is a name alone
    combiner = save_weights(fresh / "combiner.safetensors", spec.weights)
    facts = {
        "combiner": {"name": spec.combiner, "file": "combiner.safetensors", "sha256": combiner},
        "precision": spec.precision,
        "members": members,
        "architectures": architectures or {},
    }
    write_json(fresh / _FACTS, facts)
    with store_errors(folder):
        if folder.exists():
            folder.replace(old)
        fresh.replace(folder)
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def _ours(path: Path) -> bool:
    return path.name in ("members", "combiner.safetensors", _FACTS) or path.suffix == ".tmp" or path.name[0] == "."


def load_ensemble(path: Path, builders: Mapping[str, ModelBuilder]) -> tuple[EnsembleSpec, tuple[Upload, ...]]:
    """Read an ensemble back, each file checked against its digest.

    Args:
        path: The ensemble's folder, or the run folder that holds it.
        builders: Architecture name -> callable; must know every member's architecture.

    Returns:
        The ensemble, and its members as uploads in its order.

    Raises:
        StoreError: There is no ensemble, a file is damaged, or an architecture is unknown.
    """
    folder = Path(path).absolute()
    folder = folder if (folder / _FACTS).exists() else folder / FOLDER_NAME
    if not (folder / _FACTS).exists():
        raise StoreError(f"{path}: holds no ensemble (no {FOLDER_NAME}/{_FACTS})")
    facts = read_json(folder / _FACTS)
    try:
        members = tuple(_load_member(folder, member) for member in facts["members"])
        name, file, sha256 = (facts["combiner"][key] for key in ("name", "file", "sha256"))
        weights, precision = read_weights(folder / file, sha256), facts["precision"]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise StoreError(f"{folder / _FACTS}: damaged, lacks {error}") from error
    if unknown := sorted({member.architecture for member in members} - set(builders)):
        known = ", ".join(sorted(builders)) or "none"
        raise StoreError(f"{folder}: unknown architecture {', '.join(unknown)}; known are {known}")
    return EnsembleSpec(tuple(member.client for member in members), name, weights, precision), members


def load_ensemble_module(path: Path, builders: Mapping[str, ModelBuilder], *, device: str = "cpu") -> Ensemble:
    """Build the ensemble that a run folder, or an ensemble's own folder, holds.

    Raises:
        OptionError: The builders are no mapping.
        StoreError: There is no ensemble, a file is damaged, or an architecture is unknown.
    """
    if not isinstance(builders, Mapping):
        raise OptionError(
            f"builders is {builders!r}: must be a dict of architecture name -> callable, as its card says"
        )
    spec, members = load_ensemble(path, builders)
    folder = Path(path).absolute()
    facts = read_json(next(place for place in (folder, folder / FOLDER_NAME) if (place / _FACTS).exists()) / _FACTS)
    builders = with_forms(builders, facts["architectures"])
    combiner = build_combiner(spec.combiner, spec.weights, builders[members[0].architecture])
    return Ensemble.from_uploads(members, builders, combiner, device=device, precision=spec.precision)


def _save_member(folder: Path, upload: Upload) -> dict[str, Any]:
    name = f"members/{upload.client}.safetensors"
    if isinstance(upload.read, StoredWeights):
        sha256 = upload.read.sha256
        _link_or_copy(upload.read.path, folder / name)
        verify(folder / name, sha256, f"upload of client {upload.client!r}")
    else:
        sha256 = save_weights(folder / name, upload.read())
    facts = upload.facts.as_row()
    del facts["pretrained"]  # an ensemble does not keep it
    return {"client": upload.client, "architecture": upload.architecture, "file": name, "sha256": sha256, **facts}


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another disk, or a file system without hard links.
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _load_member(folder: Path, member: dict[str, Any]) -> Upload:
    file, sha256 = folder / member["file"], member["sha256"]
    verify(file, sha256, f"ensemble member {member['client']!r}")
    facts = UploadFacts.from_row({key: member[key] for key in member if key not in ("file", "sha256")})
    if not all(isinstance(name, str) for name in (facts.client, facts.architecture)):
        raise ValueError("a member's name or architecture")
    return Upload(facts, StoredWeights(file, sha256))
