"""What a paper keeps to itself: its name, its config, and the size of what it reaches."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest
from sources import ROOT, SOURCES, nodes, of_each, parsed
from test_rooms import PAPERS, import_graph, room_of

from strategies.method import METHODS

# Rooms that serve every method alike.
ALIKE = (
    "strategies/core/", "strategies/method.py", "strategies/uploads/", "strategies/compute/", "strategies/gatekeeper/",
    "strategies/rounds/", "strategies/run/", "strategies/client/", "strategies/flower/", "server_app/settings/",
    "server_app/launch/", "server_app/replay/",
)  # fmt: skip
# What names a paper there, and why.
NAMED = {
    "strategies/core/registry.py": "the list of the teachers",
    "strategies/method.py": "the list of the methods",
    "strategies/rounds/config.py": "the list of the methods that refine the model of a round",
    "strategies/flower/strategies.py": "the strategies that have their paper's name",
    "strategies/flower/rounds/flboost.py": "a strategy that has its paper's name",
    "strategies/client/fens.py": "the clients' half of a paper",
    "strategies/client/fens_answers.py": "the clients' half of a paper",
    "strategies/run/retired.py": "settings that stored runs of methods hold",
    "strategies/run/merging.py": "the default method of merge, as the app's",
    "server_app/settings/read.py": "the app's own defaults of some methods' settings",
    "server_app/settings/settled.py": "settings of a method that may differ where a run goes on",
}
# FedAvg is a strategy of Flower's as well.
NAMES = {form for name in METHODS if name != "fedavg" for form in (name, name.replace("-", "_"))} | {
    METHODS[name].title.lower() for name in METHODS if name != "fedavg"
}
WORDS = NAMES - {"dense"}  # an array may be dense


def docstrings(tree: ast.AST) -> set[ast.AST]:
    """Return the constants that are docstrings."""
    bodies = [node.body for node in nodes(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return {body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)}


def identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, ast.ImportFrom):
        yield from (node.module or "").split(".")


def papers_in(text: str) -> set[str]:
    """Return the methods that a file's code names: texts like ``fens`` or ``fens.rounds``, identifiers, imports."""
    tree, found = parsed(text), set[str]()
    spoken = docstrings(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in spoken:
            found |= {word for word in re.findall(r"[\w-]+(?=\.[a-z])", node.value.lower()) if word in NAMES}
            found |= {node.value.lower()} & NAMES
        for name in identifiers(node):
            parts = {name.lower(), *re.split(r"_+", name.lower())}
            found |= parts & WORDS
    return found


def looks_into_a_config(text: str) -> list[str]:
    """Return the calls of getattr and hasattr that ask a config for an option that it may not have."""
    return [
        ast.unparse(node)
        for node in nodes(parsed(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if re.fullmatch(r"(.*[._])?config", ast.unparse(node.args[0]))
    ]


def reads_a_job_s_config(text: str) -> list[str]:
    return [
        ast.unparse(node)
        for node in nodes(parsed(text))
        if isinstance(node, ast.Attribute) and node.attr == "config" and "job" in ast.unparse(node.value)
    ]


def reached(path: str, graph: Mapping[str, set[str]]) -> set[str]:
    """Return a file and all that it imports, directly or not."""
    found, pending = set[str](), [path]
    while pending:
        if (one := pending.pop()) not in found:
            found.add(one)
            pending += graph[one]
    return found


@of_each(path for path in SOURCES if path.startswith(ALIKE))
def test_rooms_that_serve_every_method_name_no_paper(path: str) -> None:
    found = papers_in(SOURCES[path])

    assert bool(found) is (path in NAMED), found


@pytest.mark.parametrize(
    "code",
    [
        'if method.name == "fens":\n    pass',
        'key = "fens.rounds"',
        'key = f"setting fed-et.epochs is {value}"',
        "from ..tally import fit",
        "def check_tally(job): ...",
        "x = TALLY",
        'title = "Co-Boosting"',
    ],
)
def test_the_search_for_papers_finds_one(code: str) -> None:
    assert papers_in(code)


@pytest.mark.parametrize("code", ["x.dense()", '"""As in FENS."""', 'FedAvg("fedavg")', "# tally\nx = 1"])
def test_the_search_for_papers_passes_over_other_words(code: str) -> None:
    assert not papers_in(code)


@of_each(path for path in SOURCES if path != "strategies/core/options.py")
def test_only_a_paper_s_file_asks_a_config_for_an_option_it_may_lack(path: str) -> None:
    paper = path.startswith("strategies/") and room_of(path) == PAPERS

    assert paper or looks_into_a_config(SOURCES[path]) == []


@of_each(path for path in SOURCES if re.match(r"strategies/(teacher|combiners|distillation)/", path))
def test_no_config_enters_a_piece(path: str) -> None:
    assert reads_a_job_s_config(SOURCES[path]) == []


def test_the_searches_in_configs_find_examples_of_each_kind() -> None:
    assert looks_into_a_config('getattr(job.config, "rounds", 1)') == ["getattr(job.config, 'rounds', 1)"]
    assert looks_into_a_config('hasattr(settings.method_config, "rounds")')
    assert looks_into_a_config("getattr(module, name)") == []
    assert reads_a_job_s_config("level = self._job.config.level") == ["self._job.config"]


@pytest.mark.parametrize("path", ["strategies/feddf.py"])
def test_a_method_of_sixty_lines_reaches_at_most_40_files(path: str) -> None:
    module = path.removesuffix(".py").replace("/", ".")
    count = f"import sys, {module}; print(sum(name.startswith('strategies.') for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", count], cwd=ROOT, capture_output=True, text=True, check=True)

    assert len(reached(path, import_graph(SOURCES))) <= 40
    assert int(loaded.stdout) <= 40


@of_each(path for path in SOURCES if path.startswith("strategies/"))
def test_a_module_that_a_source_note_names_exists(path: str) -> None:
    rooms = {other.split("/")[1] for other in SOURCES if other.startswith("strategies/") and other.count("/") > 1}
    note = ast.get_docstring(parsed(SOURCES[path])) or ""
    named = re.findall(rf"(?<![\w.`])({'|'.join(sorted(rooms))})\.(\w+)\.\w+", note)

    assert [f"{room}.{module}" for room, module in named if f"strategies/{room}/{module}.py" not in SOURCES] == []
