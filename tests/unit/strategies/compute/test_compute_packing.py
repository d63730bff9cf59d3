"""Trees of tensors as trees of arrays."""

import numpy as np
import pytest
import torch

from strategies.compute.packing import pack, unpack
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
