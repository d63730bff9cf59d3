from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server_app.launch.result import print_result
from server_app.report.finish import finish, table_lines
from server_app.settings.build import build_job
from server_app.settings.checks import check_needs_of_settings
from server_app.settings.read import read_settings
from server_app.settings.server_data import open_half
from strategies.core.errors import OptionError
from strategies.run.run_folder import RunFolder
from strategies.run.stage import keep_outcome

PRIVATE = {"privacy.epsilon": 8.0, "client.share-label-counts": False}


def settings(small: dict[str, Any], **more: Any) -> Any:
    named = {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}
    return read_settings({**small, **PRIVATE, **named})


@pytest.mark.parametrize("method", ["fedavg", "fedens", "dense", "co-boosting", "feddf", "dw-fedens"])
def test_methods_when_they_ask_for_one_classifier_can_be_private(small: dict[str, Any], method: str) -> None:
    check_needs_of_settings(settings(small, method=method))


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"method": "iterative"}, "'method' is 'iterative': must be one of "),
        ({"method": "fens"}, "'method' is 'fens': must be one of "),
        ({"method": "fedov"}, "'method' is 'fedov': must be one of "),
        ({"method": "fedcvae-ens"}, "'method' is 'fedcvae-ens': must be one of "),
        ({"method": "dense", "dense__rounds": 2}, "'dense.rounds' is 2: must be 1 with 'privacy.epsilon'"),
        ({"method": "label-count-ensemble"}, "'method' is 'label-count-ensemble': must be one of "),
    ],
)
def test_runs_when_they_would_tell_more_than_one_upload_are_refused_in_one_line(
    small: dict[str, Any], how: dict[str, Any], line: str
) -> None:
    with pytest.raises(OptionError) as caught:
        check_needs_of_settings(settings(small, **how))

    assert line in str(caught.value)
    assert "with 'privacy.epsilon'" in str(caught.value)
    assert "fens," not in str(caught.value).partition("must be one of ")[2].replace("fedens,", "")


def test_architectures_when_they_normalise_by_the_batch_are_refused_with_those_that_fit(small: dict[str, Any]) -> None:
    chosen = settings(small, model__per_client="lenet5,wrn16-1")

    with pytest.raises(OptionError, match=r"'wrn16-1' has batch normalisation, .* one of lenet5, cnn.* with 'priv"):
        build_job(chosen, open_half(chosen, "test"), None)
    build_job(settings(small), open_half(chosen, "test"), None)


def test_a_result_when_clients_were_private_names_the_guarantee(
    run_folder: Callable[..., Path], stage: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report, chosen, images = stage("fedens", **PRIVATE)
    path = run_folder()
    with RunFolder.open(path) as folder:
        keep_outcome(folder, report, 1)
        result = finish(folder, chosen, report, images, seconds={"server": 1.0}, log=lambda _: None)

    line = "each client's upload is (8, 1e-05)-differentially private in its examples (DP-SGD, clip 1)"
    stored = json.loads((path / "result.json").read_text())["privacy"]
    assert {key: stored[key] for key in ("epsilon", "delta", "clip")} == {"epsilon": 8.0, "delta": 1e-05, "clip": 1.0}
    assert any(said.startswith(f"privacy: {line}") for said in table_lines(result))
    assert f"Privacy: {line}" in (path / "model_card.md").read_text()
    print_result({**result, "refusals": []}, "text")
    assert f"privacy      {line}" in capsys.readouterr().out
