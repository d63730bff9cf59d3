"""The source files of the packages, for tests that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("strategies", "fl_app", "client_app", "server_app")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a file's text; tests only look at it."""
    return ast.parse(text)


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
