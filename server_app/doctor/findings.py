"""Checks and their findings; no check can block or end the others."""

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
    """The result of one check.

    Attributes:
        level: ``"error"``: a run would fail or be unsafe. ``"warning"``: a run works, but slowly or not always.
            ``"skipped"``: the check could not run.
        check: The subject of the check, in a few words.
        found: The actual state, one line.
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


@dataclass(frozen=True)
class Check:
    """A check that can run.

    Attributes:
        name: Its subject, for the finding if it fails or takes too long.
        run: Returns its findings; a OneShotError that it raises becomes a finding too.
        limit_s: Its time limit in seconds.
        late: The remedy if it takes longer.
    """

    name: str
    run: Callable[[], Iterable[Finding]]
    limit_s: float = LIMIT_S
    late: str = "look for a disk, a mounted folder or another machine that does not answer"


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
    """Return whether any finding is an error."""
    return any(finding.level == "error" for finding in findings)


def _run(check: Check) -> list[Finding]:
    outcome: Future[list[Finding]] = Future()

    def work() -> None:
        try:
            outcome.set_result(list(check.run()))
        except BaseException as error:
            outcome.set_exception(error)
            raise SystemExit from error  # ends this thread silently

    # A daemon thread, because a hanging check must not keep the command from ending.
    threading.Thread(target=work, daemon=True).start()
    try:
        failed = outcome.exception(check.limit_s)
    except TimeoutError:
        return [Finding("error", check.name, f"no answer within {check.limit_s:g} s", fix=check.late)]
    if failed is None:
        return outcome.result()
    if isinstance(failed, OneShotError | OSError):
        return [Finding("error", check.name, str(failed), fix="correct the reported problem, then check again")]
    what = f"the check itself failed: {type(failed).__name__}: {failed}"
    return [Finding("error", check.name, what, fix="report this line; it does not affect the other checks")]
