"""Writes ``[tool.flwr.app.config]`` of pyproject.toml: ``python -m server_app.settings.config_table``.

Flower needs every key there with its default. The dataclasses are the source; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from server_app.settings.read import default_settings, known_options
from server_app.settings.text import to_toml

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


def main() -> None:
    """Rewrite the section in place."""
    PYPROJECT.write_text(with_config_table(PYPROJECT.read_text()))


if __name__ == "__main__":
    main()
