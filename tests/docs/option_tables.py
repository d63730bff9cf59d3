"""Write the tables of options into the pages: ``python tests/docs/option_tables.py``, which ``make config`` runs.

The dataclasses are the source. A page says where its tables stand by their heads; a test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from server_app.settings.choices import CHOICES
from server_app.settings.read import default_settings, known_options
from strategies.core.options import flatten
from strategies.methods import co_boosting, dense, fed_gen, feddf, flboost

DOCS = Path(__file__).parents[2] / "docs"
# What has a page of its own: every method, and federated learning in rounds.
NAMES = list(CHOICES)
PAGES = {name: DOCS / "methods" / f"{name}.md" for name in NAMES}
SETTINGS = DOCS / "settings.md"
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": dense.PRESETS, "co-boosting": co_boosting.PRESETS, "feddf": feddf.PRESETS, "fed-gen": fed_gen.PRESETS,
    "flboost": flboost.PRESETS,
}  # fmt: skip

OPTION_HEAD = "| option | default | in this app | allowed | meaning |"
SETTING_HEAD = "| setting | default | allowed | meaning |"
PRESET_HEAD = "| preset | default |"


def shown(value: Any) -> str:
    """Return a value as a page shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if len(str(value)) > 8 and isinstance(value, float) else str(value)


def table(head: str, rows: list[list[str]]) -> str:
    """Return a Markdown table; a bar inside a cell ends it, so that none may have one."""
    rule = "|" + "---|" * (head.count("|") - 1)
    assert not any("|" in cell for row in rows for cell in row)
    return "\n".join([head, rule, *("| " + " | ".join(row) + " |" for row in rows)])


def options_table(name: str) -> str | None:
    """Return the table of a method's options, or None if it has none."""
    own = [option for option in known_options() if option.key.startswith(f"{name}.")]
    app = default_settings()
    rows = [
        [
            f"`{option.key}`", shown(option.default),
            shown(app[option.key]) if app[option.key] != option.default else "", option.allowed, option.help,
        ]
        for option in own
    ]  # fmt: skip
    return table(OPTION_HEAD, rows) if rows else None


def presets_table(name: str) -> str:
    """Return where the presets of a method differ from its defaults."""
    config = CHOICES[name].config
    default = flatten(config(), name)
    presets = {key: flatten(config(**changes), name) for key, changes in PRESETS[name].items() if key != "default"}
    rows = [
        [f"`{key}`", shown(value), *(shown(values[key]) if values[key] != value else "" for values in presets.values())]
        for key, value in default.items()
        if any(values[key] != value for values in presets.values())
    ]
    return table(" ".join([PRESET_HEAD, *(f"`{key}` |" for key in presets)]), rows)


def settings_table() -> str:
    """Return the table of the app's settings, without those of the methods."""
    own = [option for option in known_options() if option.key.partition(".")[0] not in NAMES]
    return table(SETTING_HEAD, [[f"`{o.key}`", shown(o.default), o.allowed, o.help] for o in own])


def with_table(text: str, head: str, wanted: str) -> str:
    """Return a page's text with the one table that begins so replaced."""
    found, count = re.subn(rf"^{re.escape(head)}.*\n(\|.*\n)*", lambda _: f"{wanted}\n", text, flags=re.MULTILINE)
    assert count == 1, f"{count} tables begin with {head}"
    return found


def written(path: Path) -> str:
    """Return a page's text with its tables as the dataclasses have them."""
    text = path.read_text()
    if path == SETTINGS:
        return with_table(text, SETTING_HEAD, settings_table())
    if (options := options_table(path.stem)) is not None:
        text = with_table(text, OPTION_HEAD, options)
    return with_table(text, PRESET_HEAD, presets_table(path.stem)) if path.stem in PRESETS else text


def main() -> None:
    """Rewrite the tables in place."""
    for path in (*PAGES.values(), SETTINGS):
        path.write_text(written(path))


if __name__ == "__main__":
    main()
