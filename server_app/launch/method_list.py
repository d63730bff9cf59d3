"""The methods as the command line lists them: grouped by their assumptions, or one by one with their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server_app.report.tables import output_console
from server_app.settings.choices import ASSUMPTIONS, CHOICES, Choice, assumption_of
from server_app.settings.read import default_settings
from strategies.core.options import options_of
from strategies.rounds.config import NEEDS_CLIENTS, FederatedRounds


def method_facts(name: str) -> dict[str, Any]:
    """Return a method's name, title, source, kind, needs and options, as JSON has them.

    Raises:
        OptionError: The method is unknown.
    """
    method, app_defaults = CHOICES[name], default_settings()
    options = [
        {"key": o.key, "default": o.default, "app_default": app_defaults[o.key], "allowed": o.allowed, "help": o.help}
        for o in options_of(method.config, name)
    ]
    return {"name": name, "title": method.title, "source": method.source, "kind": method.kind,
            "needs": _needs(method), "options": options}  # fmt: skip


def _needs(method: Choice) -> list[str]:
    return [need.value for need in method.needs] + ([NEEDS_CLIENTS] if isinstance(method, FederatedRounds) else [])


def print_overview() -> None:
    """Print a line per method, under its assumption."""
    console = output_console()
    methods = [CHOICES[name] for name in CHOICES]
    named, titled = (max(map(len, words)) for words in (CHOICES, [method.title for method in methods]))
    for heading in ASSUMPTIONS:
        console.print(heading, style="bold")
        for method in methods:
            if assumption_of(method) == heading:
                line = f"  {method.name:<{named}}  {method.title:<{titled}}  {method.kind:<8}  {method.source}"
                console.print(line, soft_wrap=True)
    console.print("options of a method: oneshot methods NAME")


def print_details(facts: Mapping[str, Any]) -> None:
    """Print a method's needs, and its options with this app's defaults in two columns."""
    console = output_console()
    console.print(f"{facts['name']}: {facts['title']} ({facts['source']})")
    for need in facts["needs"]:
        console.print(f"  needs: {need}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("option", no_wrap=True)
    table.add_column("meaning")
    for entry in facts["options"]:
        own = "" if entry["app_default"] == entry["default"] else f"; default of its paper: {entry['default']}"
        table.add_row(f"{entry['key']} = {entry['app_default']}", f"{entry['help']}; {entry['allowed']}{own}")
    console.print(table if facts["options"] else "  no options")
