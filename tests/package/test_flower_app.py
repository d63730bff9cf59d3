"""The app as Flower's own programs see it: `flwr build`, `flwr run`, and the checks before an app goes to its Hub."""

from __future__ import annotations

import importlib
import io
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from app_copy import app_copy
from flwr.cli.build import build_fab_from_files
from flwr.cli.config_utils import load_and_validate
from flwr.cli.utils import collect_files
from flwr.common.constant import FAB_MAX_SIZE
from packaging.requirements import Requirement

from hatch_build import write_package

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
hub = importlib.import_module("flwr.cli.app_cmd.publish")  # its package has a function of the same name
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = tmp_path_factory.mktemp("site") / "oneshot_fl"
    package.mkdir()
    write_package(ROOT, package)
    return package / "app"


@pytest.mark.parametrize("which", ["clone", "installed"])
def test_flower_builds_and_accepts_the_app_in_its_format_1(which: str, installed: Path) -> None:
    folder = app_copy() if which == "clone" else installed

    fab, facts = build_fab_from_files(collect_files(folder))
    # As `flwr run` does: it looks for the apps' modules, here in a clone for those of the installed package too.
    config, warnings = load_and_validate(folder / "pyproject.toml", check_module=True)

    assert warnings == []
    assert (facts.fab_format_version, facts.flwr_version_target) == (1, PINNED["flwr"])
    assert len(fab) < FAB_MAX_SIZE
    with zipfile.ZipFile(io.BytesIO(fab)) as archive:
        names = set(archive.namelist())
    assert {"LICENSE", "pyproject.toml"} <= names
    if which == "clone":
        components = config["tool"]["flwr"]["app"]["components"].values()
        assert {f"{reference.partition(':')[0].replace('.', '/')}.py" for reference in components} <= names
    else:
        assert not [name for name in names if name.endswith(".py")]


@pytest.mark.parametrize("which", ["clone", "build/hub"])
def test_flower_s_hub_takes_the_app(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    if which == "build/hub":
        subprocess.run(["make", "hub"], cwd=ROOT, check=True, capture_output=True)
    folder = app_copy() if which == "clone" else ROOT / which
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]

    hub._validate_app_name(project["name"], "the app's name")
    hub._validate_description(project["description"])
    hub._validate_files(hub._collect_file_paths(folder))

    assert len(project["description"]) <= 200
    assert "Validation passed" in capsys.readouterr().out


def test_the_range_of_flower_s_versions_has_the_pinned_one_and_the_one_before() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (flower,) = [found for text in declared if (found := Requirement(text)).name == "flwr"]

    accepted = [version for version in ("1.40.0", "1.41.0", "1.42.0", "1.43.0") if version in flower.specifier]

    assert accepted == ["1.41.0", "1.42.0"]
    assert PINNED["flwr"] in accepted
