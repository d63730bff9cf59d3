"""Trees of tensors as trees of arrays."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

from strategies.compute.packing import PackedTensor, pack, unpack
from strategies.method import EnsembleSpec, Outcome, Snapshot

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_unpack_of_pack_returns_the_same_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.5], [3.0, 0.1, 7.0]]).to(dtype)
    again = unpack(pack(tensor))
    assert again.dtype == dtype
    assert again.shape == (2, 3)
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def test_pack_with_bfloat16_holds_integers_of_the_same_width() -> None:
    packed = pack(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    assert packed.dtype == "bfloat16"
    assert packed.array.dtype == np.int16


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)])
def test_unpack_of_pack_with_odd_shapes_keeps_them(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert unpack(pack(torch.zeros(shape, dtype=dtype))).shape == shape


def test_unpack_of_pack_with_strided_and_tracked_tensors_keeps_values() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    again = unpack(pack(tensor))
    assert torch.equal(again, tensor)
    assert again.is_contiguous()
    assert not again.requires_grad


def test_pack_then_changing_the_tensor_leaves_the_packed_one() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    packed = pack({"t": tensor, "a": array})
    tensor.add_(1)
    array += 1
    assert not unpack(packed)["t"].any()
    assert not unpack(packed)["a"].any()


def test_unpack_with_read_only_arrays_gives_writable_tensors() -> None:
    array = np.zeros(3, dtype=np.float32)
    array.flags.writeable = False
    tensor = unpack(PackedTensor("float32", array))
    tensor.add_(1)
    assert tensor.sum() == 3
    assert not array.any()


def test_unpack_of_pack_with_a_tree_keeps_its_form_and_order() -> None:
    tree = {"b": [torch.ones(1), None, 2.5], "a": (torch.zeros(1), "text", True), 3: OrderedDict(x=torch.ones(2))}
    again = unpack(pack(tree))
    assert list(again) == ["b", "a", 3]
    assert again["b"][1:] == [None, 2.5]
    assert again["a"][1:] == ("text", True)
    assert torch.equal(again[3]["x"], torch.ones(2))


def test_unpack_of_pack_with_outcome_and_snapshot_returns_them() -> None:
    spec = EnsembleSpec(("a", "b"), "weighted", {"weights": torch.tensor([0.25, 0.75])})
    outcome = unpack(
        pack(Outcome({"w": torch.ones(2)}, spec, {"fit": 1.5}, torch.zeros(1, 1, 2, 2, dtype=torch.uint8)))
    )
    assert isinstance(outcome, Outcome)
    assert outcome.ensemble is not None
    assert outcome.ensemble.clients == ("a", "b")
    assert torch.equal(outcome.ensemble.weights["weights"], torch.tensor([0.25, 0.75]))
    assert outcome.images is not None
    assert outcome.images.dtype == torch.uint8
    snapshot = unpack(pack(Snapshot(3, {"w": torch.ones(1)}, {"pool": torch.zeros(2, 1)})))
    assert (snapshot.step, snapshot.appended["pool"].shape) == (3, (2, 1))
