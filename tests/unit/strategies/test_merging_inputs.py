"""What people give to merge() and evaluate(): usual forms are taken, others refused in a line before any work."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from strategies import Result, load_ensemble_module, merge
from strategies.core.errors import OneShotError, OptionError, UploadError
from strategies.core.scan import LOG
from strategies.core.seeds import seeded_torch

SHAPE: dict[str, Any] = {"num_classes": 4, "input_shape": (1, 8, 8)}
IMAGES, LABELS = torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 3])


def net(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


def trained(seed: int, build: Callable[[], nn.Module] = net) -> nn.Module:
    with seeded_torch(seed):
        return build()


@pytest.fixture(scope="module")
def merged() -> Result:
    return merge([trained(1), trained(2)], "fedens", **SHAPE)


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, LABELS),
        [IMAGES, LABELS, torch.ones(3)],
        {"image": IMAGES, "label": LABELS},
        {"pixel_values": IMAGES, "labels": LABELS[:, None], "ids": [1, 2, 3]},
        (IMAGES.double(), LABELS.double()),
        (IMAGES.numpy(), LABELS.numpy().astype(np.uint8)),
        (list(IMAGES), list(LABELS)),
        (IMAGES, nn.functional.one_hot(LABELS, 4)),
        (IMAGES, nn.functional.one_hot(LABELS, 4).numpy()),
    ],
)
def test_batches_are_taken_as_people_have_them(merged: Result, batch: Any) -> None:
    assert merged.evaluate([batch]) == merged.evaluate([(IMAGES, LABELS)])
    assert merged.evaluate(torch.utils.data.TensorDataset(IMAGES, LABELS)) == merged.evaluate([(IMAGES, LABELS)])


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ((IMAGES, LABELS + 1), "a label is 4: must be the number of a class, 0 to 3"),
        ((IMAGES, LABELS * 0 - 1), "a label is -1: must be the number of a class, 0 to 3"),
        ((IMAGES, LABELS + 0.5), "a label is 0.5: must be the number"),
        ((IMAGES, torch.full((3, 4), 0.25)), r"labels have shape \[3, 4\]: must be one per example"),
        ({"image": IMAGES, "mask": LABELS}, "a batch is a dict of image, mask: must have examples under one of"),
        (IMAGES, "a batch is a Tensor: must be a pair of examples and labels"),
        ((IMAGES, ["a", "b", "c"]), "a label is the text 'a': must be the number of a class, 0 to 3"),
        ((IMAGES.permute(0, 2, 3, 1), LABELS), r"a batch has images \[3, .*: must be \[B, ch, H, W\], as input_shape"),
        ((IMAGES * torch.nan, LABELS), "NaN"),
        ((torch.zeros(3, 7), LABELS), "the ensemble does not take a batch of torch.float32 .* must be like"),
    ],
)
def test_other_batches_are_refused_in_a_line(merged: Result, batch: Any, line: str) -> None:
    with pytest.raises(OptionError, match=line):
        merged.evaluate([batch])


@pytest.mark.parametrize("loader", [None, 3])
def test_what_gives_no_batches_is_refused(merged: Result, loader: Any) -> None:
    with pytest.raises(OptionError):
        merged.evaluate(loader)


@pytest.mark.parametrize(
    ("labelled", "line"),
    [
        ((IMAGES.sigmoid(), LABELS + 1), "a label is 4: must be the number of a class, 0 to 3"),
        ((IMAGES.sigmoid(), LABELS[:2]), r"labels have shape \[2\]: must be one per example, \[3\]"),
        ((IMAGES.sigmoid().permute(0, 2, 3, 1), LABELS), "a batch has images"),
        ((IMAGES + 9, LABELS), r"labelled has torch.float32 .*uint8 or float32 in \[0, 1\], not yet normalised"),
    ],
)
def test_labelled_examples_that_would_teach_wrongly_are_refused(labelled: Any, line: str) -> None:
    with pytest.raises(OptionError, match=line):
        merge([trained(1), trained(2)], "fens", labelled=labelled, **SHAPE)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((3,), "folder is 3: must be the name of a folder"),
        (("a\0b",), "must be the name of a folder"),
        (("x" * 300,), "File name too long"),
        (("card", {"accuracy": 93.0}), "scores are .*: must be what evaluate"),
        (("card", 93.0), "scores are 93.0: must be what evaluate"),
    ],
)
def test_a_result_is_not_saved_with_other_arguments(
    merged: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OneShotError, match=line):
        merged.save(*arguments)
    assert not list(tmp_path.iterdir())


def test_an_ensemble_is_loaded_with_builders_by_name(merged: Result, tmp_path: Path) -> None:
    merged.save(tmp_path)
    with pytest.raises(OptionError, match="must be a dict of architecture name -> callable"):
        load_ensemble_module(tmp_path, net)  # type: ignore[arg-type]


def test_a_list_of_one_module_is_named() -> None:
    """As a loop makes it that trains one module on after the other's data and keeps it each time."""
    one, said = trained(1), list[str]()
    for models in ([one, one, trained(2)], [one.state_dict(), one.state_dict(), trained(2).state_dict()]):
        merge(models, "fedens", model=net, log=said.append, **SHAPE)
    lines = [line for line in said if "are one and the same: must be copies" in line]
    assert lines == ["models client-000, client-001 are one and the same: must be copies, as copy.deepcopy(model)"] * 2
    said.clear()
    merge([copy.deepcopy(one), one, trained(2)], "fedens", log=said.append, **SHAPE)
    assert not any("are one and the same" in line for line in said)


