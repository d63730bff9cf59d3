from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_runs import foreign_run
from torch import nn

from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run
from strategies.core.errors import OptionError, StoreError
from strategies.core.options import flatten
from strategies.method import METHODS, Need, Snapshot
from strategies.run.files import read_json
from strategies.run.journal import Journal
from strategies.run.run_folder import RunFolder

MakeRun = Callable[..., Path]


def replayed(run: Path, method: str = "", resume: Path | None = None, **how: Any) -> dict[str, Any]:
    model = how.pop("model", "")
    lines: list[str] = how.pop("lines", [])
    overrides = {key.replace("__", ".").replace("_", "-"): value for key, value in how.items()}
    return replay_run(ReplayRequest(run, method, overrides, resume=resume, model=model), log=lines.append)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# One of each kind; what holds for the registry alone, tests/contract/test_methods.py asks of every method.
QUICK = {"fedavg", "fedens", "fens", "dense", "tally"}


# Uploads of other kinds are in test_upload_kinds.py.
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in METHODS
        if METHODS[name].uploads == "classifier" and not METHODS[name].plan(METHODS[name].config()).asks.sums
    ],
)
def test_every_method_when_replayed_leaves_its_result_beside_the_run_and_the_run_as_it_was(
    run_folder: MakeRun, method: str
) -> None:
    run = run_folder()
    if Need.COMMON_START in METHODS[method].needs:
        with RunFolder.open(run) as folder:
            folder.save_start(folder.round(1).uploads()[0].read())
    before = files_of(run)

    result = replayed(run, method)

    assert files_of(run) == before
    target = Path(result["run_dir"])
    assert target.parent == run.parent
    assert f"-replay-{method}-" in target.name
    assert read_json(target / "result.json") == json.loads(json.dumps(result))
    assert (result["method"], result["uploads"], result["resumed_at"]) == (method, 3, 0)
    assert (result["mib_up_per_client"], result["refused"]) == (0.0, 0)
    info = json.loads((target / "run.json").read_text())
    assert (info["method"], info["replay-of"], info["settings"]["method"]) == (method, str(run), method)
    assert info["id"] != json.loads((run / "run.json").read_text())["id"]
    assert info["config"].keys() == flatten(METHODS[method].config()).keys()
    assert (target / ("student.safetensors" if METHODS[method].kind != "ensemble" else "ensemble")).exists()


def test_a_replay_stores_the_config_that_it_works_with_and_not_its_run_s(run_folder: MakeRun) -> None:
    run = run_folder(method="fedens")

    result = replayed(run, "dense", preset="fedsyn", server__epochs=1, dense__bn_weight=0.0)

    stored = read_json(Path(result["run_dir"]) / "run.json")["config"]
    assert stored == flatten(METHODS["dense"].config.preset("fedsyn", epochs=1, bn_weight=0.0))


def test_a_replay_without_a_method_runs_the_run_s_own_and_gives_the_same_bits_each_time(run_folder: MakeRun) -> None:
    run = run_folder(method="fedavg")

    first, again = replayed(run), replayed(run)

    assert first["method"] == "fedavg"
    assert first["weights_sha256"] == again["weights_sha256"]
    assert first["run_dir"] != again["run_dir"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"method": "fedprox"}, "unknown method 'fedprox'"),
        ({"server__epochs": 0}, "'server.epochs' is 0"),
        ({"dense__epoch": 1}, "unknown setting 'dense.epoch'"),
    ],
)
def test_a_wrong_setting_is_refused_before_a_folder_is_made(
    run_folder: MakeRun, how: dict[str, Any], message: str
) -> None:
    run = run_folder(method="dense")

    with pytest.raises(OptionError, match=message):
        replayed(run, **how)

    assert list(run.parent.iterdir()) == [run]


def test_a_model_of_another_project_is_refused_for_a_run_of_this_app(run_folder: MakeRun) -> None:
    run = run_folder()
    with pytest.raises(OptionError, match="--model is 'net:Net': must be '' for .*, whose settings name its models"):
        replayed(run, "fedavg", model="net:Net")
    assert replayed(run, "fedavg")["uploads"] == 3


def test_a_folder_without_uploads_is_refused_by_name(run_folder: MakeRun, tmp_path: Path) -> None:
    run = run_folder()
    replay = Path(replayed(run, "fedens")["run_dir"])
    (run / "uploads.jsonl").write_text("")

    with pytest.raises(StoreError, match=f"{run} holds no uploads; must be a run folder with at least one"):
        replayed(run, "fedens")
    with pytest.raises(StoreError, match=f"{replay} holds no uploads: it is a replay of {run}"):
        replayed(replay, "fedens")
    with pytest.raises(StoreError, match="no run folder"):
        replayed(tmp_path, "fedens")


