"""One rule for the names of tensors: what wraps a model, and what stands beside it, does not hide its weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from strategies.core.errors import UploadError
from strategies.core.names import match_names
from strategies.merging.copies import bare_module, difference
from strategies.uploads.checks import ModelSignature

OWN = ("conv.weight", "norm.weight", "norm.num_batches_tracked", "head.weight")


def under(prefix: str, *more: str) -> list[str]:
    return [*(prefix + name for name in OWN), *more]


@pytest.mark.parametrize(
    ("found", "note"),
    [
        (under(""), ""),
        (under("module."), "names were taken without 'module'"),
        (under("_orig_mod."), "names were taken without '_orig_mod'"),
        (under("module._orig_mod."), "names were taken without 'module'"),
        ([name.replace("norm.", "norm._orig_mod.") for name in OWN], "names were taken without '_orig_mod'"),
        (under("model."), "names were taken without the prefix 'model.'"),
        (under("net.backbone."), "names were taken without the prefix 'net.backbone.'"),
        (under("model._orig_mod."), "names were taken without the prefix 'model.'"),
        (under("module.", "n_averaged"), "left out are n_averaged, which are not weights of the model"),
        (under("model.", "train_acc.tp", "train_acc.fp"), "left out are train_acc.tp, train_acc.fp, which are no"),
        (under("model.", "criterion.weight"), "left out are criterion.weight, which are not weights"),
        (under("", "conv.position_ids"), "left out are conv.position_ids"),
        (under("", "total_ops", "conv.total_ops"), "left out are total_ops, conv.total_ops"),
        (under("") + under("ema."), "left out are 4 tensors of the model's average: ema.conv.weight"),
        (under("model.") + under("ema_model.module."), "left out are 4 tensors of the model's average"),
        (under("ema_model."), "names were taken without the prefix 'ema_model.'"),
        ([name for name in OWN if "num_b" not in name], "num_batches_tracked is missing in 1 layers, and taken as 0"),
    ],
)
def test_a_model_is_found_under_its_usual_names(found: list[str], note: str) -> None:
    names = match_names(found, OWN)
    assert (names.missing, names.extra) == ((), ())
    assert {*names.sources, *names.counters} == set(OWN)
    assert all(source.endswith(name.rpartition(".")[2]) for name, source in names.sources.items())
    assert any(line.startswith(note) for line in names.notes) or (not note and not names.notes)


def test_a_wrapped_server_takes_a_bare_model() -> None:
    names = match_names(OWN, under("module.net."))
    assert names.sources == {f"module.net.{name}": name for name in OWN}


@pytest.mark.parametrize(
    ("found", "missing", "extra"),
    [
        (OWN[:-1], ("head.weight",), ()),
        (under("", "head2.weight"), (), ("head2.weight",)),
        (under("", "acc.weight"), (), ("acc.weight",)),
        (["a.b", "c.d"], ("conv.weight", "norm.weight", "head.weight"), ("a.b", "c.d")),
    ],
)
def test_other_tensors_are_missing_or_extra(found: list[str], missing: tuple[str, ...], extra: tuple[str, ...]) -> None:
    names = match_names(found, OWN)
    assert (names.missing, names.extra) == (missing, extra)


def test_a_model_that_is_there_twice_is_refused() -> None:
    with pytest.raises(UploadError, match=r"are there under 'student\.', 'teacher\.': must be there once"):
        match_names(under("student.") + under("teacher."), OWN)


@pytest.mark.parametrize("newer_first", [True, False])
def test_the_factors_of_a_weight_norm_have_the_names_of_either_version(newer_first: bool) -> None:
    newer = ["fc.bias", "fc.parametrizations.weight.original0", "fc.parametrizations.weight.original1"]
    older = ["fc.bias", "fc.weight_g", "fc.weight_v"]
    found, wanted = (newer, older) if newer_first else (older, newer)
    names = match_names([f"net.{name}" for name in found], wanted)
    assert names.sources == {own: f"net.{name}" for own, name in zip(wanted, found, strict=True)}
    assert "the factors of weight norms have the names of another version of PyTorch" in names.notes


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_tied_tensor_may_be_there_once(kept: str) -> None:
    signature = ModelSignature(Tied().state_dict())
    assert match_names([kept], signature, signature.ties).sources == dict.fromkeys(signature, kept)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, AveragedModel, torch.compile, lambda module: torch.compile(nn.DataParallel(module))],
    ids=["DataParallel", "AveragedModel", "compile", "both"],
)
def test_a_wrapped_module_is_the_bare_one(wrap: object) -> None:
    module, wrapped = net(), wrap(net())  # type: ignore[operator]
    assert difference(module, bare_module(wrapped)) == ""
    assert list(bare_module(wrapped).state_dict()) == list(module.state_dict())
    outer = nn.Sequential(wrapped, nn.ReLU())  # of a layer, too
    bare = bare_module(outer)
    assert difference(nn.Sequential(net(), nn.ReLU()), bare) == ""
    assert next(bare.parameters()) is next(outer.parameters())
    assert "0.0.weight" not in outer.state_dict()  # the module given stays wrapped
