from __future__ import annotations

from collections.abc import Iterator

from server_app.doctor import DoctorFinding, print_findings, run_checks
from strategies.core.errors import DataError


def fine() -> Iterator[DoctorFinding]:
    yield DoctorFinding("ok", "fine", "all of it")


def test_checks_when_one_fails_go_on_with_the_others() -> None:
    def refuses() -> Iterator[DoctorFinding]:
        yield DoctorFinding("ok", "half", "of it")
        raise DataError("no data in here")

    found = run_checks({"a": refuses(), "b": fine()})

    assert [finding.level for finding in found] == ["ok", "error", "ok"]
    assert found[1].found == "no data in here"
    assert found[1].fix


def test_only_errors_fail() -> None:
    others = [DoctorFinding("ok", "a", ""), DoctorFinding("warning", "b", ""), DoctorFinding("skipped", "c", "")]

    assert print_findings("machine", others, "json")
    assert not print_findings("machine", [*others, DoctorFinding("error", "d", "")], "text")


def test_a_finding_is_of_one_line_whatever_it_tells() -> None:
    found = DoctorFinding("error", "a", "of\nsome\x0b file " + "x" * 900, fix="do\nthis")

    assert "\n" not in found.found + found.fix
    assert len(found.found) == 400
