"""Settings of the command line that name a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from server_app.launch.arguments import settings_of
from strategies.core.errors import OptionError
from strategies.run.run_folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    for name in ("20260101-fedens", "20260102-tally"):
        RunFolder.create(folder / name, {"method": name.partition("-")[2]}).close()
    return folder


@pytest.mark.parametrize("key", ["uploads", "teacher-run"])
def test_a_run_in_a_setting_may_be_a_name_latest_or_a_path(runs: Path, key: str) -> None:
    told = {word: settings_of([f"{key}={word}"])[key] for word in ("20260101-fedens", "latest", "elsewhere/run")}

    assert told == {
        "20260101-fedens": str(runs / "20260101-fedens"),
        "latest": str(runs / "20260102-tally"),
        "elsewhere/run": str(runs.parent / "elsewhere/run"),
    }
    assert settings_of([f"{key}="])[key] == ""


def test_latest_without_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(OptionError, match="'latest' names no run"):
        settings_of(["uploads=latest"])