def test_a_file_that_is_given_twice_is_named_and_files_below_a_folder_are_found(tmp_path: Path) -> None:
    said = list[str]()
    (tmp_path / "north").mkdir()
    file = tmp_path / "north" / "best.pt"
    torch.save(trained(1).state_dict(), file)
    (tmp_path / "link.pt").symlink_to(file)
    merge({"a": file, "b": tmp_path / "link.pt", "c": trained(2)}, "fedavg", model=net, log=said.append, **SHAPE)
    assert "models a, b are one file: must be a file of each client" in said
    (tmp_path / "link.pt").unlink()
    line = rf"north/best.pt lies in a folder below: must be directly in {tmp_path}, as north.pt"
    with pytest.raises(OptionError, match=line):
        merge(tmp_path, "fedavg", model=net, **SHAPE)
    file.rename(tmp_path / "north.pt")
    (tmp_path / "north").rmdir()
    assert merge(tmp_path, "fedavg", model=net, log=said.append, **SHAPE).clients == ("north",)


@pytest.mark.parametrize("method", ["fedavg", "ties"])
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def in_folder(net: nn.Module, place: Path) -> Path:
    place.mkdir()
    save_file({name: value.clone() for name, value in net.state_dict().items()}, place / "model.safetensors")
    return place


def in_checkpoint(net: nn.Module, place: Path) -> Path:
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    torch.save({"state_dict": state}, place.with_suffix(".ckpt"))
    return place.with_suffix(".ckpt")


@pytest.mark.parametrize("method", ["fedavg", "task-arithmetic", "ties"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda net, _: nn.DataParallel(net),
        lambda net, _: AveragedModel(net),
        lambda net, _: {f"model.{name}": value for name, value in net.state_dict().items()},
        lambda net, _: {f"model._orig_mod.{name}": value.numpy() for name, value in net.state_dict().items()},
        lambda net, _: {name: value for name, value in net.state_dict().items() if "num_b" not in name},
        lambda net, _: nn.DataParallel(net).state_dict(),
        lambda net, _: {"model": net.state_dict(), "epoch": 3},
        in_folder,
        in_checkpoint,
        lambda net, file: (save_model(net, str(file)), file)[1],
    ],
    ids=["DataParallel", "average", "Lightning", "numpy", "no counter", "its state", "wrapped", "folder", "checkpoint",
         "tied file"],
)  # fmt: skip
@pytest.mark.parametrize("build", [None, Tied], ids=["bare", "built"])
def test_any_models_merge_whatever_their_names(tmp_path: Path, method: str, wrap: Any, build: Any) -> None:
    base, one, other = (trained(seed, Tied) for seed in range(3))
    named = {f"module.{name}": value for name, value in base.state_dict().items()}  # as a wrapper names it
    starts: list[Any] = [None] * 2 if method == "fedavg" else [base, named]
    wanted = merge([one.state_dict(), other.state_dict()], method, start=starts[0]).outcome.student
    wrapped = wrap(other, tmp_path / "b.safetensors")
    given = [one.state_dict(), wrapped], [wrap(one, tmp_path / "a.safetensors"), other.state_dict()]
    for models, start in zip(given, starts, strict=True):
        found = merge(models, method, model=build, start=start).outcome.student
        found = {name.removeprefix("model."): value for name, value in found.items()}  # the first model's own names
        assert found.keys() == wanted.keys()
        torch.testing.assert_close(found, wanted)
    if starts[0] is not None:
        began = wrap(base, tmp_path / "start.safetensors")
        for models in ([one, other], [one.state_dict(), other.state_dict()]):
            found = merge(models, method, model=build, start=began).outcome.student
            torch.testing.assert_close({name.removeprefix("model."): value for name, value in found.items()}, wanted)
    with pytest.raises(UploadError, match=r"tensors do not fit the (others|start): missing nothing; not expected more"):
        merge([one.state_dict(), {**other.state_dict(), "more": torch.ones(1)}], method, start=starts[0])


