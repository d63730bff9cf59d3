"""Writes ``[tool.flwr.app.config]`` of pyproject.toml, and the catalogue that the command line reads.

``python -m server_app.settings.config_table`` does both. Flower needs every key in pyproject.toml with its default. The
dataclasses are the source; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from server_app.settings.catalogue import BOUNDS, CATALOGUE
from server_app.settings.choices import ASSUMPTIONS, CHOICES, Choice
from server_app.settings.read import default_settings, known_options
from server_app.settings.text import to_toml
from strategies.core.options import Option
from strategies.rounds.config import NEEDS_CLIENTS

BEGIN = "# Written by `make config` from the dataclasses; change those."
SECTION = re.compile(r"\[tool\.flwr\.app\.config\]\n.*?(?=\n\[|\Z)", re.DOTALL)
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def config_table() -> str:
    """Return the section as TOML, a comment behind every key."""
    help_of = {o.key: f"{o.help}; {o.allowed}" for o in known_options()}
    lines = ["[tool.flwr.app.config]", BEGIN]
    for key, value in default_settings().items():
        lines.append(f"{key} = {to_toml(value)}  # {help_of[key]}")
    return "\n".join(lines) + "\n"


def with_config_table(pyproject: str) -> str:
    """Return the text of a pyproject.toml with its config section replaced."""
    return SECTION.sub(lambda _: config_table(), pyproject)


def catalogue_text() -> str:
    """Return the catalogue as JSON, a method or an option per line."""
    app = default_settings()
    options = [_option(option, app[option.key]) for option in known_options()]
    methods = [_method(CHOICES[name]) for name in CHOICES]
    parts = {"assumptions": ASSUMPTIONS, "methods": methods, "options": options}
    rows = {name: ",\n".join(json.dumps(row, ensure_ascii=False) for row in part) for name, part in parts.items()}
    return "{" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in rows.items()) + "}\n"


def _option(option: Option, app_default: object) -> dict[str, Any]:
    facts = {name: found for name in BOUNDS if (found := option.facts.get(name)) not in (None, ())}
    own = {"key": option.key, "kind": option.kind.__name__, "default": option.default, "app_default": app_default}
    return {**own, "allowed": option.allowed, "help": option.help, "facts": facts}


def _method(method: Choice) -> dict[str, Any]:
    needs = [need.value for need in method.needs] + [NEEDS_CLIENTS] * (method.method is None)
    own = {"name": method.name, "title": method.title, "source": method.source, "kind": method.kind}
    return {**own, "assumption": method.assumption, "needs": sorted(needs)}


def main() -> None:
    """Rewrite the section in place, and the catalogue."""
    CATALOGUE.write_text(catalogue_text(), encoding="utf-8")
    PYPROJECT.write_text(with_config_table(PYPROJECT.read_text()))


if __name__ == "__main__":
    main()
