"""PEFT's folders of LoRA adapters, imported and merged by replays into one folder that PEFT loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import replayed
from safetensors.torch import load_file, save_file

import strategies.core.vision  # noqa: F401  before transformers, which imports torchvision
from server_app.export.exporting import stored_models
from server_app.replay.imports import ImportRequest, import_checkpoints, import_lines
from strategies import TiesConfig, merge
from strategies.core.errors import OneShotError, OptionError

LAYER = "base_model.model.fc"
RANKS = {"north": 2, "south": 1, "west": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of three adapters of one layer, 3 x 4, and what else lies there."""
    for seed, (name, rank) in enumerate(RANKS.items()):
        (place := tmp_path / "adapters" / name).mkdir(parents=True)
        rng = torch.Generator().manual_seed(seed)
        tensors = {f"{LAYER}.lora_A.weight": torch.randn(rank, 4, generator=rng)}
        tensors[f"{LAYER}.lora_B.weight"] = torch.randn(3, rank, generator=rng)
        save_file(tensors, place / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["fc"]}
        (place / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapters" / "README.md").write_text("from the clients")
    torch.save({"fc.weight": torch.zeros(3, 4)}, tmp_path / "adapters" / "base.pt")
    return tmp_path / "adapters"


def update(place: Path) -> torch.Tensor:
    """Return s B A of a folder."""
    tensors = load_file(place / "adapter_model.safetensors")
    config = json.loads((place / "adapter_config.json").read_text())
    a, b = (tensors[f"{LAYER}.lora_{part}.weight"] for part in "AB")
    return config["lora_alpha"] / len(a) * b @ a


def imported(folder: Path, **how: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"architecture": "", "settings": {}, "out": folder.parent / "run", **how}
    return import_checkpoints(ImportRequest(folder, **given), log=lambda _: None)


def merged_by(method: str, result: dict[str, Any], **overrides: Any) -> Path:
    return Path(replayed(result, method, **overrides)["run_dir"]) / "adapter"


def test_adapters_are_imported_and_a_replay_merges_their_updates_into_one_folder(folder: Path) -> None:
    (map_file := folder.parent / "map.toml").write_text("[north]\nnum-examples = 30\n[south]\nnum-examples = 10\n"
                                                        "[west]\nnum-examples = 60\n")  # fmt: skip
    result = imported(folder, map_file=map_file)
    assert [(row["client"], row["num_examples"]) for row in result["uploads"]] == [
        ("north", 30), ("south", 10), ("west", 60),
    ]  # fmt: skip
    assert sorted(result["left_out"]) == ["README.md", "base.pt"]
    assert "3 imported, 0 refused, 2 other files left out" in "\n".join(import_lines(result))
    merged = merged_by("fedavg", result)
    wanted = 0.3 * update(folder / "north") + 0.1 * update(folder / "south") + 0.6 * update(folder / "west")
    torch.testing.assert_close(update(merged), wanted)
    with pytest.raises(OptionError, match="no logits of classes, which an export needs: load adapter/ by PeftModel"):
        stored_models(merged.parent)


@pytest.mark.parametrize(
    ("method", "config", "options"),
    [("ties", TiesConfig(aligned=True), {"ties.aligned": True}), ("dare", None, {"seed": 0}), ("tsv", None, {})],
)
def test_every_merge_of_adapters_gives_what_merge_gives(
    folder: Path, tmp_path: Path, method: str, config: Any, options: dict[str, Any]
) -> None:
    (folder / "base.pt").unlink()
    merge(folder, method, config=config, log=lambda _: None).save(tmp_path / "wanted")
    merged = merged_by(method, imported(folder), **options)
    torch.testing.assert_close(update(merged), update(tmp_path / "wanted"))


def test_peft_loads_the_merged_folder(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    base = torch.nn.Sequential()
    base.add_module("fc", torch.nn.Linear(4, 3))
    before = base.fc.weight.detach().clone()
    merged = merged_by("fedavg", imported(folder))
    whole = peft.PeftModel.from_pretrained(base, merged).merge_and_unload().fc.weight
    torch.testing.assert_close(whole - before, sum(update(folder / name) for name in RANKS) / 3)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"settings": {"data.name": "digits"}}, "data.name"),
        ({"settings": {"method": "dense"}}, "'dense'"),
        ({"architecture": "adapter", "map": "[keys]\nfc = 'head'\n"}, "PEFT names the tensors"),
    ],
)
def test_what_does_not_fit_adapters_is_refused(folder: Path, how: dict[str, Any], line: str) -> None:
    if "map" in how:
        (map_file := folder.parent / "map.toml").write_text(how.pop("map"))
        how = {**how, "map_file": map_file}
    with pytest.raises(OneShotError, match=line):
        imported(folder, **how)
    assert not (folder.parent / "run").exists()


def test_an_adapter_beyond_the_limit_of_an_upload_is_not_read(folder: Path) -> None:
    tensors = {f"{LAYER}.lora_A.weight": torch.zeros(2, 4), f"{LAYER}.lora_B.weight": torch.zeros(3, 2)}
    (folder / "west" / "adapter_model.safetensors").unlink()
    torch.save({**tensors, "filler": torch.zeros(2**18)}, folder / "west" / "adapter_model.bin")
    line = r"west.*: its contents are 1\.0 MiB, must be at most 0\.5 MiB \(max-upload-mib\)"
    with pytest.raises(OneShotError, match=line):
        imported(folder, settings={"max-upload-mib": 0.5})
    assert len(imported(folder, settings={"max-upload-mib": 0.5}, skip_bad=True)["uploads"]) == 2


def test_a_damaged_adapter_is_refused_or_skipped_and_a_folder_without_any_says_what_is_needed(folder: Path) -> None:
    (folder / "west" / "adapter_config.json").write_text("{")
    with pytest.raises(OneShotError, match="1 of 3 checkpoints .* are refused, so nothing is imported"):
        imported(folder)
    result = imported(folder, skip_bad=True)
    assert (len(result["uploads"]), result["refused"]) == (2, 1)
    with pytest.raises(OptionError, match="needs label counts|merges|method"):
        merged_by("tally", result)
    for name in RANKS:
        (folder / name / "adapter_config.json").unlink()
    with pytest.raises(OptionError, match="holds no folders of LoRA adapters .* needs --architecture"):
        imported(folder, out=folder.parent / "other")


def test_an_adapter_in_the_checkpoint_of_a_trainer_is_found_and_named(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "trainers" / "west" / "checkpoint-100"
    place.parent.mkdir(parents=True)
    (folder / "west").rename(place)
    with pytest.raises(OptionError, match=r"west/checkpoint-100 is the folder of a LoRA adapter: .*move it up"):
        imported(tmp_path / "trainers", out=tmp_path / "run")
