"""This machine: versions of packages, folders, and disk space for the uploads and a node's trained models."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from server_app.doctor import DoctorFinding, Level
from strategies.core.durable import MIB
from strategies.core.places import RUNS_KEPT, nearest_existing, state_root
from strategies.run import RUNS_VARIABLE, app_runs_folder

DISTRIBUTION = "oneshot-fl"
# The packages of the exchange and the arithmetic; other packages may differ from machine to machine.
PACKAGES = ("flwr", "ray", "torch", "torchvision", "numpy", "safetensors")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"  # lies in a checkout, not in an installed package
_INSTALL = "python -m pip install --constraint constraints.txt --editable '.[dev]'"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def packages(installed: Callable[[str], str] = _installed, constraints: Path = CONSTRAINTS) -> Iterator[DoctorFinding]:
    """Check the packages against the ranges that this package declares and the versions that it was tested with."""
    yield DoctorFinding("ok", "Python", f"{platform.python_version()} at {sys.executable}")  # pip has checked it
    tested = tested_versions(constraints)
    for requirement in map(Requirement, metadata.requires(DISTRIBUTION) or []):
        name, wanted = requirement.name, str(requirement.specifier)
        if name not in PACKAGES or requirement.marker is not None:
            continue
        found = installed(name)
        if not found or not requirement.specifier.contains(found, prereleases=True):
            yield DoctorFinding("error", name, found or "not installed", wanted, f"in this environment: {_INSTALL}")
        elif name in tested and Version(found).public != tested[name]:
            fix = f"nothing; for the tested versions: {_INSTALL}"
            yield DoctorFinding("warning", name, found, f"tested with {tested[name]}", fix)
        else:
            yield DoctorFinding("ok", name, found, wanted)


def tested_versions(constraints: Path) -> dict[str, str]:
    """Read the file of tested versions, name -> version; empty if it is missing."""
    if not constraints.is_file():
        return {}
    pairs = (line.split("==") for line in constraints.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name.strip(): version.strip() for name, version in pairs}


def flower_commands(role: str) -> Iterator[DoctorFinding]:
    """Check Flower's commands: its SuperLink and SuperNode start others by their bare names."""
    names, check = ("flwr", "flower-superlink", "flower-supernode", "flower-superexec"), "Flower's commands"
    if not (missing := [name for name in names if shutil.which(name) is None]):
        yield DoctorFinding("ok", check, "on the PATH")
        return
    scripts = sysconfig.get_path("scripts")
    lost = "" if (Path(scripts) / missing[0]).exists() else f", and {scripts} does not hold {missing[0]} either"
    found, needed = f"{', '.join(missing)} not on the PATH{lost}", "SuperLink and SuperNode start flower-superexec"
    fix = f"export PATH={shlex.quote(scripts)}:$PATH (or activate the environment)"
    level: Level = "warning" if role == "machine" else "error"  # `oneshot run` finds them without the PATH
    yield DoctorFinding(level, check, found, needed, fix)


# Beside the uploads: the student, its best weights, and checkpoints with the state of an optimizer and a generator.
_STUDENT_COPIES = 8
_LEAST_FREE_MIB = 256


def run_folder(run_dir: str, uploads: int, student: int) -> Iterator[DoctorFinding]:
    """Check the folder of runs: whether it can be written, and whether the uploads fit.

    Args:
        uploads: Bytes of all expected uploads.
        student: Bytes of the largest model.
    """
    folder = app_runs_folder(run_dir)
    fix = f"create it, and give it to the user who starts the server; or name another by {RUNS_VARIABLE}"
    yield _writable(folder, "run folder", fix)
    if not run_dir and not os.environ.get(RUNS_VARIABLE):
        fix = f"export for example {RUNS_VARIABLE}=/srv/runs in the shell or unit that starts flower-superlink"
        found = f"{RUNS_VARIABLE} is not set: runs go to {folder}"
        yield DoctorFinding("warning", "run folder's place", found, "an absolute path", fix)
    # Flower's SuperLink also stores every upload until the server has pulled it.
    needed = 2 * uploads + _STUDENT_COPIES * student + _LEAST_FREE_MIB * MIB
    yield _space(folder, "disk of the run folder", needed, uploads + student)


def client_state(state_dir: str, model: int) -> Iterator[DoctorFinding]:
    """Check the folder of a node's trained models, each of so many bytes."""
    folder = state_root(state_dir).absolute()
    fix = "give it to the user who starts flower-supernode, or name another by ONESHOT_CLIENT_STATE"
    yield _writable(folder, "state folder", fix)
    yield _space(folder, "disk of the state folder", RUNS_KEPT * model + _LEAST_FREE_MIB * MIB, 2 * model)


def upload_limit(models: Mapping[str, int], most_mib: float) -> DoctorFinding:
    """Compare the largest accepted upload, in MiB, with the sizes of the models: architecture -> bytes."""
    largest = max(models, key=lambda name: models[name])
    size = models[largest] / MIB
    if size > most_mib:
        found = f"{most_mib:g} MiB, but an upload of {largest} is {size:.2f} MiB: the server would refuse it"
        return DoctorFinding("error", "max-upload-mib", found, fix=f"set max-upload-mib={int(size) + 1} or more")
    return DoctorFinding("ok", "max-upload-mib", f"{most_mib:g} MiB; the largest model, {largest}, has {size:.2f} MiB")


def _writable(folder: Path, what: str, fix: str) -> DoctorFinding:
    """Check that a file can be written to a folder, or to the parent in which it will be created."""
    there = nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        return DoctorFinding("error", what, f"{folder}: cannot be written ({there}: {error.strerror})", fix=fix)
    return DoctorFinding("ok", what, f"{folder} can be written")


def _space(folder: Path, name: str, needed: int, least: int) -> DoctorFinding:
    """Compare the free bytes with the comfortable and the least amount."""
    found = shutil.disk_usage(nearest_existing(folder)).free
    level: Level = "ok" if found >= needed else "error" if found < least else "warning"
    shown, fix = f"{found / MIB:,.0f} MiB free for {folder}", "free space on this disk, or choose a folder on another"
    return DoctorFinding(level, name, shown, f"about {needed / MIB:,.0f} MiB", fix)
