"""What a replay refuses: settings that it cannot follow, and images that the clients trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import MakeRun, replayed

from fl_app.data import open_split, server_share
from server_app.launch.run_command import stored_settings
from server_app.settings.checks import check_same_run
from server_app.settings.read import default_settings, read_settings
from strategies.core.durable import read_json
from strategies.core.errors import OneShotError, OptionError, StoreError
from strategies.method import METHODS
from strategies.run.files import write_json

FIXED = {
    "client.epochs": 3, "data.partition": "iid", "data.name": "mnist", "model.name": "cnn-torch", "compute": "ray",
    "run-dir": "elsewhere", "scale": 0.5,
}  # fmt: skip


def seen_proxies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Watch which proxy images FedDF gets."""
    found: list[torch.Tensor] = []
    method = METHODS["feddf"]

    def watched(job: Any, progress: Any) -> Any:
        found.append(job.proxy)
        return method.fit(job, progress)

    monkeypatch.setattr("strategies.methods.feddf.METHOD", replace(method, fit=watched))
    return found


@pytest.mark.parametrize(
    ("method", "asked", "message"),
    [
        *(
            ("fedens", {key: value}, f"'{key}' is {value!r}, but the run was made with .*: must be that value")
            for key, value in FIXED.items()
        ),
        ("fedprox", {}, "unknown method 'fedprox'"),
        ("dense", {"server.epochs": 0}, "'server.epochs' is 0"),
        ("dense", {"dense.epoch": 1}, "unknown setting 'dense.epoch'"),
        ("fedavg", {"model": "net:Net"}, "--model is 'net:Net': must be '' for .*, whose settings name its models"),
        ("iterative", {}, "'iterative' needs that clients answer in every round.*oneshot run"),
    ],
)
def test_what_a_replay_cannot_follow_is_refused(
    run_folder: MakeRun, method: str, asked: dict[str, Any], message: str
) -> None:
    run = run_folder()

    with pytest.raises(OptionError, match=message):
        replayed(run, method, **asked)

    assert list(run.parent.iterdir()) == [run]


def test_settings_that_are_the_run_s_own_or_the_server_s_are_let_pass(run_folder: MakeRun) -> None:
    run = run_folder(**{"client.epochs": 7})

    free = {"seed": 2, "threads": 1, "device": "cpu", "checkpoint-s": 1.0, "server.epochs": 1, "data.proxy": 0.05}
    result = replayed(run, "fedens", **{"client.epochs": 7, "data.alpha": 0.3, **free})

    assert result["status"] == "finished"


def test_proxy_images_follow_the_seed_of_the_run(run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, found = run_folder(**{"data.limit": 1000, "data.proxy": 0.0, "seed": 6}), seen_proxies(monkeypatch)
    train = open_split("digits", "train")

    for seed in (6, 7):
        replayed(run, "feddf", data__proxy=0.2, seed=seed)

    wanted = train.take(server_share(train, seed=6, proxy=0.2)).images
    assert all(torch.equal(proxy, wanted) for proxy in found)
    assert len(found) == 2


@pytest.mark.parametrize(("limit", "kept", "allowed"), [(0, 0.1, "0.0994"), (0, 0.0, "0.0"), (1100, 0.0, "0.1518")])
def test_proxy_images_that_the_clients_trained_on_are_refused_in_one_line(
    run_folder: MakeRun, limit: int, kept: float, allowed: str
) -> None:
    run = run_folder(**{"data.limit": limit, "data.proxy": kept})

    with pytest.raises(OptionError, match=rf"'data.proxy' is 0.2, the last 259 of 1297.* at most {allowed}"):
        replayed(run, "feddf", data__proxy=0.2)

    assert list(run.parent.iterdir()) == [run]
    if float(allowed):
        assert replayed(run, "feddf", data__proxy=float(allowed))["method"] == "feddf"


def test_a_run_older_than_the_share_is_replayed(run_folder: MakeRun) -> None:
    run = run_folder(**{"data.proxy": 0.0})
    facts = read_json(run / "run.json")
    facts["settings"] = {k: v for k, v in facts["settings"].items() if not k.startswith(("data.proxy", "feddf."))}
    write_json(run / "run.json", facts)

    assert replayed(run, "fedens")["status"] == "finished"
    with pytest.raises(OptionError, match="'data.proxy' is 0.2"):
        replayed(run, "feddf", data__proxy=0.2)
    with pytest.raises(OptionError, match="'feddf' needs that .* set 'data.proxy'"):
        replayed(run, "feddf")
    assert "data.proxy" in default_settings()


def test_a_stored_setting_that_this_version_does_not_know_has_no_effect(run_folder: MakeRun) -> None:
    run = run_folder(**{"dense.gone": 0.5})

    kept = read_json(Path(replayed(run, "fedens")["run_dir"]) / "run.json")["settings"]
    assert "dense.gone" not in kept
    check_same_run({"settings": {**kept, "dense.gone": 0.5}}, kept)
    assert read_settings(stored_settings(run)).flat == kept


@pytest.mark.parametrize("damaged", [False, True])
def test_a_replay_that_is_refused_leaves_no_folder_behind(run_folder: MakeRun, damaged: bool) -> None:
    run = run_folder("lenet5", "mnist-cnn")
    if damaged:
        file = run / "uploads" / "client-001.safetensors"
        file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(StoreError if damaged else OptionError):
        replayed(run, "fedens" if damaged else "fedavg")

    assert list(run.parent.iterdir()) == [run]


def test_a_replay_that_fails_in_its_midst_keeps_its_folder(
    run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = METHODS["dense"]

    def failing(job: Any, progress: Any) -> Any:
        progress.record({"epoch": 1})
        raise OneShotError("the disk is full")

    monkeypatch.setattr("strategies.methods.dense.METHOD", replace(method, fit=failing))
    run = run_folder()

    with pytest.raises(OneShotError, match="the disk is full"):
        replayed(run, "dense")

    assert len(list(run.parent.iterdir())) == 2
