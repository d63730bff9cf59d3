"""Max pooling that keeps little for its backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

Size = int | tuple[int, int]


def lean_max_pool2d(
    x: Tensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Return ``F.max_pool2d`` of x [B, ch, H, W], with values and gradients equal bit for bit.

    torch keeps the large input, of which the backward pass reads only the shape, and 64-bit indices. This version
    keeps only 16-bit indices (32-bit from 32,769 pixels on): a twelfth of the memory for 2x2 windows.
    """
    how: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    if has_torch_function_unary(x):  # a stand-in of a trace, which a pickled module runs through when it is loaded
        traced: Tensor = handle_torch_function(lean_max_pool2d, (x,), x, kernel_size, **how)
        return traced
    stride = kernel_size if stride is None else stride
    if not (torch.is_grad_enabled() and x.requires_grad):
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    sizes = [_pair(size) for size in (kernel_size, stride, padding, dilation)]
    pooled, _ = _LeanMaxPool.apply(x, (*sizes, ceil_mode))  # type: ignore[no-untyped-call]
    return pooled  # type: ignore[no-any-return]


def _pair(size: Size) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


class _LeanMaxPool(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, window: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        pooled, index = torch.ops.aten.max_pool2d_with_indices(x, *window)
        return pooled, index.to(torch.int16 if x.shape[-1] * x.shape[-2] <= 2**15 else torch.int32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[Any, ...]], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.window = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.shape, ctx.channels_last = x.shape, x.is_contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # Neither written nor read: only its shape and layout matter.
        layout = torch.channels_last if ctx.channels_last else torch.contiguous_format
        like = torch.empty(ctx.shape, dtype=grads[0].dtype, device=grads[0].device, memory_format=layout)
        pooled_back = torch.ops.aten.max_pool2d_with_indices_backward
        return pooled_back(grads[0], like, *ctx.window, index.to(torch.int64)), None
