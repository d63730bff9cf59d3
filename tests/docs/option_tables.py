"""Write the tables of options into the pages: ``python tests/docs/option_tables.py``, which ``make config`` runs.

The dataclasses are the source. A page says where its tables stand by their heads; a test compares them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from server_app.settings.choices import CHOICES
from strategies.core.options import PUBLISHED, QUICK, flatten, options_of, preset_of, presets_of

DOCS = Path(__file__).parents[2] / "docs"
# What has a page of its own: every method, and federated learning in rounds.
NAMES = list(CHOICES)
PAGES = {name: DOCS / "methods" / f"{name}.md" for name in NAMES}
SETTINGS = DOCS / "settings.md"
OPTION_HEAD = "| option | quick | published | allowed | meaning |"
SETTING_HEAD = "| setting | default | allowed | meaning |"
PRESET_HEAD = "| preset | `published` |"
# The methods whose page has a table of presets; other pages say theirs in words.
PRESETS = [name for name in NAMES if PRESET_HEAD in PAGES[name].read_text()]


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
    rows = []
    for option in sorted(options_of(CHOICES[name].config, name), key=lambda option: not option.rules["main"]):
        published = option.presets.get(PUBLISHED, option.default)
        quick = option.presets.get(QUICK, published)
        other = shown(published) if quick != published else ""
        rows.append([f"`{option.key}`", shown(quick), other, option.allowed, option.help])
    return table(OPTION_HEAD, rows) if rows else None


def presets_table(name: str) -> str:
    """Return where the presets of a method differ from its published values."""
    config = CHOICES[name].config
    default = flatten(config(), name)
    presets = {key: flatten(preset_of(config, key), name) for key in presets_of(config)}
    rows = [
        [f"`{key}`", shown(value), *(shown(values[key]) if values[key] != value else "" for values in presets.values())]
        for key, value in default.items()
        if any(values[key] != value for values in presets.values())
    ]
    return table(" ".join([PRESET_HEAD, *(f"`{key}` |" for key in presets)]), rows)


def settings_table() -> str:
    """Return the table of the app's settings, without those of the methods."""
    own = options_of(AppConfig)
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
