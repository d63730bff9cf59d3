from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import oneshot
from doctor_keys import Authority

from server_app.doctor import DoctorFinding, print_findings, run_checks
from strategies.core.errors import DataError


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("ONESHOT_CLIENT_STATE", str(tmp_path / "state"))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name.startswith("fl") else None)


def doctor(*words: str | Path) -> Any:
    return oneshot("doctor", *words)


def test_doctor_of_a_good_server_exits_with_0_and_says_fit(tmp_path: Path) -> None:
    keys = Authority().issue(tmp_path / "keys", "server.example.org", "127.0.0.1")

    ended = doctor("server", "--certificates", keys, "--address", "server.example.org:39871", "--clients", 9)

    assert ended.exit_code == 0, ended.output
    assert "0 error" in ended.stdout
    assert "\nfit" in ended.stdout
    for part in ("architecture lenet5", "certificate for server.example.org", "port 39871", "disk of the run folder"):
        assert part in ended.stdout


def test_doctor_of_a_bad_server_exits_with_1_and_names_the_remedy(tmp_path: Path) -> None:
    settings = f"data.name=cifar10 data.root={tmp_path}"

    ended = doctor("server", "--run-config", settings, "--certificates", tmp_path / "keys")

    assert ended.exit_code == 1
    assert "put the data set there" in " ".join(ended.stdout.split())
    assert "not fit: correct every error" in ended.stdout


def test_doctor_as_json_is_one_line() -> None:
    ended = doctor("node", "--node-config", 'client="a" partition-id=0', "--format", "json")

    assert ended.exit_code == 0, ended.output
    assert ended.stdout.count("\n") == 1
    said = json.loads(ended.stdout)
    assert (said["status"], said["role"]) == ("ok", "node")
    levels = {finding["check"]: finding["level"] for finding in said["findings"]}
    assert (levels["SuperLink"], levels["node config"]) == ("skipped", "ok")
    assert said["findings"][0].keys() == {"level", "check", "found", "needed", "fix"}


def test_doctor_of_a_node_names_its_faults(tmp_path: Path) -> None:
    ended = doctor(
        "node", "--node-config", 'client="a" checkpoint="absent.pt" architecture="cnn5"',
        "--key", tmp_path / "absent",
        "--superlink", "127.0.0.1:9", "--root-certificates", tmp_path / "ca.crt", "--format", "json",
    )  # fmt: skip

    assert ended.exit_code == 1
    findings = json.loads(ended.stdout)["findings"]
    wrong = {finding["check"] for finding in findings if finding["level"] == "error"}
    assert wrong == {
        "architecture cnn5",
        "checkpoint absent.pt",
        "certificate ca.crt",
        "node key absent",
        "SuperLink 127.0.0.1:9",
    }
    assert all(finding["fix"] for finding in findings if finding["level"] == "error")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["node", "--superlink", "https://a"], "must be HOST:PORT"),
        (["server", "--run-config", "data.nane=x"], "data.nane"),
        (["server", "--certificates", "a,b"], "--certificates is 'a,b'"),
        (["node", "--node-config", "client=a"], "texts in quotes"),
    ],
)
def test_doctor_asked_wrongly_is_one_line_of_error(words: list[str], reason: str) -> None:
    ended = doctor(*words)

    assert ended.exit_code == 1
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1


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
