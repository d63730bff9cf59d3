"""The files of deploy/ against what reads them: systemd, Compose, Flower, the rehearsal."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.cli.build import build_fab_from_files
from flwr.cli.utils import collect_files
from flwr.common.constant import FAB_MAX_SIZE
from hatchling.build import build_wheel

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = {"oneshot-superlink": "superlink.env", "oneshot-supernode": "supernode.env"}
superlink = runpy.run_path(str(DEPLOY / "superlink.py"))


def unit(name: str) -> str:
    return (DEPLOY / "systemd" / f"{name}.service").read_text().replace("\\\n", " ")


def variables(file: str) -> dict[str, str]:
    lines = [line for line in (DEPLOY / "systemd" / file).read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def flags_of(words: list[str]) -> dict[str, str]:
    """Return long flags with their values, in whichever of the two spellings."""
    found, words = {}, [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if value.startswith("--") else value
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
@pytest.mark.parametrize("name", UNITS)
def test_units_are_accepted_by_systemd(tmp_path: Path, name: str) -> None:
    # Its programs are not here; what it says of the rest must be nothing.
    text = re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", unit(name))
    (tmp_path / f"{name}.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / f"{name}.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [line for line in done.stderr.splitlines() if name in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", UNITS)
def test_units_run_unprivileged_with_a_complete_environment(name: str) -> None:
    lines = unit(name).splitlines()
    for wanted in (
        "User=oneshot", "NoNewPrivileges=yes", "ProtectSystem=strict", "Restart=always", "CapabilityBoundingSet=",
        f"EnvironmentFile=/etc/oneshot/{UNITS[name]}", "StateDirectory=oneshot",
    ):  # fmt: skip
        assert wanted in lines
    given = variables(UNITS[name])
    [command] = re.findall(r"^ExecStart=(.*)$", unit(name), re.MULTILINE)
    assert set(re.findall(r"\$\{(\w+)\}", command)) <= given.keys()
    # Nothing else can be written: the page tells the same of a second node.
    paths = [given[key] for key in ("HOME", "FLWR_HOME", "ONESHOT_CLIENT_STATE", "ONESHOT_RUNS") if key in given]
    assert {"/".join(path.split("/")[:4]) for path in paths} == {"/var/lib/oneshot"}
    second = (DEPLOY / "README.md").read_text().partition("For a second node on one machine")[2].partition("\n\n")[0]
    assert all(f"`{word}`" in second for word in ("ONESHOT_LOCAL_PORT", "StateDirectory", "/var/lib/oneshot"))
    # Without it Flower finds none of its own programs.
    assert given["PATH"].startswith(command.split()[0].rpartition("/")[0])
    assert all(given[key].startswith("/var/lib/oneshot") for key in ("HOME", "FLWR_HOME"))


def test_compose_services_are_started_as_the_units_are() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for service, name in (("superlink", "oneshot-superlink"), ("supernode", "oneshot-supernode")):
        [command] = re.findall(r"^ExecStart=(.*)$", unit(name), re.MULTILINE)
        composed, started = flags_of(services[service]["command"]), flags_of(command.split())
        assert composed.keys() == started.keys() - {"--port" if service == "supernode" else ""}
        assert services[service]["read_only"] is True
        assert services[service]["cap_drop"] == ["ALL"]
    keys = "ONESHOT_NODE_KEYS"  # without it any registered node uploads under any name
    assert services["superlink"]["environment"][keys] == variables("superlink.env")[keys]
    assert services["superlink"]["ports"] == ["9092:9092"]
    assert "ports" not in services["supernode"]


def test_every_unit_stops_flower_from_installing_and_from_telemetry() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    for key, value in (
        ("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1"), ("FLWR_TELEMETRY_ENABLED", "0"),
        ("FLWR_DISABLE_UPDATE_CHECK", "1"), ("RAY_USAGE_STATS_ENABLED", "0"),
    ):  # fmt: skip
        assert all(variables(file)[key] == value for file in UNITS.values())
        assert f"{key}={value}" in image
    assert variables("superlink.env")["MALLOC_ARENA_MAX"] == "1"


@pytest.mark.slow
def test_image_installs_this_project_from_the_files_that_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    before, install, _ = text.partition("RUN pip install --no-cache-dir --constraint constraints.txt .\n")
    assert install
    for line in re.findall(r"^COPY (.*)$", before, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            path = DEPLOY.parent / source
            place = tmp_path / target
            if path.is_dir():
                shutil.copytree(path, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, place)
    assert {path.name for path in tmp_path.iterdir()} >= {"constraints.txt", "oneshot_fl.py"}

    monkeypatch.chdir(tmp_path)
    wheel = build_wheel(str(tmp_path))

    with zipfile.ZipFile(tmp_path / wheel) as archive:
        assert {"oneshot_fl/server_app/cli.py", "oneshot_fl/app/pyproject.toml"} <= set(archive.namelist())
    # `flwr run /app` in the container packs these files.
    fab, facts = build_fab_from_files(collect_files(tmp_path))
    assert facts.fab_format_version == 1
    assert len(fab) < FAB_MAX_SIZE


def test_flower_has_the_hook_and_the_paths_that_the_rule_is_about() -> None:
    from flwr.superlink import extensions
    from flwr.superlink.routers.control.router import router as control
    from flwr.superlink.routers.fleet.router import router as fleet

    hook: Callable[..., Awaitable[Any] | Any] = extensions.get_middleware
    assert hook() == ()
    assert control.prefix == "/v1/control"
    assert superlink["OPEN"][0] == f"{fleet.prefix}/"
