"""The source files of the packages, for tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

P = TypeVar("P")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("strategies", "fl_app", "client_app", "server_app")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def of_each(paths: Iterable[P]) -> Callable[[Callable[[P], None]], Callable[[], None]]:
    """Ask a test about every file and report all that fail; a test per file would take longer than its question."""
    asked = list(paths)

    def decorate(test: Callable[[P], None]) -> Callable[[], None]:
        def over_all() -> None:
            wrong = []
            for path in asked:
                try:
                    test(path)
                except AssertionError as error:
                    wrong.append(f"{path}: {error}")
            assert wrong == [], "\n".join(wrong)

        over_all.__name__, over_all.__doc__ = test.__name__, test.__doc__
        return over_all

    return decorate


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a file's text; tests only look at it."""
    return ast.parse(text)


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return a tree's node and all below it."""
    return tuple(ast.walk(tree))


def module_name(path: str) -> str:
    """Return a file's module by its absolute name."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


def package_of(path: str) -> list[str]:
    """Return the package that a file's relative imports start from."""
    return path.split("/")[:-1]


def imported(path: str, node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what an import names, made absolute, with its level; a name that is a module counts as that module."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, 0) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        here = package_of(path)
        base = here[: len(here) - node.level + 1] if node.level else []
        target = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{target}.{alias.name}"
            yield (full if full in MODULES else target), node.level
