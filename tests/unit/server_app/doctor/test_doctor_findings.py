from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from server_app.doctor.findings import Check, Finding, has_errors, run_checks
from strategies.core.errors import DataError


def fine() -> Iterator[Finding]:
    yield Finding("ok", "fine", "all of it")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_checks_when_one_hangs_or_fails_go_on_with_the_others() -> None:
    hang = threading.Event()

    def hangs() -> list[Finding]:
        hang.wait(30)
        return []

    def refuses() -> Iterator[Finding]:
        yield Finding("ok", "half", "of it")
        raise DataError("no data in here")

    def breaks() -> list[Finding]:
        return [Finding("ok", "never", str(1 // 0))]

    began = time.monotonic()
    named: list[str] = []
    found = run_checks(
        [Check("a", hangs, 0.2, "wait no longer"), Check("b", refuses), Check("c", breaks), Check("d", fine)],
        named.append,
    )
    hang.set()

    assert time.monotonic() - began < 5
    assert named == ["a", "b", "c", "d"]
    assert [finding.level for finding in found] == ["error", "error", "error", "ok"]
    assert (found[0].found, found[0].fix) == ("no answer within 0.2 s", "wait no longer")
    assert found[1].found == "no data in here"
    assert "ZeroDivisionError" in found[2].found
    assert all(finding.fix for finding in found[:3])


def test_only_errors_fail() -> None:
    assert not has_errors([Finding("ok", "a", ""), Finding("warning", "b", ""), Finding("skipped", "c", "")])
    assert has_errors([Finding("ok", "a", ""), Finding("error", "b", "")])


def test_a_finding_is_of_one_line_whatever_it_tells() -> None:
    found = Finding("error", "a", "of\nsome\x0b file " + "x" * 900, fix="do\nthis")

    assert "\n" not in found.found + found.fix
    assert len(found.found) == 400
