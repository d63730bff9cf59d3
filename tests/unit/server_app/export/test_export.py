"""Exported models: read back by torch and onnxruntime alone, and what cannot be exported."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import MakeRun, replayed
from torch import nn

from fl_app.data import Normalization
from fl_app.models import build, builders
from server_app.export import exporting
from server_app.export.exporting import Begun, StoredModels, export_run, stored_models, write_programs
from strategies.combiners.combiners import COMBINERS
from strategies.core.durable import read_json
from strategies.core.errors import ComputeError, OptionError, StoreError
from strategies.core.fingerprint import weights_sha256
from strategies.run.ensembles import load_ensemble_module
from strategies.run.files import save_weights, write_json
from strategies.run.run_folder import RunFolder
from strategies.run.stage import OUTCOME_FILE

HALF = Normalization((0.5,), (0.5,))


@pytest.fixture
def tally_run(run_folder: MakeRun) -> Path:
    return Path(replayed(run_folder(), "tally", server__epochs=1)["run_dir"])


NET = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(4, 2))\n"


@pytest.fixture
def foreign_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run of another project, which ended with a student of one layer; ``their_models:net`` builds it."""
    (tmp_path / "their_models.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "foreign"
    facts = {"student": "net", "num-classes": 2, "input-shape": [1, 2, 2], "normalization": [[0.5], [0.5]]}
    with RunFolder.create(path, facts) as folder:
        torch.manual_seed(0)
        state = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).state_dict()
        save_weights(folder.path / "student.safetensors", state)
        digest = weights_sha256(state)
        write_json(path / OUTCOME_FILE, {"student": True, "weights-sha256": digest})
    yield path
    sys.modules.pop("their_models", None)


def onnx_logits(file: Path, pixels: torch.Tensor) -> torch.Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"pixels": pixels.numpy()})
    return torch.from_numpy(np.asarray(logits))


