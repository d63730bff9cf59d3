"""Runs on the uploads of another run: all of them, or without those to be forgotten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_app.config import AppConfig
from server_app.replay.forget import adopt_uploads, forget_settings, what_is_left
from server_app.settings.build import facts_of
from server_app.settings.read import read_settings
from server_app.settings.settled import check_adopted
from strategies.core.errors import OptionError, StoreError
from strategies.core.facts import UploadFacts
from strategies.run.files import read_json, write_json
from strategies.run.run_folder import RunFolder
from strategies.run.stage import pin_clients, pinned_clients

MakeRun = Callable[..., Path]


def stored(run: Path) -> dict[str, Any]:
    with RunFolder.open(run, write=False) as folder:
        return dict(folder.info["settings"])


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


def test_forgetting_in_the_runs_own_folder_starts_the_new_run_beside_it(
    run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(method="fens")
    monkeypatch.chdir(run)

    given = forget_settings(Path(), ["client-001"], stored(run))

    # Inside it, the removal of the forgotten run would remove the new one too.
    assert Path(str(given["run-dir"])).parent == run.parent


def test_forgetting_from_a_run_that_forgot_already_forgets_both(run_folder: MakeRun) -> None:
    run = run_folder(method="fens")
    before = {**stored(run), "forget": "client-000", "min-uploads": 1}

    assert forget_settings(run, ["client-002"], before)["forget"] == "client-000,client-002"


def test_forgetting_more_than_a_run_can_spare_is_refused_before_it_starts(run_folder: MakeRun) -> None:
    run = run_folder(method="fens")
    line = r"1 uploads would be left in .*, setting 'min-uploads' is 2: must be at most 1, by --set, or fewer clients"
    with pytest.raises(OptionError, match=line):
        forget_settings(run, ["client-000", "client-001"], stored(run))


def test_forgetting_a_client_that_has_no_upload_is_refused_by_name(run_folder: MakeRun) -> None:
    run = run_folder()

    with pytest.raises(OptionError, match="--client client-009: no such upload in .*must be client-000, client-001"):
        forget_settings(run, ["client-009"], stored(run))


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


def test_too_few_that_are_left_are_refused(tmp_path: Path, run_folder: MakeRun) -> None:
    run = run_folder()

    with pytest.raises(OptionError, match="1 uploads are left in .*, setting 'min-uploads' is 2: must be at most 1"):
        adopted(tmp_path, run, "client-000,client-001")


def test_a_run_of_which_all_are_forgotten_is_refused(tmp_path: Path, run_folder: MakeRun) -> None:
    run = run_folder()

    with pytest.raises(StoreError, match="holds no uploads of other clients than those to be forgotten"):
        adopted(tmp_path, run, "client-000,client-001,client-002")


def test_facts_name_the_run_that_the_clients_uploaded_to_over_any_number_of_steps(
    tmp_path: Path, run_folder: MakeRun
) -> None:
    run = run_folder()
    with RunFolder.open(run, write=False) as first:
        origin = first.id

    facts = facts_of(str(run), "client-001")
    assert (facts["uploads-of"], facts["uploads-id"], facts["forgotten"]) == (str(run), origin, ["client-001"])
    with RunFolder.create(tmp_path / "second", facts):
        pass
    assert facts_of(str(tmp_path / "second"), "")["uploads-id"] == origin
    assert facts_of("", "") == {}


def test_the_user_learns_which_run_still_holds_the_upload(run_folder: MakeRun) -> None:
    run = run_folder()
    names = ("compared", "replayed", "without", "taken over", "another", "less", "odd", "linked", "taught", "shown")
    settings = {"uploads": str(run)}
    for name in names:
        (run.parent / name).mkdir()
    compared, replayed, without, taken, another, less, odd, linked, taught, shown = (run.parent / one for one in names)
    (run.parent / "link").symlink_to(run.parent)
    (odd / "run.json").write_text("[1]")
    write_json(less / "run.json", {"settings": {**settings, "forget": "client-000"}})
    write_json(linked / "run.json", {"replay-of": str(run.parent / "link" / less.name)})
    write_json(compared / "compare.json", {"runs": [str(run)]})
    write_json(replayed / "run.json", {"replay-of": str(run)})
    cell, second = compared / "cells" / "run" / "dense-seed0", replayed / "round-2"
    for learner, table, place in ((taught, "settings", cell), (shown, "options", second)):
        write_json(learner / "run.json", {table: {"data.proxy-file": str(place / "images.safetensors")}})
    write_json(without / "run.json", {"settings": {**settings, "forget": "client-001"}})
    write_json(taken / "run.json", {"settings": settings})
    write_json(another / "run.json", {"settings": None})

    told = what_is_left(run, ["client-001"])
    again = what_is_left(less, ["client-001"])

    assert f"rm -r {run} {compared} {less} {replayed} '{taken}' {linked} {shown} {taught}\n" in told
    assert "oneshot clean" in told
    assert f"rm -r {less} {run} {compared} {linked} {replayed} '{taken}' {shown} {taught}\n" in again


@pytest.mark.parametrize("files", [".", "uploads", "ensemble/members"])
def test_an_import_of_a_run_s_own_files_holds_the_upload_too(run_folder: MakeRun, files: str) -> None:
    run, other = run_folder(), run_folder(name="other")
    for name, source in (("imported", run), ("strange", other)):
        (run.parent / name).mkdir()
        write_json(run.parent / name / "run.json", {"imported-from": str(source / files), "settings": {}})

    assert f"rm -r {run} {run.parent / 'imported'}\n" in what_is_left(run, ["client-001"])


def test_forget_without_a_run_to_forget_from_is_refused() -> None:
    with pytest.raises(OptionError, match="setting 'forget' is 'client-001': must be '' unless 'uploads' names"):
        AppConfig(forget="client-001")


def test_forgetting_in_a_run_of_real_clients_says_the_command_that_reaches_them(run_folder: MakeRun) -> None:
    run = run_folder()
    info = read_json(run / "run.json")
    write_json(run / "run.json", {**info, "num-supernodes": 0})

    with pytest.raises(OptionError, match="had real clients, .* flwr run . YOUR-SERVER .*forget='client-001'"):
        forget_settings(run, ["client-001"], stored(run))


def test_forgetting_in_imported_uploads_says_to_import_the_others(run_folder: MakeRun) -> None:
    run = run_folder()
    write_json(run / "run.json", {**read_json(run / "run.json"), "num-supernodes": 0, "imported-from": "/zoo"})

    with pytest.raises(OptionError, match="was imported, .*: import /zoo again, without the files of client-001"):
        forget_settings(run, ["client-001"], stored(run))


def test_forgotten_uploads_stay_forgotten_in_runs_on_its_uploads(tmp_path: Path, run_folder: MakeRun) -> None:
    first = facts_of(str(run_folder()), "client-001")
    with RunFolder.create(tmp_path / "second", first):
        pass

    assert facts_of(str(tmp_path / "second"), "client-000")["forgotten"] == ["client-000", "client-001"]


def test_an_upload_that_came_too_late_for_the_run_is_not_adopted(tmp_path: Path, run_folder: MakeRun) -> None:
    run = run_folder()
    with RunFolder.open(run) as folder:
        pin_clients(folder.round(1), ["client-000", "client-001"])
        state = folder.round(1).uploads()[0].read()
        folder.round(1).accept(UploadFacts("client-009", "lenet5", 5), state)

    with adopted(tmp_path, run) as new:
        assert new.round(1).held() == ["client-000", "client-001"]


def adoption(run: Path, *, clients: int = 3, **changes: Any) -> None:
    given = {**stored(run), "uploads": str(run), **changes}
    check_adopted(read_settings(given), clients)


def test_another_aggregator_on_the_uploads_of_a_run_is_allowed(run_folder: MakeRun) -> None:
    run = run_folder(method="fens")

    adoption(run, **{"fens.aggregator": "linear", "fens.rounds": 7, "min-uploads": 1})
    adoption(run, method="dense")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.alpha": 0.7}, "setting 'data.alpha' is 0.7, but the run whose uploads these are was made with 0.3"),
        ({"seed": 4}, "setting 'seed' is 4, but the run whose uploads these are was made with 0"),
        ({"fens.holdout": 0.3}, "setting 'fens.holdout' is 0.3, but the clients of .* kept 0.1 from training"),
        ({"clients": 9}, "--num-supernodes is 9: must be 3"),
    ],
)
def test_settings_by_which_clients_would_hold_other_examples_are_refused(
    run_folder: MakeRun, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OptionError, match=reason):
        adoption(run_folder(method="fens"), **changes)


def test_rounds_on_uploads_of_clients_that_kept_nothing_are_refused(run_folder: MakeRun) -> None:
    run = run_folder(method="dense")

    with pytest.raises(OptionError, match="'fens.holdout' is 0.1, but the clients of .* kept nothing from training"):
        adoption(run, method="fens")
    adoption(run, method="fens", **{"fens.aggregator": "average"})
