"""Nets, heads on two backbones and sums of features from the clients become one ensemble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import replayed
from feature_fakes import CLIENTS, SETTINGS, Uploads, sent_by_clients
from safetensors.torch import save_file

from fl_app.data import open_split
from server_app.replay.imports import ImportRequest, import_checkpoints
from server_app.settings.build import build_job
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError
from strategies.core.facts import Upload
from strategies.core.stage_options import GatekeeperConfig
from strategies.gatekeeper.inspection import inspect
from strategies.run.run_folder import RunFolder, load_ensemble
from strategies.statistics.sums import merge_sums
from strategies.statistics.uploaded import SIZE, with_heads
from strategies.uploads.checks import check_outputs

KINDS = ("lenet5", "head+tiny_backbone:other", "statistics", "statistics")
GIVEN = {
    **SETTINGS, "method": "label-count-ensemble", "model.per-client": ",".join(KINDS), "client.epochs": 8,
    "data.proxy": 0.2, "fens.rounds": 20, "server.epochs": 1, "tally.images": 64, "tally.probes": 64,
}  # fmt: skip
TASK = "classifier"
MEMBERS = ["client-000", "client-001", "sums-tiny_backbone-make"]


def job_of(sent: Uploads, *clients: str) -> Any:
    states, facts = sent
    job = build_job(read_settings(GIVEN), open_split("digits", "test"), None)
    uploads = tuple(Upload(facts[name], lambda name=name: states[name]) for name in clients)  # type: ignore[misc]
    return type(job)(**{**vars(job), "uploads": uploads})


@pytest.mark.parametrize("method", ["label-count-ensemble", "fedens", "fens", "tally"])
def test_an_ensemble_has_nets_heads_and_one_head_per_group_of_sums(run: Path, tmp_path: Path, method: str) -> None:
    result = replayed(run, method, tmp_path / method)
    rows = {row["name"]: row["accuracy"] for row in result["table"]}
    assert list(rows)[:3] == MEMBERS
    assert result["uploads"] == CLIENTS
    ensemble = rows.get("Tally ensemble", result["accuracy"])
    assert method == "fens" or ensemble > max(rows[name] for name in MEMBERS[:2])
    with RunFolder.open(tmp_path / method, write=False) as folder:
        job = build_job(read_settings(GIVEN), open_split("digits", "test"), None)
        spec, members = load_ensemble(folder.path, job.builders)
    assert list(spec.clients) == [member.client for member in members] == MEMBERS


def test_a_finished_mixed_run_is_read_again(run: Path, tmp_path: Path) -> None:
    first = replayed(run, "fedens", tmp_path / "one")
    again = replayed(run, "fedens", resume=tmp_path / "one")
    assert again["weights_sha256"] == first["weights_sha256"]


def test_a_group_counts_as_one_client_with_the_examples_of_all(sent: Uploads) -> None:
    lines: list[str] = []
    job = with_heads(job_of(sent, "client-000", "client-002", "client-003"), lines.append)
    member = job.uploads[1]
    counts = [sum(both) for both in zip(*(sent[1][name].label_counts or () for name in KEPT), strict=True)]
    assert member.label_counts == tuple(counts)
    assert member.num_examples == sum(counts)
    assert member.architecture == "head+tiny_backbone:make"
    assert lines == ["sums-tiny_backbone-make is one member of the ensemble, from the sums of client-002, client-003"]


KEPT = ("client-002", "client-003")


def test_logits_of_a_group_have_the_size_of_a_net_s_on_its_examples(sent: Uploads) -> None:
    job = with_heads(job_of(sent, *KEPT))
    (member,) = job.uploads
    state, total = member.read(), merge_sums(sent[0][name] for name in KEPT)
    assert float(state["head.weight"].sum(0).abs().max()) < 1e-3
    model = job.builders[member.architecture]()
    model.load_state_dict(state)
    train = open_split("digits", "train")
    images = train.take(torch.arange(len(train.labels))).images.float() / 255 * 2 - 1
    logits = model(images)
    assert float(logits.square().mean().sqrt()) == pytest.approx(SIZE, rel=0.1)
    assert float(total["counts"].sum()) == member.num_examples


def test_sums_of_an_unknown_function_and_noisy_sums_are_refused(sent: Uploads) -> None:
    job = job_of(sent, *KEPT)
    heads = {name: build for name, build in job.builders.items() if name != "head+tiny_backbone:make"}
    line = "the sums of client-002 have fingerprint [0-9a-f]{8}: must be that of a head"
    with pytest.raises(OptionError, match=line):
        with_heads(type(job)(**{**vars(job), "builders": heads}))
    noisy = {**sent[0]["client-002"], "noise": torch.ones(1, dtype=torch.float64)}
    upload = Upload(sent[1]["client-002"], lambda: noisy)
    with pytest.raises(OptionError, match="carry noise: must be exact"):
        with_heads(type(job)(**{**vars(job), "uploads": (upload,)}))
    given = {**GIVEN, "method": "fedens", "privacy.epsilon": 1.0, "client.share-label-counts": False}
    with pytest.raises(OptionError, match="'model.per-client' names 'statistics': .*sums with noise"):
        check_needs_of_settings(read_settings(given))


def test_the_gatekeeper_compares_sums_with_sums(sent: Uploads) -> None:
    found = inspect(job_of(sent, *sent[0]), GatekeeperConfig(policy="warn"))
    assert [row.client for row in found.rows] == list(sent[0])
    assert found.notes == ("2 uploads cannot be judged: a client is compared with at least 2 others",)


def test_a_folder_of_models_and_sums_is_imported_as_one_federation(sent: Uploads, tmp_path: Path) -> None:
    folder = tmp_path / "market"
    folder.mkdir()
    lines = []
    for name, state in sent[0].items():
        save_file(state, folder / f"{name}.safetensors")
        counts = list(sent[1][name].label_counts or ())
        lines += [
            f'["{name}.safetensors"]',
            f'architecture = "{sent[1][name].architecture}"',
            f"label-counts = {counts}",
        ]
    (tmp_path / "map.toml").write_text("\n".join(lines))
    given = {key: value for key, value in GIVEN.items() if key != "model.per-client"}
    given["model.accepted"] = ", ".join(dict.fromkeys(KINDS))
    request = ImportRequest(folder, "lenet5", given, map_file=tmp_path / "map.toml", out=tmp_path / "imported")
    import_checkpoints(request, log=lambda _: None)
    result = replayed(tmp_path / "imported", "label-count-ensemble", tmp_path / "replay")
    assert [row["name"] for row in result["table"]][:3] == MEMBERS


def test_sums_of_another_backbone_are_checked_by_their_own_function(sent: Uploads) -> None:
    given = {**GIVEN, "model.per-client": "lenet5,statistics+tiny_backbone:other"}
    states, facts = sent_by_clients(given, task="classifier")
    job = build_job(read_settings(given), open_split("digits", "test"), None)
    name = facts["client-001"].architecture
    check_outputs(name, states["client-001"], job.builders[name], job.input_shape)
    assert "head+tiny_backbone:other" in job.builders
    assert states["client-001"]["sums"].shape == (10, 64)
