"""The methods as the command line lists them: grouped by their assumptions, or one by one with their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server_app.report.tables import output_console
from server_app.settings.catalogue import catalogue


def print_overview() -> None:
    """Print a line per method, under its assumption."""
    console, methods = output_console(), catalogue().methods.values()
    named, titled = (max(len(method[column]) for method in methods) for column in ("name", "title"))
    for heading in catalogue().assumptions:
        console.print(heading, style="bold")
        for method in (method for method in methods if method["assumption"] == heading):
            line = f"  {method['name']:<{named}}  {method['title']:<{titled}}  {method['kind']:<8}  {method['source']}"
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
