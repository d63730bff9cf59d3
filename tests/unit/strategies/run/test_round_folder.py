"""Accepted uploads stay as they are; a refused one leaves no trace. test_power_cuts.py has the crashes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import torch
from store_faults import Faults, disk_full, names

from strategies.core.errors import StoreError, UploadError
from strategies.core.facts import UploadFacts
from strategies.method import Snapshot
from strategies.run.round_folder import RoundFolder


def weights(value: float, size: int = 4) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value), "steps": torch.tensor(int(value))}


def give(folder: RoundFolder, client: str, value: float = 1.0) -> None:
    folder.accept(UploadFacts(client, "lenet5", 10, (4, 6)), weights(value))


def test_accept_stores_weights_and_facts_and_returns_the_upload(folder: RoundFolder) -> None:
    upload = folder.accept(UploadFacts("b.1", "lenet5", 7, (3, 4)), weights(2.0))
    folder.accept(UploadFacts("a", "resnet18", pretrained=True), weights(3.0))
    assert folder.held() == ["a", "b.1"]
    first, second = folder.records()
    assert first.facts == UploadFacts("b.1", "lenet5", 7, (3, 4))
    assert second.facts == UploadFacts("a", "resnet18", pretrained=True)
    assert first.bytes == (folder.path / "uploads" / "b.1.safetensors").stat().st_size
    assert datetime.fromisoformat(first.arrived).tzinfo is not None
    assert torch.equal(upload.read()["w"], torch.full((4,), 2.0))
    assert upload.facts == first.facts


def test_accept_of_a_second_upload_under_one_name_keeps_the_first(folder: RoundFolder) -> None:
    give(folder, "a", 1.0)
    with pytest.raises(UploadError, match="^a: its upload is already here"):
        give(folder, "a", 2.0)
    assert torch.equal(folder.uploads()[0].read()["w"], torch.ones(4))
    assert len(folder.records()) == 1


@pytest.mark.parametrize("client", ["", ".", "../x", "a/b", ".hidden", "a" * 65, "a b", "a\n", "ä"])
def test_accept_under_a_name_that_is_invalid_is_refused(folder: RoundFolder, client: str) -> None:
    with pytest.raises(UploadError, match="client is .*: must be a name that matches"):
        give(folder, client)
    assert names(folder.path) == ["lock"]


def test_accept_when_the_disk_is_full_at_any_call_leaves_nothing_and_goes_on(
    folder: RoundFolder, faults: Faults
) -> None:
    give(folder, "first")
    index = (folder.path / "uploads.jsonl").read_bytes()
    calls = faults.count(lambda: give(folder, "counted"))
    assert calls == 4  # the file, its rename, its folder, the line of the index
    (folder.path / "uploads.jsonl").write_bytes(index)
    (folder.path / "uploads" / "counted.safetensors").unlink()
    for at in range(calls):
        line = r"^second: disk full, .*second\.safetensors.*bytes needed.*bytes free"
        with faults.at(at, disk_full), pytest.raises(UploadError, match=line):
            give(folder, "second", 2.0)
        assert (folder.path / "uploads.jsonl").read_bytes() == index
        assert names(folder.path / "uploads") == ["first.safetensors"]
    give(folder, "second", 2.0)
    assert folder.held() == ["first", "second"]
    assert len(folder.uploads()) == 2


def test_uploads_with_a_damaged_file_names_it_both_digests_and_the_remedy(folder: RoundFolder) -> None:
    give(folder, "a")
    give(folder, "b")
    path = folder.path / "uploads" / "b.safetensors"
    expected = folder.records()[1].sha256
    upload = folder.uploads()[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    line = rf"{path}.*client 'b'.*expected sha256 {expected}, found (?!{expected}).*put back a copy"
    with pytest.raises(StoreError, match=line):
        folder.uploads()
    with pytest.raises(StoreError, match="damaged"):
        upload.read()


def test_refuse_keeps_client_reason_and_time_in_order(folder: RoundFolder) -> None:
    folder.refuse("a", "field 'w': not finite")
    folder.refuse("not/a name", "name")
    assert [(row["client"], row["reason"]) for row in folder.refused()] == [
        ("a", "field 'w': not finite"),
        ("not/a name", "name"),
    ]
    assert datetime.fromisoformat(folder.refused()[0]["time"]).tzinfo is not None


def test_save_checkpoint_brings_metrics_to_the_disk_first(folder: RoundFolder, faults: Faults) -> None:
    folder.record({"epoch": 1})
    with faults.at(0, disk_full), pytest.raises(StoreError, match=r"metrics\.jsonl: No space"):
        folder.save_checkpoint(Snapshot(1, {}))
    assert folder.load_checkpoint() is None
    folder.save_checkpoint(Snapshot(1, {"a": 1}))
    snapshot = folder.load_checkpoint()
    assert (snapshot.step, snapshot.state) == (1, {"a": 1})
    folder.clear_checkpoint()
    assert folder.load_checkpoint() is None


def test_writing_when_open_for_reading_is_refused_everywhere(tmp_path: Path) -> None:
    folder = RoundFolder(tmp_path, None)
    for write in (
        lambda: give(folder, "a"),
        lambda: folder.refuse("a", "b"),
        lambda: folder.record({}),
        lambda: folder.save_checkpoint(Snapshot(1, {})),
        folder.clear_checkpoint,
        lambda: folder.truncate_metrics(0),
        folder.repair,
    ):
        with pytest.raises(StoreError, match="open for reading only"):
            write()
    assert names(tmp_path) == []
