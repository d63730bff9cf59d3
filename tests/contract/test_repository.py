"""What holds for the files as a whole: no leftovers, sources that exist, dependencies that are declared."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from sources import PACKAGES, ROOT, SOURCES, nodes, parsed

from strategies.method import METHODS

# Spelt in two halves, so that this file is not found itself.
MARKS = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")
# Examples may name these home folders, which belong to no person.
HOMES = "/ro" + "ot/|/ho" + r"me/(?!you\b|someone\b)|/Us" + "ers/|/wo" + "rk/"


def readable_files() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "tests", "docs", "conf", "deploy", ".ci")]
    found = [path for folder in folders if folder.exists() for path in folder.rglob("*") if path.is_file()]
    found += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a worktree's
    binary = {".png", ".pyc", ".safetensors", ".pt", ".npz"}
    return sorted(path for path in found if path.suffix not in binary and "__pycache__" not in path.parts)


def test_no_file_names_a_path_of_one_machine_or_leaves_work_for_later() -> None:
    marks = re.compile(rf"\b({'|'.join(MARKS)})\b|{HOMES}")
    found = []
    for path in readable_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if marks.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")

    assert found == []


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_s_file_begins_with_its_source_note(name: str) -> None:
    note = ast.get_docstring(parsed(Path(inspect.getfile(METHODS[name].config)).read_text(encoding="utf-8"))) or ""

    headings = re.findall(r"^(Paper|Symbols|Where|Deviations): \S", note, re.MULTILINE)
    if METHODS[name].source == "this library":
        assert headings == ["Symbols", "Where"]
        return
    assert headings == ["Paper", "Symbols", "Where", "Deviations"]
    assert "Read version: " in note
    assert "https://" in note


def test_no_two_classes_of_the_package_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for path, text in SOURCES.items():
        for name in (node.name for node in parsed(text).body if isinstance(node, ast.ClassDef)):
            homes.setdefault(name, []).append(path)

    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_module_that_a_source_note_names_exists() -> None:
    rooms = "|".join(sorted({path.split("/")[1] for path in SOURCES if path.startswith("strategies/")}))
    missing = [
        f"{path}: {room}.{module}"
        for path, text in SOURCES.items()
        for room, module in re.findall(rf"(?<![\w.`])({rooms})\.(\w+)\.\w+", ast.get_docstring(parsed(text)) or "")
        if path.startswith("strategies/") and f"strategies/{room}/{module}.py" not in SOURCES
    ]

    assert missing == []


def test_a_place_that_a_source_note_names_for_an_equation_exists() -> None:
    named = {path: ast.get_docstring(parsed(text)) or "" for path, text in SOURCES.items() if "/methods/" in path}
    owners: dict[str, set[str]] = {}  # module or class -> what it defines
    for path, text in SOURCES.items():
        for node in [parsed(text), *(each for each in ast.walk(parsed(text)) if isinstance(each, ast.ClassDef))]:
            owner = node.name if isinstance(node, ast.ClassDef) else Path(path).stem
            kinds = (ast.FunctionDef, ast.ClassDef)
            owners.setdefault(owner, set()).update(each.name for each in node.body if isinstance(each, kinds))
    missing = [
        f"{path}: {owner}.{name}"
        for path, note in named.items()
        for owner, name in re.findall(r"->\s+(?:\w+\.)*(\w+)\.(?!py\b)(\w+)", note.partition("Where:")[2])
        if name not in owners.get(owner, set()) and name not in owners
    ]

    assert missing == []


def test_names_of_test_files_are_unique_so_that_pytest_can_tell_them_apart() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    names = [path.name for path in tests if path.name not in ("conftest.py", "__main__.py")]

    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ("adapters", "privacy", "export", "mlflow", "wandb")
    entries = [*project["dependencies"], *chain(*(project["optional-dependencies"][extra] for extra in extras))]
    declared = {re.split(r"[\[<>=!~ ]", entry)[0] for entry in entries}
    imported = set()
    for text in SOURCES.values():
        for node in nodes(parsed(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - set(PACKAGES)

    names = {"sklearn": "scikit-learn", "PIL": "pillow", "mlflow": "mlflow-skinny"}
    assert {names.get(name, name) for name in foreign} <= declared


def test_citation_and_changelog_name_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = (ROOT / "CITATION.cff").read_text()

    assert f"version: {project['version']}\n" in cited
    assert f"title: {project['name']}\n" in cited
    assert "license: Apache-2.0\n" in cited
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == project["version"]
