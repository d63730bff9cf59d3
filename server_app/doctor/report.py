"""Prints findings as a table, or as one line of JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server_app.doctor.findings import Finding, Level, has_errors
from server_app.launch.console import Format

_STYLES: Mapping[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def print_findings(role: str, facts: Mapping[str, Any], findings: Sequence[Finding], format: Format) -> None:  # noqa: A002
    """Print all findings; the errors come last, where a terminal shows them.

    Args:
        role: The machine's role.
        facts: The machine's facts, see :func:`server_app.doctor.versions.machine_facts`.
        findings: The findings of all checks.
        format: Text or JSON.
    """
    if format == "json":
        status = "failed" if has_errors(findings) else "ok"
        found = [asdict(finding) for finding in findings]
        sys.stdout.write(json.dumps({"status": status, "role": role, "facts": facts, "findings": found}) + "\n")
        return
    console = Console(markup=False)
    console.print(_table(findings))
    counts = Counter(finding.level for finding in findings)
    console.print(f"{role}: " + ", ".join(f"{counts[level]} {level}" for level in _STYLES), highlight=False)
    if counts["error"]:
        console.print("not fit: correct every error, then check again", highlight=False)
    elif counts["warning"]:
        console.print("fit, with warnings: read them", highlight=False)
    else:
        console.print("fit", highlight=False)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", overflow="fold")
    table.add_column("found, needed, what to do", overflow="fold")
    # sorted() is stable: findings of one level stay in the order of their checks.
    order = ["ok", "skipped", "warning", "error"]
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        shown = Text(finding.found)
        if finding.needed and finding.level != "ok":
            shown.append(f"\nneeded: {finding.needed}")
        if finding.fix and finding.level != "ok":
            shown.append(f"\ndo: {finding.fix}", style="bold")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.check), shown)
    return table
