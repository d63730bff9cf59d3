"""What a model answers, and the gradient that its answers send back."""

from collections.abc import Callable

import torch
from torch import Tensor


def answers(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the gradient of their squares with respect to the input."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), x)
    return outputs.detach(), gradient
