"""Builds the wheel: the repository's four packages become one, ``oneshot_fl``.

In the repository the packages lie side by side, under short names. Installed like that, they would replace or hide
every other package called ``strategies``. So the wheel has the library as ``oneshot_fl``, with the app's packages, its
settings files and its folder for Flower below it. The files are the repository's own; only absolute imports of the four
packages get their new names. An editable installation is the repository itself.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "oneshot_fl"
HOMES = {"strategies": NAME, **{app: f"{NAME}.{app}" for app in ("fl_app", "client_app", "server_app")}}
APP_FOLDER = "app"  # what `oneshot run` gives to Flower: names the installed apps, and declares the settings
_LEFT_OUT = {"server_app/settings/config_table.py"}  # writes the repository's pyproject.toml
_FROM = re.compile(rb"from\s+([\w.]+)")


class OneNamespace(BuildHookInterface[Any]):
    """Gives the wheel its one package."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the package into a temporary folder, and let the wheel include it.

        Raises:
            ValueError: A source file has an import that cannot be renamed.
        """
        if version == "editable":
            return
        self._tree = tempfile.TemporaryDirectory(prefix="oneshot-fl-")
        write_package(Path(self.root), Path(self._tree.name))
        build_data["force_include"][self._tree.name] = NAME

    def finalize(self, version: str, *_: Any) -> None:
        """Remove the temporary folder."""
        if version != "editable":
            self._tree.cleanup()


def write_package(root: Path, package: Path) -> None:
    """Write the installed package.

    Args:
        root: The repository, or an unpacked source distribution.
        package: The folder of ``oneshot_fl``, which exists.

    Raises:
        ValueError: A source file has an import that cannot be renamed.
    """
    for source, name in HOMES.items():
        home = package.joinpath(*name.split(".")[1:])
        for file in packaged(root / source):
            if file.relative_to(root).as_posix() not in _LEFT_OUT:
                content = file.read_bytes()
                code = renamed(content, str(file)) if file.suffix == ".py" else content
                _write(home / file.relative_to(root / source), code)
    shutil.copytree(root / "conf", package / "conf", ignore=lambda _, names: {n for n in names if n[-5:] != ".toml"})
    _write(package / APP_FOLDER / "pyproject.toml", app_project((root / "pyproject.toml").read_text("utf-8")).encode())
    shutil.copy(root / "LICENSE", package / APP_FOLDER)


def packaged(folder: Path) -> list[Path]:
    """Return the files of a package: code, and the data that it reads."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def renamed(source: bytes, file: str) -> bytes:
    """Return a source file with the installed names in its absolute imports, and not another byte changed.

    Args:
        source: The file's content.
        file: Its name, for errors.

    Raises:
        ValueError: ``import strategies.core`` or the like, which binds the old name.
    """
    lines = source.splitlines(keepends=True)
    imports = [node for node in ast.walk(ast.parse(source, file)) if isinstance(node, ast.Import | ast.ImportFrom)]
    # From the last to the first, so that a change moves nothing that is still to be found.
    for node in sorted(imports, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        line = lines[node.lineno - 1]
        if isinstance(node, ast.Import):
            if any(alias.name.partition(".")[0] in HOMES for alias in node.names):
                raise ValueError(f"{file}:{node.lineno}: import of {ast.unparse(node)[7:]!r}: must be from ... import")
        elif not node.level and node.module and node.module.partition(".")[0] in HOMES:
            found = _FROM.match(line, node.col_offset)
            if found is None:
                raise ValueError(f"{file}:{node.lineno}: from {node.module} import: must stand in one line")
            root, dot, rest = node.module.partition(".")
            new = f"{HOMES[root]}{dot}{rest}".encode()
            lines[node.lineno - 1] = line[: found.start(1)] + new + line[found.end(1) :]
    return b"".join(lines)


def app_project(pyproject: str) -> str:
    """Return the pyproject.toml of the app's folder: the repository's tables for Flower, with the installed apps.

    Args:
        pyproject: The repository's file.
    """
    project = tomllib.loads(pyproject)["project"]
    [flower] = [text for text in project["dependencies"] if text.startswith("flwr")]
    tables = [table for table in re.split(r"(?m)^(?=\[)", pyproject) if table.startswith("[tool.flwr.")]
    components = re.compile(rf'(?m)^(\w+ = ")({"|".join(HOMES)})(?=\.[\w.]+:\w+"$)')
    return f"""[project]
name = "{project["name"]}"
version = "{project["version"]}"
description = "{project["description"]}"
license = {{ file = "LICENSE" }}
dependencies = ["{project["name"]}=={project["version"]}", "{flower}"]

""" + "".join(components.sub(lambda found: found[1] + HOMES[found[2]], table) for table in tables)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