@pytest.mark.slow
def test_student_and_ensemble_when_exported_give_the_run_s_logits_for_any_number_of_pixels(
    tally_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnx

    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.delenv("CI", raising=False)

    names = [f"creature {k}" for k in range(10)]
    with RunFolder.open(tally_run) as folder:
        folder.write_result({**(folder.result() or {}), "classes": names})

    facts = export_run(tally_run, log=str)

    student = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).eval()
    with RunFolder.open(tally_run, write=False) as folder:
        student.load_state_dict(folder.student() or {})
    originals = {"student": student, "ensemble": load_ensemble_module(tally_run, builders(10, (1, 16, 16)))}
    out = tally_run / "export"
    for name, original in originals.items():
        loaded = torch.export.load(out / f"{name}.pt2").module()
        for count in (1, 5):
            pixels = torch.rand(count, 1, 16, 16, generator=torch.Generator().manual_seed(count))
            with torch.no_grad():
                wanted = original((pixels - 0.5) / 0.5)
            torch.testing.assert_close(loaded(pixels), wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(onnx_logits(out / f"{name}.onnx", pixels), wanted, rtol=1e-5, atol=1e-5)
    graph = onnx.load(out / "ensemble.onnx").graph
    stored = {entry.name: onnx.numpy_helper.to_array(entry) for entry in graph.initializer}
    pool = originals["ensemble"].combiner
    for name, tensor in pool.state_dict().items():  # each can be read and replaced in the file
        assert np.array_equal(stored[f"model.combiner.{name}"], tensor.numpy())
    assert facts == {
        "folder": str(out),
        **{k: v for k, v in read_json(out / "export.json").items() if k != "digest"},
    }
    assert facts["input"] == {
        "name": "pixels", "shape": ["batch", 1, 16, 16], "range": "pixels from 0 to 1; the file normalises them",
    }  # fmt: skip
    assert facts["output"] == {"name": "logits", "shape": ["batch", 10], "classes": names}
    result = read_json(tally_run / "result.json")
    assert facts["weights_sha256"] == result["weights_sha256"]
    ensemble, own = result["table"][-2:]
    assert facts["scores"] == {"ensemble": ensemble["scores"], "student": own["scores"]}
    assert sorted(facts["files"]) == ["ensemble.onnx", "ensemble.pt2", "student.onnx", "student.pt2"]
    assert not list(home.rglob("*")), "onnxruntime left an identity behind"


def test_an_export_leaves_the_other_files_of_a_linked_folder_and_never_shares_its_staging(
    foreign_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    (tmp_path / "repo" / ".git" / "HEAD").touch()
    (tmp_path / "link").symlink_to("repo")

    def export() -> dict[str, Any]:
        return export_run(foreign_run, only="torch", model="their_models:net", out=Path("~/link"), log=str)

    def export_in_between(*words: Any) -> dict[str, Any]:
        with monkeypatch.context() as patched:
            patched.setattr(exporting, "write_programs", write_programs)
            export()
        return write_programs(*words)

    monkeypatch.setattr(exporting, "write_programs", export_in_between)
    assert export()["folder"] == str(tmp_path / "repo")

    assert sorted(path.name for path in (tmp_path / "repo").iterdir()) == [".git", "export.json", "student.pt2"]
    assert (tmp_path / "repo" / ".git" / "HEAD").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_a_signal_ends_leaves_no_weights(
    foreign_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(exporting, "write_programs", lambda *_: signal.raise_signal(number))

    with pytest.raises(KeyboardInterrupt):
        export_run(foreign_run, only="torch", model="their_models:net", out=tmp_path / "out", log=str)

    assert list((tmp_path / "out").iterdir()) == []


class OfTwo(nn.Module):
    """Two members on 16 pixels, under a combiner that may look at them."""

    def __init__(self, combiner: nn.Module, answers: tuple[int, ...]) -> None:
        super().__init__()
        net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, prod(answers)), nn.Unflatten(1, answers))  # noqa: E731
        self.members = nn.ModuleList(net() for _ in range(2))
        self.combiner = combiner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.stack([member(x) for member in self.members])
        combined: torch.Tensor = (
            self.combiner(logits, x) if hasattr(self.combiner, "sees_input") else self.combiner(logits)
        )
        return combined


@pytest.mark.slow
def test_every_combiner_can_be_exported(tmp_path: Path) -> None:
    for name, combiner in combiners().items():
        classes = 2 if name.startswith("two-class-") else 3
        answers = {"open-set": (4,), "fused-blocks": (3, 2, 2)}.get(name, (classes,))
        model = Begun(OfTwo(combiner, answers), HALF).eval()
        stored = StoredModels({"ensemble": model}, (1, 16, 16), classes, HALF, "")

        assert write_programs(stored, "ensemble", tmp_path, ("torch",))["ensemble.pt2"] == 0.0, name


def combiners() -> Mapping[str, nn.Module]:
    from test_combiners import BUILT

    assert BUILT.keys() == COMBINERS.keys()
    return BUILT


def test_a_missing_package_is_one_line_before_the_run_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in exporting.PACKAGES[:2]:
        monkeypatch.setitem(sys.modules, name, None)
    found = exporting.importlib.util.find_spec
    monkeypatch.setattr(
        exporting.importlib.util, "find_spec", lambda name: None if name in exporting.PACKAGES[:2] else found(name)
    )

    line = r"ONNX needs onnx, onnxscript, .*pip install 'oneshot-fl\[export\]'.*--only torch"
    with pytest.raises(OptionError, match=line):
        export_run(tmp_path / "absent", log=str)
    with pytest.raises(StoreError, match="no run folder"):
        export_run(tmp_path / "absent", only="torch", log=str)


class Branching(nn.Module):
    """A model whose path depends on its input's values, which no export can follow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)[:, :2] if bool(x.sum() > 0) else x.flatten(1)[:, 2:4]


def test_a_model_that_cannot_be_exported_or_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(model: nn.Module) -> StoredModels:
        return StoredModels({"student": Begun(model, HALF).eval()}, (1, 2, 2), 2, HALF, "")

    with pytest.raises(ComputeError, match=r"^the student cannot be traced by torch.export: [^\n]+$"):
        write_programs(stored(Branching()), "student", tmp_path, ("torch",))

    wrong = dict.fromkeys(exporting.WRITERS, lambda *_: lambda x: x.flatten(1)[:, :2] + 0.1)
    monkeypatch.setattr(exporting, "WRITERS", wrong)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ComputeError, match=r"^student.pt2, read back, differs from the model by \d.*: must be at most"):
        write_programs(stored(model), "student", tmp_path, ("torch",))


def test_a_run_without_a_result_and_one_of_another_project_are_refused(run_folder: MakeRun, foreign_run: Path) -> None:
    with pytest.raises(StoreError, match=r"has no result: must be a finished run"):
        stored_models(run_folder())
    with pytest.raises(OptionError, match=r"another project: needs --model"):
        stored_models(foreign_run)

    loaded = stored_models(foreign_run, "their_models:net")

    with RunFolder.open(foreign_run, write=False) as folder:
        kept = folder.student() or {}
    assert torch.equal(loaded.models["student"].state_dict()["model.1.weight"], kept["1.weight"])
    assert loaded.normalization == HALF
