from __future__ import annotations

import tomllib
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from server_app.doctor import machine
from strategies.core.durable import MIB

PYPROJECT = tomllib.loads(machine.CONSTRAINTS.with_name("pyproject.toml").read_text())
PYPROJECT_NAMES = [
    *PYPROJECT["project"]["dependencies"],
    *chain.from_iterable(PYPROJECT["project"]["optional-dependencies"].values()),
    *PYPROJECT["dependency-groups"]["docs"],
]
TESTED = machine.tested_versions(machine.CONSTRAINTS)


def installed(**others: str) -> Any:
    return lambda name: {**TESTED, "torch": f"{TESTED['torch']}+cpu", **others}[name]


def levels(**others: str) -> dict[str, str]:
    return {finding.check: finding.level for finding in machine.packages(installed(**others))}


def test_packages_in_the_tested_versions_are_ok() -> None:
    assert levels() == dict.fromkeys(("Python", *machine.PACKAGES), "ok")


def test_packages_that_are_missing_or_out_of_range_are_errors_and_others_warnings() -> None:
    found = levels(flwr="1.43.0", ray="", numpy="2.0.0")

    assert found == {**levels(), "flwr": "error", "ray": "error", "numpy": "warning"}


def test_packages_without_the_file_of_tested_versions_are_held_to_their_ranges(tmp_path: Path) -> None:
    found = list(machine.packages(installed(numpy="2.0.0"), tmp_path / "absent"))

    assert {finding.level for finding in found} == {"ok"}
    assert len(found) == len(machine.PACKAGES) + 1


def test_commands_off_the_path_are_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("flwr", "flower-superlink", "flower-supernode", "flower-superexec"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [finding.level for finding in machine.flower_commands("node")] == ["ok"]
    monkeypatch.setenv("PATH", "")

    (found,) = machine.flower_commands("node")

    assert found.level == "error"
    assert f"PATH={tmp_path}:$PATH" in found.fix


def test_every_package_that_is_named_has_a_tested_version_within_its_bounds() -> None:
    named = [found for found in map(Requirement, PYPROJECT_NAMES) if found.name != machine.DISTRIBUTION]

    assert {name for name in named if not name.specifier.contains(TESTED[canonicalize_name(name.name)])} == set()
    assert {canonicalize_name(name.name) for name in named} == TESTED.keys()


def test_lock_file_has_hashes_and_the_tested_versions_and_no_host() -> None:
    text = machine.CONSTRAINTS.with_name("requirements.lock").read_text()
    entries = [line for line in text.replace("\\\n", " ").splitlines() if line[:1].isalpha()]
    pins = dict(entry.partition(" ")[0].split("==") for entry in entries)

    assert "://" not in text
    assert {name: pin for name, pin in pins.items() if TESTED.get(name, pin) != pin} == {}
    needed = {canonicalize_name(Requirement(line).name) for line in PYPROJECT["project"]["dependencies"]}
    assert needed - pins.keys() == {"torch"}
    assert all("--hash=sha256:" in entry for entry in entries)


def test_a_folder_is_written_to_where_it_will_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    good, *_ = machine.client_state(str(tmp_path / "a" / "b"), MIB)
    bad, *_ = machine.client_state(str(tmp_path / "file" / "b"), MIB)

    assert (good.level, bad.level) == ("ok", "error")
    assert "ONESHOT_CLIENT_STATE" in bad.fix
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(
    ("free", "run", "state"),
    [(10, "error", "error"), (70, "error", "error"), (1000, "warning", "ok"), (9000, "ok", "ok")],
)
def test_a_disk_has_to_hold_the_uploads_of_a_run_or_the_models_of_the_clients(
    tmp_path: Path, free: int, run: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free * MIB))
    *_, of_run = machine.run_folder(str(tmp_path), 500 * MIB, 50 * MIB)

    assert of_run.level == run
    assert run == "ok" or of_run.fix
    assert [finding.level for finding in machine.client_state(str(tmp_path), 40 * MIB)] == ["ok", state]


def test_the_run_folder_should_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    unnamed = {finding.check: finding.level for finding in machine.run_folder("", MIB, MIB)}
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))

    assert unnamed["run folder's place"] == "warning"
    assert [finding.check for finding in machine.run_folder("", MIB, MIB)] == ["run folder", "disk of the run folder"]


def test_a_model_above_the_largest_upload_is_an_error() -> None:
    sizes = {"small": MIB, "large": 3 * MIB + 1}

    assert machine.upload_limit(sizes, 4.0).level == "ok"
    found = machine.upload_limit(sizes, 3.0)
    assert (found.level, "max-upload-mib=4" in found.fix) == ("error", True)
