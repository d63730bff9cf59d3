"""Write the tables of options into the pages: ``python tests/docs/option_tables.py``, which ``make config`` runs.

The dataclasses are the source. A page says where its tables stand by their heads; a test compares them.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from server_app.settings.choices import CHOICES
from strategies.core.options import PUBLISHED, QUICK, Option, flatten, options_of, preset_of, presets_of

DOCS = Path(__file__).parents[2] / "docs"
# What has a page of its own: every method, and federated learning in rounds.
NAMES = list(CHOICES)
PAGES = {name: DOCS / "methods" / f"{name}.md" for name in NAMES}
SETTINGS = DOCS / "settings.md"
SHARED = DOCS / "methods" / "distillation.md"
OPTION_HEAD = "| option | quick | published | allowed | meaning |"
USUAL = f"With the [usual values]({SHARED.name}#options)"
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


def values_of(option: Option) -> tuple[str, str]:
    """Return an option's value in preset quick and its published one."""
    published = option.presets.get(PUBLISHED, option.default)
    return shown(option.presets.get(QUICK, published)), shown(published)


def option_row(option: Option) -> list[str]:
    """Return an option's row."""
    quick, published = values_of(option)
    return [f"`{option.key}`", quick, published if published != quick else "", option.allowed, option.help]


@cache
def shared_options() -> dict[str, Option]:
    """Return the options that pages leave to the common table, by key, each with its most frequent values.

    They are those of the methods that have more than three options of the table ``server``.
    """
    methods = [options_of(CHOICES[name].config, name) for name in NAMES]
    found: dict[str, list[Option]] = {}
    for options in methods:
        shared = [option for option in options if option.key.startswith("server.")]
        for option in shared if len(shared) > 3 else ():
            found.setdefault(option.key, []).append(option)
    most = {key: Counter(map(values_of, options)).most_common(1)[0][0] for key, options in found.items()}
    return {key: next(o for o in options if values_of(o) == most[key]) for key, options in found.items()}


def options_table(name: str) -> str | None:
    """Return the table of a method's options, or None if it has none.

    Below it, or in its place, are the names of the shared options that have the usual values.
    """
    own = sorted(options_of(CHOICES[name].config, name), key=lambda option: not option.rules["main"])
    shared = shared_options() if sum(option.key.startswith("server.") for option in own) > 3 else {}
    usual = [o for o in own if o.key in shared and values_of(o) == values_of(shared[o.key])]
    rows = [option_row(option) for option in own if option not in usual]
    names = ", ".join(f"`{option.key}`" for option in usual)
    parts = [table(OPTION_HEAD, rows)] if rows else []
    parts += [textwrap.fill(f"{USUAL}: {names}.", 120, break_on_hyphens=False)] if usual else []
    return "\n\n".join(parts) or None


def shared_table() -> str:
    """Return the table of the options that pages leave to it."""
    return table(OPTION_HEAD, [option_row(option) for option in shared_options().values()])


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
    """Return a page's text with the one table that begins so, and the usual values below it or alone, replaced."""
    rows, usual = rf"{re.escape(head)}.*\n(?:\|.*\n)*", rf"{re.escape(USUAL)}(?:.+\n)+"
    found, count = re.subn(
        rf"^(?:{rows}(?:\n{usual})?|{usual})" if head == OPTION_HEAD else f"^{rows}",
        lambda _: f"{wanted}\n",
        text,
        flags=re.MULTILINE,
    )
    assert count == 1, f"{count} tables begin with {head}"
    return found


def written(path: Path) -> str:
    """Return a page's text with its tables as the dataclasses have them."""
    text = path.read_text()
    if path == SETTINGS:
        return with_table(text, SETTING_HEAD, settings_table())
    if path == SHARED:
        return with_table(text, OPTION_HEAD, shared_table())
    if (options := options_table(path.stem)) is not None:
        text = with_table(text, OPTION_HEAD, options)
    return with_table(text, PRESET_HEAD, presets_table(path.stem)) if path.stem in PRESETS else text


def main() -> None:
    """Rewrite the tables in place."""
    for path in (*PAGES.values(), SHARED, SETTINGS):
        path.write_text(written(path))


if __name__ == "__main__":
    main()
