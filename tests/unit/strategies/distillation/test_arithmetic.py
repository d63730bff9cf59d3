"""The choice of a generator's arithmetic: by hand, or by what the device computes in."""

import pytest
import torch

from strategies.distillation.synthesis import in_bfloat16


@pytest.mark.parametrize(
    ("found", "half"), [({"avx512_bf16": True}, True), ({"bf16": True}, True), ({"avx2": True}, False)]
)
def test_auto_follows_the_processor(monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], half: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert in_bfloat16("auto", "cpu") is half
    assert in_bfloat16("bfloat16", "cpu")
    assert not in_bfloat16("float32", "cpu")


def test_auto_is_float32_where_torch_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not in_bfloat16("auto", "cpu")
    assert not in_bfloat16("auto", "meta")


@pytest.mark.parametrize("half", [True, False])
def test_auto_asks_a_gpu_for_instructions_of_its_own(monkeypatch: pytest.MonkeyPatch, half: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: (asked.append(including_emulation), half)[1]
    )
    assert in_bfloat16("auto", "cuda:1") is half
    assert asked == [False]
