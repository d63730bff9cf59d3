"""Disk space and memory for the planned run: uploads, the server stage, and the clients' kept models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from server_app.doctor.environment import writable
from server_app.doctor.findings import Finding, Level
from strategies.core.places import existing, state_root
from strategies.run import RUNS_VARIABLE, runs_folder
from strategies.uploads.checks import MIB

# Beside the uploads: the student, its best weights, and checkpoints with the state of an optimizer and a generator.
_STUDENT_COPIES = 8
# torch, Ray and Flower on an idle server, and a stage's batches.
_PROCESSES_MIB = 3072
# A node keeps its trained models of this many runs, one model for a run of one round.
_RUNS_KEPT = 16
_LEAST_FREE_MIB = 256


def run_folder(run_dir: str, uploads: int, student: int, free: int | None = None) -> Iterator[Finding]:
    """Check the folder of runs: whether it can be written, and whether the uploads fit.

    Args:
        run_dir: The setting ``run-dir``.
        uploads: Bytes of all expected uploads.
        student: Bytes of the largest model.
        free: Free bytes; None to read the disk's.
    """
    folder = runs_folder(run_dir)
    fix = f"create it, and give it to the user who starts the server; or name another by {RUNS_VARIABLE}"
    yield from writable(folder, "run folder", fix)
    if not run_dir and not os.environ.get(RUNS_VARIABLE):
        fix = f"export for example {RUNS_VARIABLE}=/srv/runs in the shell or unit that starts flower-superlink"
        found = f"{RUNS_VARIABLE} is not set: runs go to the folder in which flower-superlink is started"
        yield Finding("warning", "run folder's place", found, "an absolute path", fix)
    # Flower's SuperLink also stores every upload until the server has pulled it.
    needed = 2 * uploads + _STUDENT_COPIES * student + _LEAST_FREE_MIB * MIB
    yield _disk(folder, "disk of the run folder", needed, uploads + student, free)


def client_state(state_dir: str, model: int, free: int | None = None) -> Iterator[Finding]:
    """Check the folder of a node's trained models.

    Args:
        state_dir: The setting ``client.state-dir``.
        model: Bytes of its model.
        free: Free bytes; None to read the disk's.
    """
    variable = "ONESHOT_CLIENT_STATE"
    folder = state_root(state_dir).absolute()
    fix = f"give it to the user who starts flower-supernode, or name another by {variable}"
    yield from writable(folder, "state folder", fix)
    yield _disk(folder, "disk of the state folder", _RUNS_KEPT * model + _LEAST_FREE_MIB * MIB, 2 * model, free)


def server_memory(uploads: int, student: int, available: int | None = None) -> Iterator[Finding]:
    """Check the free memory, which must hold all models of an ensemble and a student in training.

    Args:
        uploads: Bytes of all expected uploads.
        student: Bytes of the largest model.
        available: Free bytes; None to read the system's.
    """
    found = psutil.virtual_memory().available if available is None else available
    needed = uploads + _STUDENT_COPIES * student + _PROCESSES_MIB * MIB
    level: Level = "ok" if found >= needed else "warning"
    fix = "" if found >= needed else "free memory, expect fewer clients, or choose smaller architectures"
    text = f"about {_mib(needed)}: {_mib(uploads)} of models, the rest for the processes and the student"
    yield Finding(level, "memory", f"{_mib(found)} free", text, fix)


def node_memory(model: int, available: int | None = None) -> Iterator[Finding]:
    """Check the free memory of a node, which trains one model; the arguments are :func:`server_memory`'s."""
    found = psutil.virtual_memory().available if available is None else available
    needed = _STUDENT_COPIES * model + _PROCESSES_MIB // 2 * MIB
    level: Level = "ok" if found >= needed else "warning"
    fix = "" if found >= needed else "free memory, or choose a smaller architecture"
    yield Finding(level, "memory", f"{_mib(found)} free", f"about {_mib(needed)}", fix)


def upload_limit(models: Mapping[str, int], most_mib: float) -> Iterator[Finding]:
    """Compare the largest accepted upload with the sizes of the models.

    Args:
        models: Architecture -> bytes.
        most_mib: The setting ``max-upload-mib``.
    """
    largest = max(models, key=lambda name: models[name])
    size = models[largest] / MIB
    if size > most_mib:
        found = f"{most_mib:g} MiB, but an upload of {largest} is {size:.2f} MiB: the server would refuse it"
        yield Finding("error", "max-upload-mib", found, fix=f"set max-upload-mib={int(size) + 1} or more")
    else:
        yield Finding("ok", "max-upload-mib", f"{most_mib:g} MiB; the largest model, {largest}, has {size:.2f} MiB")


def _disk(folder: Path, name: str, needed: int, least: int, free: int | None) -> Finding:
    """Compare the free bytes with the comfortable and the least amount."""
    found = shutil.disk_usage(existing(folder)).free if free is None else free
    shown, text = f"{_mib(found)} free for {folder}", f"about {_mib(needed)}"
    if found >= needed:
        return Finding("ok", name, shown, text)
    level: Level = "error" if found < least else "warning"
    return Finding(level, name, shown, text, "free space on this disk, or choose a folder on another one")


def _mib(size: int) -> str:
    mib = size / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
