"""Writes ``[tool.flwr.app.config]`` of pyproject.toml, and the catalogue that the command line reads.

``python -m server_app.settings.config_table`` does both. Flower needs every key in pyproject.toml with its default. The
dataclasses are the source; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from server_app.settings.catalogue import CATALOGUE, RULES, to_toml
from server_app.settings.choices import ASSUMPTIONS, CHOICES, Choice
from server_app.settings.read import default_settings, known_options
from strategies.core.options import (
    FIXED,
    PUBLISHED,
    RENAMED,
    RENAMED_VALUES,
    UNSET,
    Option,
    keys_of,
    moved_keys,
    options_of,
)
from strategies.flower.rounds.config import NEEDS_CLIENTS

BEGIN = "# Written by `make config` from the dataclasses; change those."
SECTION = re.compile(r"\[tool\.flwr\.app\.config\]\n.*?(?=\n\[|\Z)", re.DOTALL)
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def config_table() -> str:
    """Return the section as TOML, a comment behind every key."""
    lines = [f"{o.key} = {to_toml(o.default)}  # {o.help}; {o.allowed}{_unset(o)}" for o in known_options()]
    return "\n".join(["[tool.flwr.app.config]", BEGIN, *lines]) + "\n"


def _unset(option: Option) -> str:
    """Return what stands for an unset option, for the end of its comment."""
    if option.presets:
        return "; empty: " + ", ".join(f"{to_toml(value)} in preset {name}" for name, value in option.presets.items())
    return "; empty: as the method and its preset say" if option.default == UNSET and option.kind is not str else ""


def with_config_table(pyproject: str) -> str:
    """Return the text of a pyproject.toml with its config section replaced."""
    return SECTION.sub(lambda _: config_table(), pyproject)


def catalogue_text() -> str:
    """Return the catalogue as JSON, a method or an option per line."""
    options = [_option(option) for option in known_options()]
    methods = [_method(CHOICES[name]) for name in CHOICES]
    parts = {
        "assumptions": ASSUMPTIONS,
        "methods": methods,
        "options": options,
        "former": [list(former_keys().items())],
    }
    rows = {name: ",\n".join(json.dumps(row, ensure_ascii=False) for row in part) for name, part in parts.items()}
    return "{" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in rows.items()) + "}\n"


def _option(option: Option) -> dict[str, Any]:
    rules = {
        name: found for name in RULES if (found := option.rules.get(name)) not in (None, ()) and found is not False
    }
    own = {"key": option.key, "kind": option.kind.__name__, "default": option.default, "presets": option.presets}
    return {**own, "allowed": option.allowed, "help": option.help, "rules": rules}


def _method(method: Choice) -> dict[str, Any]:
    needs = [need.value for need in method.needs] + [NEEDS_CLIENTS] * (method.method is None)
    own = {"name": method.name, "title": method.title, "source": method.source, "kind": method.kind}
    keys = {o.key: o.presets or {PUBLISHED: o.default} for o in options_of(method.config, method.name)}
    merges = method.method is not None and method.method.merges_weights_alone
    facts = {"assumption": method.assumption, "merges_weights_alone": merges, "needs": sorted(needs)}
    return {**own, **facts, "options": keys}


def former_keys() -> dict[str, str]:
    """Return the keys, and ``key=value`` pairs, that settings had before -> what to write in their place."""
    listed = default_settings()
    values = {f"{key}={old}": f"{new!r} now" for key, pairs in RENAMED_VALUES.items() for old, new in pairs.items()}
    found = {old: f"{new!r} now" for old, new in RENAMED.items() if new in listed}
    found |= {old: f"{to_toml(value)} now, which no setting changes" for old, value in FIXED.items()}
    found["fens.ensemble-patience-s"] = "ten times 'fens.patience-s' now"
    for name in CHOICES:
        config = CHOICES[name].config
        found |= {old: f"{new!r} now" for old, new in moved_keys(config, name).items() if old not in listed}
        fixed = {key for key in keys_of(config, name) if key not in listed and key not in found}
        found |= dict.fromkeys(fixed, "a value of the method's preset, which no setting changes")
    return {**dict(sorted(found.items())), **values}


def main() -> None:
    """Rewrite the section in place, and the catalogue."""
    CATALOGUE.write_text(catalogue_text(), encoding="utf-8")
    PYPROJECT.write_text(with_config_table(PYPROJECT.read_text()))


if __name__ == "__main__":
    main()
