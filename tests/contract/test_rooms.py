"""Where every file stands: the rooms of the packages in one order, and no circle of files or folders."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from sources import SOURCES, imported, module_name, nodes, parsed

# Where every file stands, from the ground up: it imports its own room and those below, for type checkers too.
ROOMS = {
    "strategies": (
        "core", "method", "uploads", "statistics", "weights", "teacher", "combiners", "scores", "distillation",
        "gatekeeper", "compute", "methods", "run", "merging", "client", "flower",
        "flower/rounds", "__init__",
    ),
    "server_app": (
        "__init__", "settings", "report", "launch", "replay", "export", "compare", "doctor", "app", "local",
        "cli", "__main__",
    ),
}  # fmt: skip


def room_of(path: str) -> str:
    """Return the room of a file: its folder, or of a root file its own name."""
    package, *folders, name = path.removesuffix(".py").split("/")
    if folders:
        nested = "/".join(folders[:2])
        return nested if nested in ROOMS[package] else folders[0]
    return name


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return file -> the files that it imports, at whatever place, for type checkers too."""
    paths = {module_name(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for path, text in sources.items():
        names = {name for node in nodes(parsed(text)) for name, _ in imported(path, node)}
        graph[path] = {paths[name] for name in names & paths.keys()} - {path}
    return graph


def climbing(sources: Mapping[str, str]) -> list[str]:
    """Return the imports that lead from a room to a higher one of the same package."""
    return [
        f"{path} imports {other}, which stands above it"
        for path, others in import_graph(sources).items()
        for other in sorted(others)
        if (package := path.partition("/")[0]) in ROOMS and other.startswith(f"{package}/")
        if ROOMS[package].index(room_of(other)) > ROOMS[package].index(room_of(path))
    ]


def folder_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return folder -> the folders that its files import; a file at the root of a package is one by itself."""
    folders = {path: path.rpartition("/")[0] if path.count("/") > 1 else path for path in sources}
    graph: dict[str, set[str]] = {folder: set() for folder in folders.values()}
    for path, others in import_graph(sources).items():
        graph[folders[path]] |= {folders[other] for other in others} - {folders[path]}
    return graph


@pytest.mark.parametrize("package", ROOMS)
def test_every_file_has_a_room_and_every_room_a_file(package: str) -> None:
    assert {room_of(path) for path in SOURCES if path.startswith(f"{package}/")} == set(ROOMS[package])


def test_no_file_imports_from_a_room_above_its_own() -> None:
    assert climbing(SOURCES) == []


def test_files_do_not_import_each_other_in_a_circle() -> None:
    graph = import_graph(SOURCES)

    assert len(graph) == len(SOURCES)
    assert sum(map(len, graph.values())) > len(SOURCES)  # it has edges at all
    tuple(TopologicalSorter(graph).static_order())  # raises a CycleError that names the circle


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    tuple(TopologicalSorter(folder_graph(SOURCES)).static_order())


CLIMBING = {
    "strategies/core/options.py": "if TYPE_CHECKING:\n    from ..method import Job",
    "strategies/method.py": "if TYPE_CHECKING:\n    from .teacher.ensemble import Ensemble",
    "strategies/combiners/gate.py": "def f():\n    from ..methods.fens import METHOD",
    "strategies/methods/fens.py": "from ..run import stage",
    "strategies/flower/one_shot.py": "from .rounds.iterative import Iterative",
    "server_app/settings/read.py": "from server_app.report.finish import finish",
    "server_app/replay/stored.py": "from server_app import cli",
}


def test_the_order_of_the_rooms_finds_imports_that_climb() -> None:
    found = climbing({**dict.fromkeys(SOURCES, ""), **CLIMBING})

    assert sorted(line.partition(" imports ")[0] for line in found) == sorted(CLIMBING)


def test_the_searches_for_circles_find_those_for_type_checkers_and_in_functions() -> None:
    files = {
        "fl_app/config.py": "def f():\n    from .models import build",
        "fl_app/models/__init__.py": "if TYPE_CHECKING:\n    from ..config import AppConfig",
    }
    folders = {
        "fl_app/data/a.py": "from ..models.b import name",
        "fl_app/models/b.py": "",
        "fl_app/models/c.py": "from ..data.d import name",
        "fl_app/data/d.py": "",
    }

    for graph in (import_graph(files), folder_graph(files), folder_graph(folders)):
        with pytest.raises(CycleError):
            tuple(TopologicalSorter(graph).static_order())
    tuple(TopologicalSorter(import_graph(folders)).static_order())
