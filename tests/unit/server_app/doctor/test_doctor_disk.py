from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from server_app.doctor import machine
from strategies.core.durable import MIB


def test_a_folder_is_written_to_where_it_will_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    good, *_ = machine.client_state(str(tmp_path / "a" / "b"), MIB)
    bad, *_ = machine.client_state(str(tmp_path / "file" / "b"), MIB)

    assert (good.level, bad.level) == ("ok", "error")
    assert "ONESHOT_CLIENT_STATE" in bad.fix
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize(("free", "level"), [(10 * MIB, "error"), (1000 * MIB, "warning"), (5000 * MIB, "ok")])
def test_the_disk_of_the_run_folder_has_to_hold_the_uploads(
    tmp_path: Path, free: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    *_, found = machine.run_folder(str(tmp_path), 500 * MIB, 50 * MIB)

    assert found.level == level
    assert level == "ok" or found.fix


def test_the_run_folder_should_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONESHOT_RUNS", raising=False)
    unnamed = {finding.check: finding.level for finding in machine.run_folder("", MIB, MIB)}
    monkeypatch.setenv("ONESHOT_RUNS", str(tmp_path / "runs"))

    assert unnamed["run folder's place"] == "warning"
    assert [finding.check for finding in machine.run_folder("", MIB, MIB)] == ["run folder", "disk of the run folder"]


@pytest.mark.parametrize(("free", "level"), [(9000 * MIB, "ok"), (70 * MIB, "error")])
def test_the_disk_of_the_state_folder_has_to_hold_the_models(
    tmp_path: Path, free: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert [finding.level for finding in machine.client_state(str(tmp_path), 40 * MIB)] == ["ok", level]


def test_a_model_above_the_largest_upload_is_an_error() -> None:
    sizes = {"small": MIB, "large": 3 * MIB + 1}

    assert machine.upload_limit(sizes, 4.0).level == "ok"
    found = machine.upload_limit(sizes, 3.0)
    assert (found.level, "max-upload-mib=4" in found.fix) == ("error", True)