def test_a_folder_of_models_is_merged_and_what_it_holds_beside_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOG, "propagate", True)
    folder = tmp_path / "models"
    folder.mkdir()
    for name, seed in (("a.PT", 1), ("b b.pth.tar", 2)):
        torch.save({"state_dict": trained(seed).state_dict()}, folder / name)
    (folder / "notes.txt").write_text("")
    with caplog.at_level("WARNING"):
        assert merge(str(folder), "fedavg").clients == ("a", "b-b")
    assert "2 models; left out are 1 file (1 .txt): notes.txt" in caplog.text
    torch.save(trained(1).state_dict(), folder / "a.pt")
    for place, line in (
        (folder, r"a.PT and a.pt both give the client name 'a': must be a mapping"),
        (folder / "a.pt", "is one file: must be a folder of checkpoints, or a list"),
        (tmp_path / "no", "does not exist: must be a folder of checkpoints, or a list"),
        (tmp_path, "holds no checkpoints: must be files that end in"),
    ):
        with pytest.raises(OptionError, match=line):
            merge(place, "fedavg")
    with pytest.raises(OneShotError, match="is a folder, which holds a"):
        merge([trained(1).state_dict(), folder], "fedavg", model=net, **SHAPE)


def test_a_folder_below_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed, look, found = tmp_path / "closed", Path.iterdir, Path.is_file

    def forbidden(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    closed.mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda path: forbidden(path) if path == closed else look(path))
    monkeypatch.setattr(Path, "is_file", lambda path: forbidden(path) if path.parent == closed else found(path))
    with pytest.raises(OptionError, match=r"holds no checkpoints: .*; left out are 1 file \(1 folder\): closed"):
        merge(tmp_path, "fedavg")
    torch.save(trained(1).state_dict(), tmp_path / "a.pt")
    assert merge(tmp_path, "fedavg", log=str).clients == ("a",)


@pytest.mark.parametrize("method", ["fedens", "fedavg"])
def test_models_that_name_other_classes_or_another_order_are_not_merged(tmp_path: Path, method: str) -> None:
    order = {name: number for number, name in enumerate(["ant", "cat", "dog", "owl"])}
    turned = {name: 3 - number for name, number in order.items()}
    for client, classes in (("a", {"class_to_idx": order}), ("b", {}), ("c", {"class_to_idx": turned})):
        torch.save({"state_dict": trained(3).state_dict(), **classes}, tmp_path / f"{client}.pt")
    line = (
        "model 'c': its classes differ from those of client 'a': class 0 is 'owl' here and 'ant' there, the same names"
    )
    with pytest.raises(UploadError, match=line):
        merge(tmp_path, method, model=net, **SHAPE)
    (tmp_path / "c.pt").unlink()
    lines = list[str]()
    torch.save(trained(4).state_dict(), tmp_path / "b-last.pt")
    merge(tmp_path, method, model=net, log=lines.append, **SHAPE)
    assert "b, b-last name no classes: taken to be those of the others, in their order" in lines
    assert any(line.startswith("b-last.pt, b.pt look like states of one training by their names") for line in lines)


class Counted(nn.Module):
    """Shifts by what training has seen, which its state_dict lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)
        self.register_buffer("seen", torch.zeros(64), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += images.flatten(1).mean(0)
        return self.head(images.flatten(1) - self.seen)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["fedens", "label-count-ensemble"])
def test_a_buffer_that_training_changes_and_no_state_dict_has_is_refused(method: str) -> None:
    states = [Counted().state_dict() for _ in range(2)]
    counts = [[1, 1, 1, 1]] * 2
    with pytest.raises(OptionError, match="buffer 'seen', which changes in training, and its state_dict lacks it"):
        merge(states, method, model=Counted, label_counts=counts, **SHAPE)
    assert merge([Counted(), Counted()], method, label_counts=counts, log=lambda _: None, **SHAPE).ensemble is not None


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.eye(3).to(torch.float8_e4m3fn), r"quantised \(float8_e4m3fn\)"),
        (torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8), r"quantised \(qint8\)"),
    ],
)
@pytest.mark.parametrize("door", ["dict", "torch file", "safetensors"])
def test_tensors_without_plain_arithmetic_are_refused_in_a_line(
    tmp_path: Path, tensor: torch.Tensor, kind: str, door: str
) -> None:
    state: Any = {"w": tensor, "b": torch.ones(3)}
    if door == "torch file":
        torch.save(state, tmp_path / "a.pt")
        state = tmp_path / "a.pt"
    if door == "safetensors":
        if kind.startswith("sparse") or "qint8" in kind:
            return  # the format has no such tensors
        save_file(state, tmp_path / "a.safetensors")
        state = tmp_path / "a.safetensors"
    with pytest.raises(UploadError, match=f"'w'.* is {kind}.*must be .*dense tensor"):
        merge({"a": state, "b": state}, "fedavg", log=str)


def test_scripted_modules_are_refused_and_the_advice_works() -> None:
    models = [trained(seed).eval() for seed in (1, 2)]
    scripted = [torch.jit.script(one) for one in models]
    with pytest.raises(OptionError, match=r"model 'client-000' is \w*ScriptModule: needs model=, a callable"):
        merge(scripted, "fedavg", log=str)
    merged = merge(scripted, "fedavg", model=net, log=str).outcome.student
    expected = merge(models, "fedavg", log=str).outcome.student
    assert all(torch.equal(merged[key], expected[key]) for key in expected)