class CutOffError(Exception):
    """The process dies."""


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server stage dies right after its first checkpoint; the next one does not."""
    checkpoint, deaths = Journal.checkpoint, [CutOffError("killed")]

    def dying(self: Journal, take: Callable[[], Snapshot]) -> None:
        self.interval_s = 0.0
        checkpoint(self, take)
        if deaths:
            raise deaths.pop()

    monkeypatch.setattr(Journal, "checkpoint", dying)


def begun(run: Path, *, skip: tuple[Path, ...] = ()) -> Path:
    """Return the folder of the replay that was cut off."""
    (folder,) = set(run.parent.iterdir()) - {run, *skip}
    return folder


@pytest.mark.usefixtures("cut_off")
def test_a_replay_that_was_cut_off_goes_on_and_ends_with_the_same_bits(run_folder: MakeRun) -> None:
    run, lines = run_folder(), list[str]()
    with pytest.raises(CutOffError):
        replayed(run, "dense", dense__latent=6, lines=lines)
    target = begun(run)
    assert any(str(target) in line for line in lines)

    # The command repeats neither the method nor the settings.
    result = replayed(run, resume=target)

    whole = replayed(run, "dense", dense__latent=6)
    assert (result["resumed_at"], whole["resumed_at"]) == (1, 0)
    assert result["run_dir"] == str(target)
    assert result["weights_sha256"] == whole["weights_sha256"]
    assert result["accuracy"] == whole["accuracy"]
    with RunFolder.open(target, write=False) as folder:
        assert [row["epoch"] for row in folder.round(1).metrics() if "epoch" in row] == [1, 2]


def test_a_finished_replay_when_resumed_gives_its_result_and_does_no_work(
    run_folder: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder()
    result = replayed(run, "fedens")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the replay works though it is finished")

    monkeypatch.setattr("server_app.replay.stored.guarded_replay", never)

    assert replayed(run, resume=Path(result["run_dir"])) == json.loads(json.dumps(result))


@pytest.mark.parametrize("model", ["", " --model"])
def test_a_replay_that_is_interrupted_or_ended_says_how_to_go_on(
    run_folder: MakeRun, foreign: MakeRun, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    run, lines = (foreign() if model else run_folder(name="my run")), list[str]()

    def interrupt(*_: object) -> None:
        if model:
            signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt

    method = METHODS["fedens"]
    monkeypatch.setattr("strategies.methods.fedens.METHOD", replace(method, fit=interrupt))

    with pytest.raises(KeyboardInterrupt):
        replayed(run, "fedens", lines=lines, model="foreign_net:Net" if model else "")

    command = ["oneshot", "replay", str(run), "--resume", str(begun(run))]
    command += ["--model", "foreign_net:Net"] if model else []
    assert lines[-1] == f"interrupted. To resume: {shlex.join(command)}"


# Runs of other projects, whose models and held-out images are not here.

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)

NUMBER = 3
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Return a function that makes a run folder as another project's strategy leaves it, in that project's folder."""
    (tmp_path / "foreign_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_net", raising=False)

    def make(**facts: Any) -> Path:
        uploads = {}
        for number in range(2):
            torch.manual_seed(number)
            net = nn.ModuleDict({"layers": nn.Sequential(nn.Flatten(), nn.Linear(16, 3))})
            uploads[f"c{number}"] = "model", net.state_dict()
        return foreign_run(tmp_path / "foreign-runs" / "run", uploads, **facts)

    return make


@pytest.mark.parametrize("method", ["fedens", "fedavg", "dw-fedens", "dense"])
def test_a_run_of_another_project_when_its_model_is_named_is_replayed_without_scores(
    foreign: MakeRun, method: str
) -> None:
    options = {"server__epochs": 1, "server__generator_steps": 1, "server__synthesis_batch_size": 4}

    result = replayed(foreign(), method, model="foreign_net:Net", **(options if method == "dense" else {}))

    assert not result.keys() & {"metric", "scores", "details"}
    assert result.get("client_weights") == ({"c0": 0.5, "c1": 0.5} if method == "dw-fedens" else None)
    assert (result["status"], result["method"], result["seed"], result["uploads"]) == ("finished", method, 4, 2)
    assert (result["accuracy"], result["table"]) == (None, [])
    assert json.loads((Path(result["run_dir"]) / "result.json").read_text())["weights_sha256"]
    assert str(Path.cwd()) not in sys.path


def test_a_run_without_classes_is_replayed_by_methods_that_merge_weights_alone(foreign: MakeRun) -> None:
    run = foreign(**{"num-classes": 0, "input-shape": [1, 1, 1]})
    with pytest.raises(OptionError, match="'ties' needs that every client started from the same weights"):
        replayed(run, "ties", model="foreign_net:Net")
    with RunFolder.open(run) as folder:
        first, second = (upload.read() for upload in folder.round(1).uploads())
        folder.save_start(first)

    result = replayed(run, "ties", model="foreign_net:Net", ties__density=1.0)

    with RunFolder.open(Path(result["run_dir"]), write=False) as folder:
        student = folder.student()
    # The first client is the start: where it has no change, the second has its way.
    assert all(torch.allclose(student[name], second[name]) for name in second)
    with pytest.raises(OptionError, match="'dense' needs num_classes and input_shape"):
        replayed(run, "dense", model="foreign_net:Net")


@pytest.mark.parametrize(
    ("method", "model", "overrides", "message"),
    [
        ("", "foreign_net:Net", {}, "is a run of another project: needs --method and --model, as module:attribute"),
        ("fedens", "", {}, "is a run of another project: needs --model, as module:attribute"),
        ("fedens", "foreign_net", {}, "is a run of another project"),
        ("fedens", "absent_module:Net", {}, "--model is 'absent_module:Net', but there is no module 'absent_module'"),
        ("fedens", "foreign_net:Nut", {}, "module 'foreign_net' has no 'Nut'; did you mean 'Net'"),
        ("fedens", "foreign_net:NUMBER", {}, "--model 'foreign_net:NUMBER': model is a int: must be a callable"),
        ("fedprox", "foreign_net:Net", {}, "unknown method 'fedprox'"),
        ("dense", "foreign_net:Net", {"data__alpha": 0.1}, "unknown setting 'data.alpha'"),
        ("dense", "foreign_net:Net", {"server__epochs": 0}, "'server.epochs' is 0"),
    ],
)
def test_a_run_of_another_project_when_asked_for_wrongly_is_refused_in_one_line(
    foreign: MakeRun, method: str, model: str, overrides: dict[str, Any], message: str
) -> None:
    run = foreign()

    with pytest.raises(OptionError, match=message):
        replayed(run, method, model=model, **overrides)

    assert list(run.parent.iterdir()) == [run]
