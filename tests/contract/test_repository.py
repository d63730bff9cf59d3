"""What holds for every file: limits of size, docstrings, and words that do not belong here."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sources import nodes, of_each, parsed

from strategies.method import METHODS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("strategies", "fl_app", "client_app", "server_app")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

FILE_LINES, FUNCTION_LINES, ARGUMENTS, POSITIONAL = 300, 40, 7, 3

# Files with a reason to exceed the limit. No file may grow beyond its size here, and one within the limit leaves.
LARGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS = {
    "strategies/flower/one_shot.py::__init__": 54,  # a strategy's constructor is where a user finds every setting
}
MORE_ARGUMENTS = {
    "strategies/flower/one_shot.py::__init__": 17,
    "strategies/flower/rounds/iterative.py::__init__": 16,
}

# Spelt in two halves, so that this file is not found itself.
MARKS = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")
# Examples may name these home folders, which belong to no person.
HOMES = "/ro" + "ot/|/ho" + r"me/(?!you\b|someone\b)|/Us" + "ers/|/wo" + "rk/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


each_source = of_each(SOURCES)


@cache
def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


@cache
def functions(tree: ast.AST) -> list[Function]:
    return [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def docstring_lines(node: ast.AST) -> set[int]:
    first = node.body[0] if getattr(node, "body", None) else None  # type: ignore[attr-defined]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return set()


@cache
def code_lines(text: str) -> frozenset[int]:
    """Return the numbers of the lines that hold more than comments and blanks."""
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return frozenset(number for number, line in lines if line and not line.startswith("#"))


def length(function: Function, text: str) -> int:
    """Return a function's lines of code, its nested functions' included, without docstrings, comments and blanks."""
    documented = set().union(*(docstring_lines(node) for node in functions(function)))
    span = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    return len((span & code_lines(text)) - documented)


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a reader may use: public classes and functions of the module, and public methods of those classes."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, Function) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


@each_source
def test_a_file_has_at_most_so_many_lines(path: Path) -> None:
    limit = LARGER_FILES.get(relative(path), FILE_LINES)

    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_every_exception_is_needed_still() -> None:
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in LARGER_FILES}
    named = [(ROOT / name.partition("::")[0], name.partition("::")[2]) for name in (*LONGER_FUNCTIONS, *MORE_ARGUMENTS)]
    found = {f"{relative(path)}::{name}": named_function(path, name) for path, name in named}

    assert all(count > FILE_LINES for count in lines.values())
    assert all(length(*found[name]) > FUNCTION_LINES for name in LONGER_FUNCTIONS)
    assert all(arguments_of(found[name][0]) > ARGUMENTS for name in MORE_ARGUMENTS)


def named_function(path: Path, name: str) -> tuple[Function, str]:
    (function,) = [function for function in functions(tree_of(path)) if function.name == name]
    return function, path.read_text(encoding="utf-8")


@each_source
def test_a_function_has_at_most_so_many_lines_of_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    lengths = {function.name: length(function, text) for function in functions(tree_of(path))}

    limits = {name: LONGER_FUNCTIONS.get(f"{relative(path)}::{name}", FUNCTION_LINES) for name in lengths}
    assert {name: count for name, count in lengths.items() if count > limits[name]} == {}


def arguments_of(function: Function) -> int:
    given = function.args
    names = [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return len([name for name in names if name not in ("self", "cls")])


@each_source
def test_a_function_takes_at_most_so_many_arguments(path: Path) -> None:
    too_many = {
        function.name: arguments_of(function)
        for function in functions(tree_of(path))
        if arguments_of(function) > MORE_ARGUMENTS.get(f"{relative(path)}::{function.name}", ARGUMENTS)
    }

    assert too_many == {}


@each_source
def test_every_public_thing_has_a_docstring_and_every_hint(path: Path) -> None:
    tree = tree_of(path)

    assert ast.get_docstring(tree), "the module has no docstring"
    silent = [name for name, node in public_definitions(tree) if not ast.get_docstring(node)]  # type: ignore[arg-type]
    assert silent == []
    unhinted = [
        f"{function.name}({argument.arg})"
        for function in functions(tree)
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if argument.annotation is None and argument.arg not in ("self", "cls")
    ]
    assert unhinted == []
    assert [function.name for function in functions(tree) if function.returns is None] == []


def smells(tree: ast.AST) -> list[str]:
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "breakpoint"):
            found.append(f"{node.func.id} in line {node.lineno}")
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            found.append(f"star import in line {node.lineno}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            found.append(f".cuda() in line {node.lineno}")
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {kind.id for kind in caught if isinstance(kind, ast.Name)}
            raises = any(isinstance(inner, ast.Raise) for inner in nodes(node))
            if node.type is None or ("Exception" in names) or ("BaseException" in names and not raises):
                found.append(f"blind except in line {node.lineno}")
    return found


@each_source
def test_code_has_no_print_star_import_or_blind_except(path: Path) -> None:
    assert smells(tree_of(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "from os import *",
        "model.cuda()",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException):\n    pass",
    ],
)
def test_the_check_for_smells_finds_them(code: str) -> None:
    assert len(smells(ast.parse(code))) == 1


def test_the_checks_of_size_count_as_they_say() -> None:
    documented = 'def f(a: int, *, b: int = 0) -> None:\n    """Doc.\n\n    Doc.\n    """\n'
    text = documented + "    # why\n\n    g(\n        a,\n    )\n"
    (function,) = functions(ast.parse(text))

    assert length(function, text) == 4
    assert arguments_of(function) == 2


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
                found.append(f"{relative(path)}:{number}: {line.strip()[:100]}")

    assert found == []


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_s_file_begins_with_its_source_note(name: str) -> None:
    note = ast.get_docstring(tree_of(Path(inspect.getfile(METHODS[name].config)))) or ""

    headings = re.findall(r"^(Paper|Symbols|Where|Deviations): \S", note, re.MULTILINE)
    if METHODS[name].source == "this library":
        assert headings == ["Symbols", "Where"]
        assert re.match(r"[^\n]+: [^\n]+\.\n\nA method of this library, published nowhere else\.", note)
        return
    assert headings == ["Paper", "Symbols", "Where", "Deviations"]
    assert "Read version: " in note
    assert re.match(r"[^\n]+: [^\n]+\.\n\nPaper: ", note), "the first line says what the server does with the uploads"
    assert "https://" in note


def test_names_of_test_files_are_unique_so_that_pytest_can_tell_them_apart() -> None:
    names = [path.name for path in TESTS if path.name not in ("conftest.py", "__main__.py")]

    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_package_that_is_imported_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = [
        *project["dependencies"],
        *(
            text
            for extra in ("privacy", "export", "mlflow", "wandb")
            for text in project["optional-dependencies"][extra]
        ),
    ]
    declared = {re.split(r"[\[<>=!~ ]", entry)[0] for entry in entries}
    imported = set()
    for path in SOURCES:
        for node in nodes(tree_of(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - set(PACKAGES)

    assert {
        {"sklearn": "scikit-learn", "PIL": "pillow", "mlflow": "mlflow-skinny"}.get(name, name) for name in foreign
    } <= declared


def test_citation_names_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = (ROOT / "CITATION.cff").read_text()

    assert f"version: {project['version']}\n" in cited
    assert f"title: {project['name']}\n" in cited
    assert "license: Apache-2.0\n" in cited
