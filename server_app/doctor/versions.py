"""Versions of the packages on this machine, and their comparison with another machine's."""

from __future__ import annotations

import json
import platform
import shlex
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from server_app.doctor.findings import Finding, Level
from strategies.compute.worker import code_digest
from strategies.core.errors import OptionError

DISTRIBUTION = "oneshot-fl"
# The packages of the exchange and the arithmetic; other packages may differ from machine to machine.
PACKAGES = ("flwr", "ray", "torch", "torchvision", "numpy", "safetensors")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"  # lies in a checkout, not in an installed package
LOCK = CONSTRAINTS.with_name("requirements.lock")  # every package but torch's builds, with the hashes of its files
_LOCKED = "python -m pip install --require-hashes --no-deps --requirement requirements.lock"
_INSTALL = "python -m pip install --constraint constraints.txt --editable '.[dev]'"


def machine_facts() -> dict[str, Any]:
    """Return the facts by which two machines are compared, and the host that identifies this one."""
    digest, _ = code_digest()
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "code": digest,
    }


def python_version() -> Iterator[Finding]:
    """Check the interpreter."""
    found, wanted = platform.python_version(), metadata.metadata(DISTRIBUTION)["Requires-Python"]
    fits = Requirement(f"python{wanted}").specifier.contains(found)
    fix = "" if fits else f"create a new environment with Python {wanted}, and install this package in it"
    yield Finding("ok" if fits else "error", "Python", f"{found} at {sys.executable}", wanted, fix)


def packages(installed: Callable[[str], str] | None = None, constraints: Path = CONSTRAINTS) -> Iterator[Finding]:
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
            yield Finding("error", name, shown, wanted, f"in this environment: {_INSTALL}")
        elif name in tested and Version(found).public != tested[name]:
            fix = f"nothing; for the tested versions: {_INSTALL}"
            yield Finding("warning", name, found, f"tested with {tested[name]}", fix)
        else:
            yield Finding("ok", name, found, wanted)


def locked(installed: Callable[[str], str] | None = None, lock: Path = LOCK) -> Iterator[Finding]:
    """Compare every installed package with the lock file; packages that are not installed are not missed.

    Args:
        installed: Name -> version, empty if not installed; None reads this machine's.
        lock: The lock file; may be missing.
    """
    version_of = installed or _installed
    if not lock.is_file():
        yield Finding("skipped", "locked packages", "no lock file here: it lies in a checkout")
        return
    pins = dict(_locked(lock.read_text(encoding="utf-8")))
    found = {name: version_of(name) for name in pins}
    others = [f"{name} {found[name]} (locked {version})" for name, version in sorted(pins.items())
              if found[name] and Version(found[name]).public != version]  # fmt: skip
    if others:
        text = f"{len(others)} differ: {', '.join(others[:4])}"
        yield Finding("warning", "locked packages", text, "the tested versions", f"nothing; for these: {_LOCKED}")
    else:
        count = sum(map(bool, found.values()))
        yield Finding("ok", "locked packages", f"{count} of {len(pins)} are installed, all as locked")


def _locked(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and version of each pin that holds on this machine."""
    for line in text.splitlines():
        if line[:1].isalpha():
            requirement = Requirement(line.removesuffix("\\").strip())
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement.name, str(requirement.specifier).removeprefix("==")


def torchvision_imports() -> Iterator[Finding]:
    """Import torchvision as the app does."""
    try:
        from fl_app.vision import torchvision
    except (ImportError, RuntimeError, OSError) as error:
        fix = f"install the torchvision of this torch version: {_INSTALL}"
        yield Finding("error", "torchvision imports", f"{type(error).__name__}: {error}", fix=fix)
    else:
        yield Finding("ok", "torchvision imports", str(torchvision.__version__))


def flower_commands(role: str) -> Iterator[Finding]:
    """Check Flower's commands: its SuperLink and SuperNode start others by their bare names."""
    missing = [name for name in ("flwr", "flower-superlink", "flower-supernode", "flower-superexec")
               if shutil.which(name) is None]  # fmt: skip
    scripts = sysconfig.get_path("scripts")
    if not missing:
        yield Finding("ok", "Flower's commands", "on the PATH")
        return
    lost = "" if (Path(scripts) / missing[0]).exists() else f", and {scripts} does not hold {missing[0]} either"
    fix = f"export PATH={shlex.quote(scripts)}:$PATH (or activate the environment)"
    found = f"{', '.join(missing)} not on the PATH{lost}"
    level: Level = "warning" if role == "machine" else "error"  # `oneshot run` finds them without the PATH
    yield Finding(level, "Flower's commands", found, "SuperLink and SuperNode start flower-superexec by its name", fix)


def read_expected(path: Path) -> Mapping[str, Any]:
    """Return the facts of another machine from its output of ``oneshot doctor --format json``.

    Raises:
        OptionError: The file is missing, or has another content.
    """
    try:
        facts = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])["facts"]
        known = isinstance(facts["packages"], dict) and isinstance(facts["code"], str)
    except OSError as error:
        raise OptionError(f"--expect {path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError):
        known = False
    if not known:
        raise OptionError(f"--expect {path}: must be the output of `oneshot doctor --format json` on the other machine")
    return dict(facts)


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare two machines.

    Args:
        own: This machine's facts, see :func:`machine_facts`.
        other: The other machine's facts.
    """
    where, before = f"on {other.get('host', 'the other machine')}", True
    for name in PACKAGES:
        here, there = own["packages"].get(name) or "none", str(other["packages"].get(name) or "none")
        if _release(here) == _release(there):
            continue
        before = False
        reproducible = "bit-equal results need equal versions"
        level, why = ("error", "its messages differ") if name == "flwr" else ("warning", reproducible)
        fix = f"install the same {name} on both: {_INSTALL}"
        yield Finding(level, f"same {name}", here, f"{there} {where} ({why})", fix)  # type: ignore[arg-type]
    if _minor(own["python"]) != _minor(str(other.get("python", ""))):
        before = False
        fix = "nothing for SuperNodes; machines of one Ray cluster need the same Python"
        yield Finding("warning", "same Python", own["python"], f"{other.get('python')} {where}", fix)
    if own["code"] != other["code"]:
        before = False
        fix = "install the same release on both; a run sends its code to the nodes, commands use the installed release"
        found, wanted = f"code {own['code'][:12]}", f"{str(other['code'])[:12]} {where}"
        yield Finding("warning", "same library", found, wanted, fix)
    if before:
        yield Finding("ok", "same versions", f"packages and library (code {own['code'][:12]}) are the same {where}")


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


def _release(version: str) -> str:
    # "2.13.0+cpu" and "2.13.0+cu130" work together in one federation.
    return version.partition("+")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
