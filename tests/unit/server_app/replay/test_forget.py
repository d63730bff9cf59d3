"""Runs on the uploads of another run: all of them, or without those to be forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MakeRun

from server_app.replay.forget import adopt_uploads, forget_settings
from server_app.settings.build import facts_of
from server_app.settings.checks import check_adopted
from server_app.settings.read import read_settings
from strategies.core.durable import read_json
from strategies.core.errors import OptionError
from strategies.run.run_folder import RunFolder
from strategies.run.stage import pinned_clients


def stored(run: Path) -> dict[str, Any]:
    return dict(read_json(run / "run.json")["settings"])


def adopted(tmp_path: Path, run: Path, forget: str = "", *, min_uploads: int = 2) -> RunFolder:
    target = RunFolder.create(tmp_path / "new", {})
    adopt_uploads(target, str(run), forget, min_uploads=min_uploads)
    return target


def test_forgetting_starts_a_new_run_beside_the_old_one_on_its_uploads_without_the_client(run_folder: MakeRun) -> None:
    run = run_folder(method="fens")

    given = forget_settings(run, ["client-001"], stored(run))

    assert given["uploads"] == str(run.absolute())
    assert given["forget"] == "client-001"
    assert Path(str(given["run-dir"])).parent == run.parent
    assert "fens-without-client-001" in str(given["run-dir"])
    assert {**stored(run), **{key: given[key] for key in ("uploads", "forget", "run-dir", "resume")}} == given


def test_forgetting_more_than_a_run_can_spare_is_refused_before_it_starts(run_folder: MakeRun) -> None:
    run = run_folder(method="fens")
    line = r"1 uploads would be left in .*, setting 'min-uploads' is 2: must be at most 1, by --set, or fewer clients"
    with pytest.raises(OptionError, match=line):
        forget_settings(run, ["client-000", "client-001"], stored(run))


def test_adopted_uploads_are_copies_and_the_stage_begins_with_them(tmp_path: Path, run_folder: MakeRun) -> None:
    run = run_folder("lenet5", "mnist-cnn", "lenet5")

    with adopted(tmp_path, run, "client-001") as new, RunFolder.open(run, write=False) as old:
        mine, theirs = new.round(1).uploads(), old.round(1).uploads()
        assert [upload.client for upload in mine] == ["client-000", "client-002"]
        assert pinned_clients(new.round(1)) == ("client-000", "client-002")
        for upload, other in zip(mine, (theirs[0], theirs[2]), strict=True):
            assert (upload.architecture, upload.num_examples) == (other.architecture, other.num_examples)
            assert upload.label_counts == other.label_counts
            assert all(torch.equal(value, other.read()[key]) for key, value in upload.read().items())
        assert old.round(1).held() == ["client-000", "client-001", "client-002"]
    for path in (tmp_path / "new").rglob("*"):
        assert "client-001" not in path.name


def test_adopting_again_after_a_crash_takes_missing_uploads_only(tmp_path: Path, run_folder: MakeRun) -> None:
    run = run_folder()
    with adopted(tmp_path, run) as new:
        (new.path / "stage.json").unlink()
        adopt_uploads(new, str(run), "client-002", min_uploads=1)

        assert pinned_clients(new.round(1)) == ("client-000", "client-001")


def test_facts_name_the_run_that_the_clients_uploaded_to_over_steps(tmp_path: Path, run_folder: MakeRun) -> None:
    run = run_folder()
    with RunFolder.open(run, write=False) as first:
        origin = first.id

    facts = facts_of(str(run), "client-001")
    assert (facts["uploads-of"], facts["uploads-id"], facts["forgotten"]) == (str(run), origin, ["client-001"])
    with RunFolder.create(tmp_path / "second", facts):
        pass
    assert facts_of(str(tmp_path / "second"), "")["uploads-id"] == origin
    assert facts_of("", "") == {}


@pytest.mark.parametrize(
    ("changes", "clients", "reason"),
    [
        ({"data.alpha": 0.7}, 3, "setting 'data.alpha' is 0.7, but the run whose uploads these are was made with 0.3"),
        ({"seed": 4}, 3, "setting 'seed' is 4, but the run whose uploads these are was made with 0"),
        ({"fens.holdout": 0.3}, 3, "setting 'fens.holdout' is 0.3, but the clients of .* kept 0.1 from training"),
        ({}, 9, "--num-supernodes is 9: must be 3"),
    ],
)
def test_settings_by_which_clients_would_hold_other_examples_are_refused(
    run_folder: MakeRun, changes: dict[str, Any], clients: int, reason: str
) -> None:
    run = run_folder(method="fens")
    with pytest.raises(OptionError, match=reason):
        check_adopted(read_settings({**stored(run), "uploads": str(run), **changes}), clients)
