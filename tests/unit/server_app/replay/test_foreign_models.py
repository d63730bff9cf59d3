"""Models of another project that are not those of its run: refused before a folder is made."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_runs import foreign_run
from safetensors.torch import load_file
from torch import nn

from server_app.compare.comparison import Comparison, compare_runs
from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run
from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
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
both = {"model": net, "wide": wide}
others = {"wide": wide}
wrong_member = {"model": net, "wide": other_shape}
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


def stored(path: Path, *architectures: str) -> Path:
    """Make a run folder as another project leaves it, with one upload of each architecture."""
    nets = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
        "wide": nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 3)),
    }
    uploads = {f"c{number}": (name, nets[name].state_dict()) for number, name in enumerate(architectures)}
    return foreign_run(path, uploads)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return stored(tmp_path / "runs" / "run", "model", "model")


def replayed(run: Path, method: str, model: str) -> dict[str, Any]:
    return replay_run(ReplayRequest(run, method, {}, model=f"their_nets:{model}"), log=lambda _: None)


@pytest.mark.parametrize("method", ["fedens", "tally"])
@pytest.mark.parametrize(("model", "message"), WRONG)
def test_a_replay_with_models_that_are_not_the_run_s_is_refused_and_leaves_no_folder(
    run: Path, method: str, model: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        replayed(run, method, model)

    assert list(run.parent.iterdir()) == [run]


def test_a_comparison_with_models_that_are_not_the_run_s_is_refused_and_leaves_no_folder(
    run: Path, tmp_path: Path
) -> None:
    asked = Comparison((run,), "fedens,tally", model="their_nets:fails", out=tmp_path / "compared")

    with pytest.raises(OptionError, match="--model 'their_nets:fails' fails: ValueError: no file"):
        compare_runs(asked, log=lambda _: None)

    assert not (tmp_path / "compared").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedens", "tally", "fisher"])
@pytest.mark.parametrize("model", ["parallel", "Holder"])
def test_a_model_that_is_wrapped_takes_the_uploads_of_the_bare_one(run: Path, method: str, model: str) -> None:
    run = stored(run.parent / "measured") if method == "fisher" else run
    with RunFolder.open(run) as folder:
        for number, seed in enumerate((1, 2)):
            torch.manual_seed(seed)
            state = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).state_dict()
            measured = {f"fisher:{key}": torch.rand_like(value) for key, value in state.items()}
            state |= measured if method == "fisher" else {}
            folder.round(1).accept(UploadFacts(f"d{number}", "model", 5, (1, 2, 2)), state)
    lines, settings = list[str](), {"server.epochs": 1} if method == "tally" else {}
    (run / "uploads" / "lost.safetensors").write_bytes((run / "uploads" / "d0.safetensors").read_bytes())
    results = [
        replay_run(ReplayRequest(run, method, settings, model=f"their_nets:{name}"), log=lines.append)
        for name in ("net", model)
    ]
    assert any("names" in line and "d1" in line for line in lines)
    assert any("left out are lost.safetensors, which uploads.jsonl does not list" in line for line in lines)
    bare, wrapped = (load_file(next(Path(found["run_dir"]).glob("**/*.safetensors"))) for found in results)
    assert [value.tolist() for value in bare.values()] == [value.tolist() for value in wrapped.values()]
