"""Exports a run: its models as files that load without this package, each compared with its model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server_app.export.programs import SUFFIXES, check_packages, write_programs
from server_app.export.stored_models import StoredModels, stored_models
from strategies.core.durable import make_folder, sha256_file, store_errors
from strategies.core.errors import OptionError, StoreError
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
            except those of the same models in the other form.
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
    target = (out if out is not None else run / "export").absolute()
    earlier = _earlier(target)
    stored = stored_models(run, model)
    if not stored.models:
        raise StoreError(f"{run}: its result has neither a student nor an ensemble")
    part = target.with_name(f"{target.name}.part")
    with store_errors(target):
        shutil.rmtree(part, ignore_errors=True)
        make_folder(part)
        try:
            files = {}
            for name in stored.models:
                log(f"{name}: {', '.join(kinds)}")
                files.update(write_programs(stored, name, part, kinds))
            facts = _facts(run, stored, part, files)
            facts["files"] = {**_kept(earlier, facts, target, part), **facts["files"]}
            write_json(part / FACTS, facts)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return {"folder": str(target), **facts}


def _earlier(target: Path) -> dict[str, Any]:
    """Return the facts of an earlier export in a folder; empty without one.

    Raises:
        OptionError: The folder holds a file that no export has written.
    """
    facts = read_json(target / FACTS) if (target / FACTS).exists() else {}
    known = {FACTS, *facts.get("files", {})}
    found = [target] if target.is_file() else list(target.iterdir()) if target.exists() else []
    if others := sorted(path for path in found if path.name not in known and path.name[0] != "."):
        raise OptionError(f"{others[0]} is no file of an export: must be a new folder, or one of an earlier export")
    return facts


def _kept(earlier: Mapping[str, Any], facts: Mapping[str, Any], target: Path, part: Path) -> dict[str, Any]:
    """Take over the files of the same models that this export does not write; return their entries."""
    if earlier.get("weights_sha256") != facts["weights_sha256"]:
        return {}
    kept = {
        name: entry
        for name, entry in earlier["files"].items()
        if name not in facts["files"] and (target / name).exists() and sha256_file(target / name) == entry["sha256"]
    }
    for name in kept:
        shutil.copy2(target / name, part / name)
    return kept


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
    images = stored.normalization is not None
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(folder.iterdir())
    }
    return {
        "run": run.absolute().name,
        "weights_sha256": stored.weights_sha256,
        "input": {
            "name": stored.input_name,
            "shape": ["batch", *stored.input_shape],
            "range": "pixels from 0 to 1; the file normalises them" if images else "as the data set gives them",
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
