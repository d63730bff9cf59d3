"""Runs of another project: replayed by its own models, and refused with others before a folder is made."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import compared, foreign_run, replayed
from safetensors.torch import load_file
from torch import nn

from strategies.core.durable import read_json
from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.method import METHODS
from strategies.run.run_folder import RunFolder

CODE = r"""
from safetensors.torch import load_file
from torch import nn


def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def needs(num_classes):
    return net()


def fails():
    raise ValueError("no\nfile")


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3))


def other_shape():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5))


class Answers(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x):
        return {"logits": super().forward(x)}


def parallel():
    return nn.DataParallel(net())


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = net()

    def forward(self, x):
        return self.model(x)


instance = net()
number = lambda: 3
others = {"wide": wide}
"""
WRONG = [
    ("instance", "--model 'their_nets:instance': model is a Sequential: must be a callable that returns an nn.Module"),
    ("needs", "--model 'their_nets:needs': model is needs, which needs num_classes: must be a callable without arg"),
    ("fails", "--model 'their_nets:fails' fails: ValueError: no file"),
    ("number", "--model 'their_nets:number': architecture 'model' builds int: must be an nn.Module"),
    ("Answers", "--model 'their_nets:Answers': .*model 'model'"),
    ("wide", "--model 'their_nets:wide': stored tensors do not fit architecture 'model': missing 3.bias, 3.weight"),
    ("other_shape", r"stored tensors do not fit architecture 'model': 1.weight is float32\[3, 16\], expected is "),
    ("others", "--model 'their_nets:others': it builds wide: must build 'model' too, the run's student"),
]


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_nets.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("their_nets", None)


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def stored(path: Path, *seeds: int, **facts: Any) -> Path:
    """Make a run folder as another project leaves it, with one upload for each seed."""
    return foreign_run(path, {f"c{seed}": ("model", linear(seed).state_dict()) for seed in seeds}, **facts)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return stored(tmp_path / "runs" / "run", 0, 1)


@pytest.mark.parametrize("method", ["fedens", "fedavg", "dw-fedens", "dense"])
def test_a_run_of_another_project_when_its_model_is_named_is_replayed_without_scores(run: Path, method: str) -> None:
    few = {"server.epochs": 1, "server.generator-steps": 1, "server.synthesis-batch-size": 4}

    result = replayed(run, method, model="their_nets:net", **(few if method == "dense" else {}))

    assert not result.keys() & {"metric", "scores", "details"}
    assert result.get("client_weights") == ({"c0": 0.5, "c1": 0.5} if method == "dw-fedens" else None)
    assert (result["status"], result["method"], result["seed"], result["uploads"]) == ("finished", method, 4, 2)
    assert (result["accuracy"], result["table"]) == (None, [])
    assert read_json(Path(result["run_dir"]) / "result.json")["weights_sha256"]
    assert str(Path.cwd()) not in sys.path


def test_a_run_without_classes_is_replayed_by_methods_that_merge_weights_alone(tmp_path: Path) -> None:
    run = stored(tmp_path / "runs" / "plain", 0, 1, **{"num-classes": 0, "input-shape": [1, 1, 1]})
    with pytest.raises(OptionError, match="'ties' needs that every client started from the same weights"):
        replayed(run, "ties", model="their_nets:net")
    with RunFolder.open(run) as folder:
        folder.save_start(linear(0).state_dict())

    result = replayed(run, "ties", model="their_nets:net", ties__density=1.0)

    student = load_file(Path(result["run_dir"]) / "student.safetensors")
    # The first client is the start: where it has no change, the second has its way.
    assert all(torch.allclose(student[name], value) for name, value in linear(1).state_dict().items())
    with pytest.raises(OptionError, match="'dense' needs num_classes and input_shape"):
        replayed(run, "dense", model="their_nets:net")


def test_a_replay_that_is_ended_says_how_to_go_on_with_its_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("strategies.methods.fedens.METHOD", replace(METHODS["fedens"], fit=end))

    with pytest.raises(KeyboardInterrupt) as stopped:
        replayed(run, "fedens", model="their_nets:net")

    (begun,) = {*run.parent.iterdir()} - {run}
    command = ["oneshot", "replay", str(run), "--resume", str(begun), "--model", "their_nets:net"]
    assert str(stopped.value) == f"interrupted. To resume: {shlex.join(command)}"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"method": ""}, "is a run of another project: needs --method and --model, as module:attribute"),
        ({"model": ""}, "is a run of another project: needs --model, as module:attribute"),
        ({"model": "their_nets"}, "is a run of another project"),
        ({"model": "absent_module:Net"}, "--model is 'absent_module:Net', but there is no module 'absent_module'"),
        ({"model": "their_nets:nett"}, "module 'their_nets' has no 'nett'; did you mean 'net'"),
        ({"method": "fedprox"}, "unknown method 'fedprox'"),
        ({"method": "dense", "data.alpha": 0.1}, "unknown setting 'data.alpha'"),
        ({"method": "dense", "server.epochs": 0}, "'server.epochs' is 0"),
        *(({"model": f"their_nets:{name}"}, line) for name, line in WRONG),
        *(({"model": f"their_nets:{name}", "method": "tally"}, line) for name, line in WRONG),
    ],
)
def test_a_replay_that_does_not_fit_a_run_of_another_project_is_refused_and_leaves_no_folder(
    run: Path, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        replayed(run, **{"method": "fedens", "model": "their_nets:net", **asked})

    assert list(run.parent.iterdir()) == [run]


def test_a_comparison_with_models_that_fail_is_refused_and_leaves_no_folder(run: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--model 'their_nets:fails' fails: ValueError: no file"):
        compared(run, methods="fedens,tally", model="their_nets:fails", out=tmp_path / "compared")

    assert not (tmp_path / "compared").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedens", "tally", "fisher"])
@pytest.mark.parametrize("model", ["parallel", "Holder"])
def test_a_model_that_is_wrapped_takes_the_uploads_of_the_bare_one(run: Path, method: str, model: str) -> None:
    run = stored(run.parent / "measured") if method == "fisher" else run
    with RunFolder.open(run) as folder:
        for seed in (1, 2):
            state = linear(seed).state_dict()
            measured = {f"fisher:{key}": torch.rand_like(value) for key, value in state.items()}
            state |= measured if method == "fisher" else {}
            folder.round(1).accept(UploadFacts(f"d{seed - 1}", "model", 5, (1, 2, 2)), state)
    lines, few = list[str](), {"server.epochs": 1} if method == "tally" else {}
    (run / "uploads" / "lost.safetensors").write_bytes((run / "uploads" / "d0.safetensors").read_bytes())
    results = [replayed(run, method, model=f"their_nets:{name}", log=lines.append, **few) for name in ("net", model)]
    assert any("names" in line and "d1" in line for line in lines)
    assert any("left out are lost.safetensors, which uploads.jsonl does not list" in line for line in lines)
    bare, wrapped = (load_file(next(Path(found["run_dir"]).glob("**/*.safetensors"))) for found in results)
    assert [value.tolist() for value in bare.values()] == [value.tolist() for value in wrapped.values()]
