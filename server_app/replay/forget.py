"""A run on the uploads of another: those of all its clients, or without the clients to be forgotten."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.settings.read import forgotten
from strategies.core.errors import OptionError, StoreError
from strategies.core.options import Scalar
from strategies.run.results import readable_json
from strategies.run.run_folder import RunFolder, default_run_dir
from strategies.run.stage import last_round, pin_clients, pinned_clients, usable_uploads


def forget_settings(
    run: Path, clients: Sequence[str], stored: Mapping[str, Scalar], *, run_dir: str = ""
) -> dict[str, Scalar]:
    """Return the settings of a run on the uploads of ``run`` without those of some clients.

    Args:
        clients: Clients whose uploads are left out, beside those that the run itself left out.
        run_dir: The folder of the new run; empty for one beside ``run``.

    Raises:
        OptionError: A client has no upload there, or the run's clients are out of reach.
        StoreError: ``run`` is not a run folder.
    """
    before = forgotten(str(stored.get("forget", "")))
    with RunFolder.open(run, write=False) as folder:
        held, info = last_round(folder).held(), folder.info
    if "replay-of" in info:
        raise OptionError(
            f"{run} is a replay and holds no uploads: must be the run that it replays, {info['replay-of']}"
        )
    if "imported-from" in info:
        raise OptionError(
            f"{run} was imported, so it has no clients: import {info['imported-from']} again, without the files of "
            f"{', '.join(clients)}"
        )
    if not info.get("num-supernodes"):
        raise OptionError(
            f"{run} had real clients, which this command cannot reach: run  flwr run . YOUR-SERVER --run-config "
            f"\"uploads='{run.absolute()}' forget='{','.join(clients)}'\"  with the run's other settings"
        )
    if unknown := sorted(set(clients) - set(held)):
        known = ", ".join(sorted(set(held) - before)) or "of another run: this one holds none"
        raise OptionError(f"--client {', '.join(unknown)}: no such upload in {run}; must be {known}")
    least, others = int(stored.get("min-uploads", 1)), len(set(held) - before - set(clients))
    if not others:
        raise OptionError(f"no upload would be left in {run}: fewer clients must be forgotten")
    if others < least:
        raise OptionError(
            f"{others} uploads would be left in {run}, setting 'min-uploads' is {least}: must be at most {others}, by "
            "--set, or fewer clients must be forgotten"
        )
    names = ",".join(sorted(before | set(clients)))
    left = {"uploads": str(run.absolute()), "forget": names, "resume": ""}
    folder_name = f"{stored.get('method', 'run')}-without-{clients[0]}"
    return {**stored, **left, "run-dir": str(default_run_dir(run_dir, folder_name, parent=run.absolute().parent))}


def what_is_left(run: Path, clients: Sequence[str]) -> str:
    """Return a note for the user: folders that still hold the forgotten uploads, or results that were made with them.

    Args:
        run: The earlier run. Runs, replays and comparisons that have the uploads too are sought beside it.
    """
    places = _holders(run.resolve(), set(clients))
    return (
        f"the upload of {', '.join(clients)}, or a result that was made with it, is still in:  "
        f"{'  '.join(map(str, places))}\nThe new run does not need them: remove them with  "
        f"{shlex.join(['rm', '-r', *map(str, places)])}\nThe clients' own copies: oneshot clean, on their machines"
    )


def _holders(run: Path, clients: set[str]) -> list[Path]:
    """Return a run, the runs that its uploads come from, and the folders beside it that were made of any of them."""
    found = [run]
    while source := _uploads_of(readable_json(found[-1] / "run.json") or {}):
        found.append(Path(source).resolve())
    beside = {folder: _made_of(folder, clients) for folder in sorted(run.parent.iterdir())}
    while more := [folder for folder, sources in beside.items() if folder not in found and sources & set(found)]:
        found += more
    return found


def _made_of(folder: Path, clients: set[str]) -> set[Path]:
    """Return the folders whose uploads, or images, a folder's results are made of, but for forgotten clients."""
    info, comparison = (readable_json(folder / name) or {} for name in ("run.json", "compare.json"))
    took_over = "" if clients <= forgotten(str((info.get("settings") or {}).get("forget", ""))) else _uploads_of(info)
    # Of a run of this app, else of a replay of another project's. Images that a method made reveal its uploads.
    learnt_from = (info.get("settings") or info.get("options") or {}).get("data.proxy-file")
    # With all folders above: a run's files, its rounds, and the cells of a comparison lie deeper.
    files = [Path(name) for name in (learnt_from, info.get("imported-from")) if name]
    read = [place for file in files for place in (file, *file.parents)]
    named = [info.get("replay-of", ""), took_over, *read, *comparison.get("runs", [])]
    return {Path(name).resolve() for name in named if name}


def _uploads_of(info: Mapping[str, Any]) -> str:
    return str((info.get("settings") or {}).get("uploads", ""))


def adopt_uploads(target: RunFolder, uploads: str, forget: str, *, min_uploads: int) -> None:
    """Copy the uploads of another run into a new one, and begin its server stage with them; no client trains.

    Raises:
        StoreError: The run has no uploads, or one is damaged.
        OptionError: Fewer than ``min_uploads`` are left.
    """
    if not uploads or pinned_clients(target.round(1)) is not None:
        return
    left_out = forgotten(forget)
    with RunFolder.open(Path(uploads), write=False) as source:
        round_folder = last_round(source)
        # Uploads that came after the server stage had begun took no part in that run.
        took_part = pinned_clients(round_folder)
        chosen = [
            upload
            for upload in usable_uploads(round_folder)
            if upload.client not in left_out and (took_part is None or upload.client in took_part)
        ]
    if not chosen:
        raise StoreError(f"{uploads}: holds no uploads of other clients than those to be forgotten")
    if len(chosen) < min_uploads:
        raise OptionError(
            f"{len(chosen)} uploads are left in {uploads}, setting 'min-uploads' is {min_uploads}: "
            f"must be at most {len(chosen)}"
        )
    held = set(target.round(1).held())
    for upload in chosen:
        if upload.client not in held:
            target.round(1).accept(upload.facts, upload.read())
    pin_clients(target.round(1), [upload.client for upload in chosen])
