"""The wheel, installed in an environment without the repository, beside other packages called ``strategies``."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from app_copy import pyproject
from hatchling.build import build_editable, build_wheel

from hatch_build import HOMES, app_project, packaged, renamed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOREIGN = "WHOSE = 'theirs'\n"
SERVER = """
from oneshot_fl.server_app.app import app as installed
from strategies.own import MARK

print(MARK)
app = installed
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / build_wheel(str(folder))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment's interpreter: with this one's packages, the wheel, and a foreign package `strategies`."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    inside = dict.fromkeys(("base", "platbase"), str(folder))
    site = Path(sysconfig.get_path("purelib", vars=inside))
    # Below it the .pth files of this environment do not count, so the repository is not on the path.
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    for name in ("strategies", "server_app"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(FOREIGN)
    interpreter = Path(sysconfig.get_path("scripts", vars=inside)) / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--disable-pip-version-check", str(wheel)], check=True, timeout=60)
    for program in Path(sysconfig.get_path("scripts")).glob("fl*w*r*"):  # they start each other by name
        text = program.read_text()
        (interpreter.parent / program.name).write_text(text.replace(sys.executable, str(interpreter)))
        (interpreter.parent / program.name).chmod(0o755)
    return interpreter


def said(command: list[str | Path], folder: Path) -> str:
    """Run a command as a user of the wheel would, and return what it prints."""
    given = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "ONESHOT"))}
    path = f"{Path(command[0]).parent}{os.pathsep}{given['PATH']}"
    done = subprocess.run(command, cwd=folder, env={**given, "PATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_holds_one_package_with_everything_that_the_repository_s_four_have(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    (metadata,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    assert (ROOT / "strategies/py.typed") in packaged(ROOT / "strategies")
    wanted = {
        "/".join([*home.split("."), file.relative_to(ROOT / folder).as_posix()])
        for folder, home in HOMES.items()
        for file in packaged(ROOT / folder)
    } - {"oneshot_fl/server_app/settings/config_table.py"}
    wanted |= {f"oneshot_fl/conf/{file.name}" for file in (ROOT / "conf").glob("*.toml")}
    wanted |= {"oneshot_fl/app/pyproject.toml", "oneshot_fl/app/LICENSE"}

    assert {name for name in names if not name.startswith(metadata)} == wanted


def test_wheel_has_the_library_s_files_as_they_are(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for file in packaged(ROOT / "strategies"):
            inside = f"oneshot_fl/{file.relative_to(ROOT / 'strategies').as_posix()}"
            assert archive.read(inside) == file.read_bytes()


def test_wheel_differs_from_the_app_s_files_in_the_modules_of_imports_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for app in ("fl_app", "client_app", "server_app"):
            for file in (ROOT / app).rglob("*.py"):
                inside = f"oneshot_fl/{file.relative_to(ROOT).as_posix()}"
                if inside in archive.namelist():
                    tree = ast.parse(archive.read(inside))
                    for node in ast.walk(tree):
                        if isinstance(node, ast.ImportFrom) and node.module:
                            assert node.module.partition(".")[0] not in HOMES, f"{inside}:{node.lineno}"
                            for old, new in reversed(HOMES.items()):
                                if f"{node.module}.".startswith(f"{new}."):
                                    node.module = f"{old}{node.module.removeprefix(new)}"
                                    break
                    assert ast.dump(tree) == ast.dump(ast.parse(file.read_bytes())), inside


def test_imports_get_the_installed_names_and_nothing_else_changes() -> None:
    source = (
        "from strategies import Tally\n"
        "from  strategies.core import (  # strategies.core\n    errors,\n)\n"
        "from .strategies import x\nfrom strategies_of_mine import y\nimport flwr, torch\n"
        "def f():\n    'from fl_app.data import z'; from fl_app.data import z; from server_app import cli\n"
    )

    after = renamed(source.encode(), "a.py").decode()

    assert after == (
        "from oneshot_fl import Tally\n"
        "from  oneshot_fl.core import (  # strategies.core\n    errors,\n)\n"
        "from .strategies import x\nfrom strategies_of_mine import y\nimport flwr, torch\n"
        "def f():\n    'from fl_app.data import z'; from oneshot_fl.fl_app.data import z; "
        "from oneshot_fl.server_app import cli\n"
    )


@pytest.mark.parametrize(
    "line", ["import strategies", "import fl_app.data as data", "from \\\n  server_app import cli"]
)
def test_an_import_that_cannot_be_renamed_stops_the_build(line: str) -> None:
    with pytest.raises(ValueError, match=r"a\.py:2: .*must "):
        renamed(f"import os\n{line}\n".encode(), "a.py")


def test_no_text_of_the_app_names_a_module_that_the_wheel_lacks() -> None:
    wrong = []
    for folder in HOMES:
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            wrong += [
                f"{file}: {text[:80]!r}"
                for text in texts
                if isinstance(text, str) and text not in docs
                for name in HOMES
                if f" {name}." in f" {text}" or f" {name} import" in text
            ]
    assert wrong == []


def test_the_app_s_folder_declares_the_installed_apps_and_the_repository_s_settings() -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    theirs = tomllib.loads(app_project((ROOT / "pyproject.toml").read_text()))

    assert theirs["project"]["version"] == ours["project"]["version"]
    app, installed = ours["tool"]["flwr"]["app"], theirs["tool"]["flwr"]["app"]
    assert installed.pop("components") == {
        "serverapp": "oneshot_fl.server_app.app:app",
        "clientapp": "oneshot_fl.client_app.app:app",
    }
    app.pop("components")
    assert installed == app


def test_an_editable_installation_is_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_editable(str(tmp_path))) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]

        assert archive.read(path).decode().strip() == str(ROOT)
        assert not [name for name in archive.namelist() if name.endswith(".py")]


def test_a_clone_knows_the_installed_name_for_the_same_modules() -> None:
    code = """
        import oneshot_fl.core.errors, oneshot_fl.server_app.cli
        import fl_app.environment, strategies.core.errors, server_app.cli  # all of them without torch
        from oneshot_fl.fl_app import environment
        from oneshot_fl import GatekeeperConfig
        from importlib.util import find_spec

        assert oneshot_fl is strategies and GatekeeperConfig is strategies.GatekeeperConfig
        assert oneshot_fl.core.errors is strategies.core.errors
        assert strategies.core.errors.__spec__.name == "strategies.core.errors"
        assert environment is fl_app.environment
        assert oneshot_fl.server_app.cli is server_app.cli
        assert find_spec("oneshot_fl.server_app.app").origin == find_spec("server_app.app").origin
        assert find_spec("oneshot_fl.nowhere") is None
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    subprocess.run([sys.executable, "-c", lines], cwd=ROOT, check=True, timeout=60)


def test_installed_beside_a_foreign_package_of_the_old_name_both_work(python: Path, tmp_path: Path) -> None:
    code = """
        import json, sys
        import strategies, server_app
        from oneshot_fl import Tally, TallyConfig, merge
        import torch
        models = {name: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)) for name in "ab"}
        config = TallyConfig(epochs=1, images=16, probes=16, batch_size=8)
        result = merge(models, "tally", num_classes=3, input_shape=(1, 2, 2), config=config, threads=1)
        ours = [name for name in sys.modules if name.partition(".")[0] in ("fl_app", "client_app")]
        print(json.dumps([strategies.WHOSE, server_app.WHOSE, ours, Tally.__module__,
                          list(result.student(torch.zeros(2, 1, 2, 2)).shape)]))
    """
    lines = "\n".join(line.strip() for line in code.splitlines())

    foreign, app, ours, module, shape = json.loads(
        said([python, "-W", "ignore", "-c", lines], tmp_path).splitlines()[-1]
    )

    assert (foreign, app) == ("theirs", "theirs")
    assert (ours, module, shape) == ([], "oneshot_fl.flower.strategies", [2, 3])


def test_the_installed_command_helps_and_reads_settings_by_name(python: Path, tmp_path: Path) -> None:
    oneshot = python.with_name("oneshot")

    assert "One-shot federated learning" in said([oneshot, "--help"], tmp_path)
    with pytest.raises(AssertionError, match="did you mean 'short'"):
        said([oneshot, "run", "--set", "shor"], tmp_path)


@pytest.fixture
def ward(tmp_path: Path) -> Path:
    """A Flower project with a folder `strategies` of its own, which serves the installed app."""
    project = tmp_path / "ward"
    (project / "strategies").mkdir(parents=True)
    (project / "strategies/__init__.py").touch()
    (project / "strategies/own.py").write_text("MARK = 'the ward has strategies of its own'\n")
    (project / "ward_server.py").write_text(SERVER)
    tables = (ROOT / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[2].partition("\n[")[0]
    (project / "pyproject.toml").write_text(pyproject("ward_server:app", "oneshot_fl.client_app.app:app", tables))
    return project


@pytest.mark.ray
def test_the_installed_app_runs_in_a_project_with_its_own_strategies(python: Path, ward: Path, tmp_path: Path) -> None:
    small = (
        "client.epochs=1 data.limit=200 server.epochs=1 tally.images=64 tally.probes=64 compute=in-process threads=1"
    )
    run = tmp_path / "run"

    inside = said([python.with_name("oneshot"), "run", "--clients", "2", "--set", f"{small} run-dir={run}"], ward)

    assert "the ward has strategies of its own" in inside
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    (code,) = re.findall(r"```python\n(.*?)```", (run / "model_card.md").read_text(), re.DOTALL)
    shapes = "import torch\nprint([list(net(torch.zeros(2, 1, 16, 16)).shape) for net in (model, ensemble)])"
    assert said([python, "-c", f"{code}\n{shapes}"], run).strip() == "[[2, 10], [2, 10]]"
