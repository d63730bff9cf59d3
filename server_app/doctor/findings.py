"""What a check finds, and how checks are run: none can hang the others, none can end them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from strategies.core.errors import OneShotError

Level = Literal["ok", "warning", "error", "skipped"]
LIMIT_S = 20.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``"error"``: a run would fail or be unsafe; ``"warning"``: it works, not as well as it could, or perhaps
            not always; ``"skipped"``: it could not be looked at.
        check: What was looked at, in a few words.
        found: What was found, one line.
        needed: What is needed; empty where that goes without saying.
        fix: What to do, one line; empty if there is nothing to do.
    """

    level: Level
    check: str
    found: str
    needed: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        """Keep every text to its line: some come from files and from other machines."""
        for name in ("found", "needed", "fix"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split())[:400])


@dataclass(frozen=True)
class Check:
    """A check to be run.

    Attributes:
        name: What it looks at, for a finding of its own.
        run: Returns its findings; a OneShotError that it raises is one, too.
        limit_s: Seconds it may take.
        late: What to do if it takes longer.
    """

    name: str
    run: Callable[[], Iterable[Finding]]
    limit_s: float = LIMIT_S
    late: str = "see what it waits for: a disk, a mounted folder or another machine that does not answer"


def run_checks(checks: Sequence[Check], before: Callable[[str], None] | None = None) -> list[Finding]:
    """Run checks, one after another.

    Args:
        checks: The checks.
        before: Called with the name of each before it runs.

    Returns:
        All findings in the order of the checks.
    """
    found: list[Finding] = []
    for check in checks:
        if before is not None:
            before(check.name)
        found += _run(check)
    return found


def has_errors(findings: Iterable[Finding]) -> bool:
    """Say whether one of them is an error."""
    return any(finding.level == "error" for finding in findings)


def _run(check: Check) -> list[Finding]:
    outcome: Future[list[Finding]] = Future()

    def work() -> None:
        try:
            outcome.set_result(list(check.run()))
        except BaseException as error:
            outcome.set_exception(error)
            raise SystemExit from error  # ends this thread without a word

    # A daemon: one that hangs must not keep the command from ending.
    threading.Thread(target=work, daemon=True).start()
    try:
        failed = outcome.exception(check.limit_s)
    except TimeoutError:
        return [Finding("error", check.name, f"no answer within {check.limit_s:g} s", fix=check.late)]
    if failed is None:
        return outcome.result()
    if isinstance(failed, OneShotError | OSError):
        return [Finding("error", check.name, str(failed), fix="mend what the line says, then ask again")]
    what = f"the check itself failed: {type(failed).__name__}: {failed}"
    return [Finding("error", check.name, what, fix="report this line; the other checks are not touched by it")]
