"""``oneshot doctor``: whether a machine is fit to be the server, or a node, of a deployment.

It looks at versions, TLS, keys, ports, disk and data. A check is a function that yields findings: the state, the
requirement, and the remedy. It changes nothing, downloads nothing and ends no process.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server_app.launch.console import Format
from strategies.core.errors import OneShotError

Level = Literal["ok", "skipped", "warning", "error"]
_STYLES: Mapping[Level, str] = {"ok": "green", "skipped": "dim", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check.

    Attributes:
        level: ``"error"``: a run would fail or be unsafe. ``"warning"``: a run works, but not always.
            ``"skipped"``: the check could not run.
        needed: The required state; empty where it is obvious.
        fix: The remedy, one line; empty if none is needed.
    """

    level: Level
    check: str
    found: str
    needed: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        """Put every text on one line: some come from files and from other machines."""
        for name in ("found", "needed", "fix"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split())[:400])


def run_checks(checks: Mapping[str, Iterable[DoctorFinding]]) -> list[DoctorFinding]:
    """Run named checks, each a generator of findings; a check that fails is an error and ends no other."""
    found: list[DoctorFinding] = []
    for name, check in checks.items():
        try:
            found.extend(check)
        except (OneShotError, OSError) as error:
            found.append(DoctorFinding("error", name, str(error), fix="correct the reported problem, then check again"))
    return found


def print_findings(role: str, findings: Sequence[DoctorFinding], format: Format) -> bool:  # noqa: A002
    """Print all findings of a role, the errors last, where a terminal shows them; return whether there is no error."""
    counts = Counter(finding.level for finding in findings)
    if format == "json":
        status = "failed" if counts["error"] else "ok"
        facts = {"status": status, "role": role, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(facts) + "\n")
        return not counts["error"]
    table = Table("", "check", "found, needed, what to do")
    for finding in sorted(findings, key=lambda finding: list(_STYLES).index(finding.level)):
        shown = Text(finding.found)
        if finding.needed and finding.level != "ok":
            shown.append(f"\nneeded: {finding.needed}")
        if finding.fix and finding.level != "ok":
            shown.append(f"\ndo: {finding.fix}", style="bold")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.check), shown)
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print(f"{role}: " + ", ".join(f"{counts[level]} {level}" for level in _STYLES))
    console.print("not fit: correct every error, then check again" if counts["error"] else "fit")
    return not counts["error"]
