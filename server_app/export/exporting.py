"""Exports a run: its models as files that load without this package, each compared with its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server_app.export.programs import SUFFIXES, check_packages, write_programs
from server_app.export.stored_models import StoredModels, stored_models
from server_app.launch.guard import sigterm_as_interrupt
from server_app.report.plots import as_given
from strategies.core.durable import locked, make_folder, sha256_file, staged, store_errors
from strategies.core.errors import OptionError, StoreError
from strategies.core.places import expand_user
from strategies.run.files import read_json, write_json

FACTS = "export.json"


def export_run(
    run: Path, *, only: str = "", model: str = "", out: Path | None = None, log: Callable[[str], None]
) -> dict[str, Any]:
    """Write the models of a finished run, and say what they take and return.

    Args:
        run: The run folder.
        only: ``"torch"`` or ``"onnx"``; empty for both.
        model: ``module:attribute`` that builds the models of a run of another project.
        out: The folder of the files; None for ``export`` in the run folder. Files of an earlier export are replaced,
            except those of the same models in the other form. Hidden files are left as they are, but for the folders
            that killed exports left.
        log: Takes a line for the user.

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
    """Return the facts of an earlier export in a folder; empty without one.

    Raises:
        OptionError: The folder holds a file that no export has written.
    """
    facts = read_json(target / FACTS) if (target / FACTS).exists() else {}
    ours = isinstance(facts, dict) and isinstance(facts.get("files"), dict)
    known = {FACTS, *facts["files"]} if ours else set()
    found = [target] if target.is_file() else list(target.iterdir()) if target.exists() else []
    if others := sorted(path for path in found if path.name not in known and path.name[0] != "."):
        raise OptionError(f"{others[0]} is no file of an export: must be a new folder, or one of an earlier export")
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
        f"{name}  {entry['bytes'] / 2**20:.2f} MiB, differs from the model by {entry['difference']:.0e}"
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
        "files": {
            name: {**entry, **({"difference": differences[name]} if name in differences else {})}
            for name, entry in files.items()
        },
    }
