"""Compare, forget, late joining, import, the plot and the model card work with heads on features as with models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import compared, replayed, run_card
from feature_fakes import SETTINGS, Uploads, stored
from flower_fakes import equal
from safetensors.torch import load_file, save_file

from fl_app.data import normalize, open_split
from server_app.replay.forget import adopt_uploads
from server_app.replay.imports import ImportRequest, import_checkpoints
from strategies.core.durable import read_json
from strategies.core.errors import UploadError
from strategies.run.run_folder import RunFolder

GIVEN = SETTINGS


@pytest.fixture(scope="module")
def finished(run: Path) -> tuple[Path, dict[str, Any]]:
    folder = run.parent / "finished"
    return folder, replayed(run, "ridge", folder)


def head_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student.safetensors")


@pytest.mark.slow
def test_the_card_s_code_loads_the_head_with_its_backbone(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    card = (folder / "model_card.md").read_text()
    assert "Backbone: tiny, frozen, 16 pixels a side, 96 features" in card
    told = r"Fingerprint [0-9a-f]{8}: format 1, backbone tiny, weights [0-9a-f]{64}, side 16, .*, norm 1\.\n"
    assert re.search(told + r"- Penalty: [0-9.]+ \(lambda\)", card)

    names = run_card(folder)
    split = open_split("digits", "test")
    test = split.take(torch.arange(len(split.labels)))
    with torch.no_grad():
        right = names["model"](normalize(test.images, *split.normalization)).argmax(1) == test.labels
    assert round(100.0 * float(right.double().mean()), 1) == result["accuracy"]


def test_the_choice_has_a_plot(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, result = finished
    assert "choice.png" in result["plots"]
    assert (folder / "report" / "choice.png").stat().st_size > 1000


@pytest.mark.usefixtures("ran")
def test_ridge_and_lda_are_compared_on_the_same_sums(run: Path, tmp_path: Path) -> None:
    found = compared(run, methods="ridge,lda", out=tmp_path / "out")
    assert [row["method"] for row in found["table"]] == ["ridge", "lda"]
    assert all(row["accuracy"] > 75.0 for row in found["table"])


def test_a_run_that_forgets_a_client_equals_one_that_never_had_it(run: Path, sent: Uploads, tmp_path: Path) -> None:
    info = read_json(run / "run.json")
    with RunFolder.create(tmp_path / "less", {key: info[key] for key in info if key != "digest"}) as target:
        adopt_uploads(target, str(run), "client-001", min_uploads=2)
    states, facts = ({name: values[name] for name in values if name != "client-001"} for values in sent)
    never = stored(tmp_path / "never", SETTINGS, states, facts)
    few = {"fedpft.covariance": "spherical", "server.epochs": 2}
    for method, options in (("ridge", {}), ("fedpft", few)):
        for path, name in ((tmp_path / "less", "a"), (never, "b")):
            replayed(path, method, tmp_path / method / name, **options)
        assert equal(head_of(tmp_path / method / "a"), head_of(tmp_path / method / "b"))


def test_a_client_that_joins_late_changes_no_bit(run: Path, sent: Uploads, tmp_path: Path) -> None:
    states, facts = ({name: values[name] for name in reversed(list(values))} for values in sent)
    late = stored(tmp_path / "late", SETTINGS, states, facts)
    replayed(late, "ridge", tmp_path / "a")
    replayed(run, "ridge", tmp_path / "b")
    assert equal(head_of(tmp_path / "a"), head_of(tmp_path / "b"))


def test_imported_sums_lead_to_the_head_of_the_run_and_pass_its_checks(
    sent: Uploads, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    for name, state in sent[0].items():
        save_file(state, folder / f"{name}.safetensors")
    import_checkpoints(ImportRequest(folder, "statistics", SETTINGS, out=tmp_path / "market"), log=lambda _: None)
    replayed(tmp_path / "market", "ridge", tmp_path / "head")
    assert equal(head_of(tmp_path / "head"), head_of(finished[0]))

    wrong = {**sent[0]["client-000"], "gram": sent[0]["client-000"]["gram"] * 2}
    save_file(wrong, folder / "client-000.safetensors")
    with pytest.raises(UploadError, match=r"client-000.safetensors: gram has trace"):
        import_checkpoints(ImportRequest(folder, "statistics", SETTINGS, out=tmp_path / "other"), log=lambda _: None)
