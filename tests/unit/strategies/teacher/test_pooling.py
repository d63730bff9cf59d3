from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strategies.teacher.pooling import lean_max_pool2d

WINDOWS: list[dict[str, Any]] = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (2, 1), "ceil_mode": True},
    {"kernel_size": 2, "dilation": 2},
]


def draw(*shape: int) -> Tensor:
    # Of few values, so that there are ties.
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pooling_equals_torchs_to_the_bit_forward_and_backward(
    window: dict[str, Any], layout: torch.memory_format
) -> None:
    x = draw(3, 4, 9, 7).contiguous(memory_format=layout).requires_grad_()
    ours, theirs = lean_max_pool2d(x, **window), F.max_pool2d(x, **window)
    assert torch.equal(ours, theirs)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((pooled * weights).sum(), x)[0] for pooled in (ours, theirs)]
    assert torch.equal(*gradients)
    assert gradients[0].stride() == gradients[1].stride()


def test_pooling_keeps_a_twelfth_of_torch_s_memory() -> None:
    def kept(pool: Any) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            pool(draw(2, 8, 16, 16).requires_grad_(), 2)
        return sum(sizes)

    assert kept(lean_max_pool2d) * 12 == kept(F.max_pool2d)
