from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from client_app.keeping import MODELS_KEPT, KeptModel, Trained
from strategies.core.errors import UploadError
from strategies.core.facts import UploadFacts
from strategies.core.places import RUNS_KEPT

RUN = "0123456789abcdef" * 2
TRAINED = Trained(UploadFacts("client-000", "lenet5", 12, (5, 7, 0), ranges={"": (-0.5, 2.0)}), 0.25, 0.875)
STATE = {"w": torch.arange(6.0).reshape(2, 3).t(), "steps": torch.tensor(3)}


def kept(root: Path, run: str = RUN, client: str = "client-000", server_round: int = 1) -> KeptModel:
    return KeptModel(str(root), run, client, server_round)


def test_kept_uploads_come_back_equal(tmp_path: Path) -> None:
    assert kept(tmp_path).load() is None

    kept(tmp_path).save(TRAINED, STATE)

    found = kept(tmp_path).load()
    assert found[0] == TRAINED
    assert found[1].keys() == STATE.keys()
    assert all(torch.equal(found[1][key], value) for key, value in STATE.items())
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("ending", [".safetensors", ".json"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\xff\xfe", b"half"])
def test_a_torn_or_missing_file_counts_as_nothing(tmp_path: Path, ending: str, content: bytes | None) -> None:
    kept(tmp_path).save(TRAINED, STATE)
    (file,) = tmp_path.rglob(f"*{ending}")
    if content is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9] if content == b"half" else content)

    assert kept(tmp_path).load() is None

    kept(tmp_path).save(TRAINED, STATE)
    assert kept(tmp_path).load() is not None


def test_a_run_of_ever_new_rounds_leaves_only_a_client_s_newest_models(tmp_path: Path) -> None:
    kept(tmp_path, client="client-000-1").save(TRAINED, STATE)
    for number in range(3 * MODELS_KEPT):
        keep = kept(tmp_path, server_round=1000 - number)
        keep.save(TRAINED, STATE)
        os.utime(tmp_path / RUN / f"client-000-{1000 - number}.safetensors", (1000 + number, 1000 + number))
        assert keep.load() is not None
    again = kept(tmp_path, server_round=1)
    again.save(TRAINED, STATE)

    rounds = [*range(1000 - 3 * MODELS_KEPT + 1, 1000 - 2 * MODELS_KEPT), 1]
    assert {path.name for path in (tmp_path / RUN).glob("client-000-*.json")} == {
        "client-000-1-1.json",
        *(f"client-000-{number}.json" for number in rounds),
    }
    assert len(list((tmp_path / RUN).glob("*.safetensors"))) == MODELS_KEPT + 1


@pytest.mark.parametrize("run_id", ["", "..", "../../etc", "a/b", "abc", "G" * 32, RUN.upper()])
def test_a_run_id_that_is_invalid_is_refused_because_it_names_a_folder(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UploadError, match="the server's run-id is .*: must be 32 hexadecimal digits"):
        kept(tmp_path, run=run_id)


def test_clients_side_by_side_when_they_share_a_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    # Old runs that every one of them wants to forget at the same time.
    for number in range(RUNS_KEPT + 8):
        kept(tmp_path, run=f"{number:032x}").save(TRAINED, STATE)
    barrier = threading.Barrier(8)

    def save(number: int) -> None:
        mine = replace(TRAINED, facts=replace(TRAINED.facts, num_examples=number))
        barrier.wait()
        for turn in range(10):
            keep = kept(tmp_path, run=f"{turn:031x}f", client=f"client-{number}")
            keep.save(mine, {"w": torch.full((3,), float(number))})
            found = keep.load()
            assert (found[0].facts.num_examples, found[1]["w"].tolist()) == (number, [float(number)] * 3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(8)))


def test_keep_makes_folders_for_this_user_alone_and_leaves_those_that_are_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)

    kept(tmp_path / "state").save(TRAINED, STATE)

    made = (tmp_path, tmp_path / "state", tmp_path / "state" / RUN)
    assert [oct(folder.stat().st_mode & 0o777) for folder in made] == ["0o755", "0o700", "0o700"]


def test_a_run_folder_without_our_marker_is_never_removed(tmp_path: Path) -> None:
    mine = [f"{number:032x}" for number in range(100, 103)]
    for run in mine:
        (tmp_path / run).mkdir()
        (tmp_path / run / "thesis.txt").write_text("mine")
        os.utime(tmp_path / run, (1, 1))
    for number in range(RUNS_KEPT + 2):
        kept(tmp_path, run=f"{number:032x}").save(TRAINED, STATE)
        os.utime(tmp_path / f"{number:032x}", (1000 + number, 1000 + number))
    kept(tmp_path, run=mine[0]).save(TRAINED, STATE)  # a folder that held something stays what it was

    left = {path.name for path in tmp_path.iterdir()}

    assert set(mine) <= left
    assert len(left) == RUNS_KEPT + len(mine)
    assert kept(tmp_path, run=mine[0]).load() is not None
    assert sorted(path.suffix for path in (tmp_path / mine[0]).iterdir()) == [".json", ".safetensors", ".txt"]
