"""Versions of the packages on this machine."""

from __future__ import annotations

import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from server_app.doctor.findings import DoctorFinding, Level

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
    """Check the packages against the ranges that this package declares and the versions that it was tested with.

    Args:
        installed: Name -> version, empty if not installed.
        constraints: The file of tested versions; may be missing.
    """
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
