from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import finished_in

from server_app.launch.result import print_result
from server_app.report.finish import table_lines
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import read_settings
from strategies.core.errors import OptionError

PRIVATE = {"privacy.epsilon": 8.0, "client.share-label-counts": False}


def settings(small: dict[str, Any], **more: Any) -> Any:
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}
    return read_settings({**small, **PRIVATE, **named})


@pytest.mark.parametrize("method", ["fedavg", "fedens", "dense", "co-boosting", "feddf", "dw-fedens"])
def test_methods_when_they_ask_for_one_classifier_can_be_private(small: dict[str, Any], method: str) -> None:
    check_needs_of_settings(settings(small, method=method))


@pytest.mark.parametrize("method", ["fens", "label-count-ensemble"])
def test_methods_that_can_be_private_are_named_where_another_is_refused(small: dict[str, Any], method: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_needs_of_settings(settings(small, method=method))

    named = str(caught.value).partition("must be one of ")[2].partition(" with 'privacy.epsilon'")[0].split(", ")
    assert "fedens" in named
    assert not {*named} & {"iterative", "fens", "fedov", "fedcvae-ens", "label-count-ensemble"}


def test_a_result_when_clients_were_private_names_the_guarantee(
    run_folder: Callable[..., Path], stage: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_folder()
    result = finished_in(path, *stage("fedens", **PRIVATE))

    line = "each client's upload is (8, 1e-05)-differentially private in its examples (DP-SGD, clip 1)"
    stored = json.loads((path / "result.json").read_text())["privacy"]
    assert {key: stored[key] for key in ("epsilon", "delta", "clip")} == {"epsilon": 8.0, "delta": 1e-05, "clip": 1.0}
    assert any(said.startswith(f"privacy: {line}") for said in table_lines(result))
    assert f"Privacy: {line}" in (path / "model_card.md").read_text()
    print_result({**result, "refusals": []}, "text")
    assert f"privacy      {line}" in capsys.readouterr().out
