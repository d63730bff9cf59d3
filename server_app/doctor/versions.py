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
LOCK = CONSTRAINTS.with_name("requirements.lock")  # every package but torch's builds, with the hashes of its files
_LOCKED = "python -m pip install --require-hashes --no-deps --requirement requirements.lock"
_INSTALL = "python -m pip install --constraint constraints.txt --editable '.[dev]'"


def python_version() -> Iterator[DoctorFinding]:
    """Check the interpreter."""
    found, wanted = platform.python_version(), metadata.metadata(DISTRIBUTION)["Requires-Python"]
    fits = Requirement(f"python{wanted}").specifier.contains(found)
    fix = "" if fits else f"create a new environment with Python {wanted}, and install this package in it"
    yield DoctorFinding("ok" if fits else "error", "Python", f"{found} at {sys.executable}", wanted, fix)


def packages(installed: Callable[[str], str] | None = None, constraints: Path = CONSTRAINTS) -> Iterator[DoctorFinding]:
    """Check the packages against the ranges that this package declares and the versions that it was tested with.

    Args:
        installed: Name -> version, empty if not installed; None reads this machine's.
        constraints: The file of tested versions; may be missing.
    """
    version_of, tested = installed or _installed, _tested(constraints)
    for text in metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(text)
        if requirement.name not in PACKAGES or requirement.marker is not None:
            continue
        name, found, wanted = requirement.name, version_of(requirement.name), str(requirement.specifier)
        if not found or not requirement.specifier.contains(found, prereleases=True):
            shown = found or "not installed"
            yield DoctorFinding("error", name, shown, wanted, f"in this environment: {_INSTALL}")
        elif name in tested and Version(found).public != tested[name]:
            fix = f"nothing; for the tested versions: {_INSTALL}"
            yield DoctorFinding("warning", name, found, f"tested with {tested[name]}", fix)
        else:
            yield DoctorFinding("ok", name, found, wanted)


def locked(installed: Callable[[str], str] | None = None, lock: Path = LOCK) -> Iterator[DoctorFinding]:
    """Compare every installed package with the lock file; packages that are not installed are not missed.

    Args:
        installed: Name -> version, empty if not installed; None reads this machine's.
        lock: The lock file; may be missing.
    """
    version_of = installed or _installed
    if not lock.is_file():
        yield DoctorFinding("skipped", "locked packages", "no lock file here: it lies in a checkout")
        return
    pins = dict(_locked(lock.read_text(encoding="utf-8")))
    found = {name: version_of(name) for name in pins}
    others = [f"{name} {found[name]} (locked {version})" for name, version in sorted(pins.items())
              if found[name] and Version(found[name]).public != version]  # fmt: skip
    if others:
        text = f"{len(others)} differ: {', '.join(others[:4])}"
        yield DoctorFinding("warning", "locked packages", text, "the tested versions", f"nothing; for these: {_LOCKED}")
    else:
        count = sum(map(bool, found.values()))
        yield DoctorFinding("ok", "locked packages", f"{count} of {len(pins)} are installed, all as locked")


def _locked(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and version of each pin that holds on this machine."""
    for line in text.splitlines():
        if line[:1].isalpha():
            requirement = Requirement(line.removesuffix("\\").strip())
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement.name, str(requirement.specifier).removeprefix("==")


def flower_commands(role: str) -> Iterator[DoctorFinding]:
    """Check Flower's commands: its SuperLink and SuperNode start others by their bare names."""
    missing = [name for name in ("flwr", "flower-superlink", "flower-supernode", "flower-superexec")
               if shutil.which(name) is None]  # fmt: skip
    scripts = sysconfig.get_path("scripts")
    if not missing:
        yield DoctorFinding("ok", "Flower's commands", "on the PATH")
        return
    lost = "" if (Path(scripts) / missing[0]).exists() else f", and {scripts} does not hold {missing[0]} either"
    fix = f"export PATH={shlex.quote(scripts)}:$PATH (or activate the environment)"
    found = f"{', '.join(missing)} not on the PATH{lost}"
    level: Level = "warning" if role == "machine" else "error"  # `oneshot run` finds them without the PATH
    yield DoctorFinding(
        level, "Flower's commands", found, "SuperLink and SuperNode start flower-superexec by its name", fix
    )


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _tested(constraints: Path) -> dict[str, str]:
    if not constraints.is_file():
        return {}
    pairs = (line.split("==") for line in constraints.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name.strip(): version.strip() for name, version in pairs}
