"""The methods as the command line lists them: grouped by their assumptions, or one by one with their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from server_app.report.tables import output_console
from server_app.settings.catalogue import catalogue


def print_overview() -> None:
    """Print the methods' names under their assumptions, and there by what they give; a screen holds all."""
    console, methods = output_console(), catalogue().methods.values()
    for heading in catalogue().assumptions:
        table = Table.grid("kind", "names", padding=(0, 2, 0, 0))
        alike = [method for method in methods if method["assumption"] == heading]
        for kind in dict.fromkeys(method["kind"] for method in alike):
            names = [method["name"] for method in alike if method["kind"] == kind]
            table.add_row(f"  {kind:<8}", ", ".join(names))
        console.print(heading, style="bold")
        console.print(table)
    console.print("source, needs and options of a method: oneshot methods NAME")


def print_details(facts: Mapping[str, Any]) -> None:
    """Print a method's source, result and needs, and its options with this app's defaults in two columns."""
    console = output_console()
    console.print(f"{facts['name']}: {facts['title']} ({facts['source']})")
    console.print(f"  {facts['assumption']}; result: {facts['kind']}")
    for need in facts["needs"]:
        console.print(f"  needs: {need}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("option", no_wrap=True)
    table.add_column("meaning")
    for entry in facts["options"]:
        own = "" if entry["app_default"] == entry["default"] else f"; default of its paper: {entry['default']}"
        table.add_row(f"{entry['key']} = {entry['app_default']}", f"{entry['help']}; {entry['allowed']}{own}")
    console.print(table if facts["options"] else "  no options")
