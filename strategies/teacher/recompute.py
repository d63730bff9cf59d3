"""Forward passes that keep no activations: the backward pass runs them a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

_RUNNING_AGAIN = ContextVar("running_again", default=False)


def recomputed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``forward(x)``, with the bits and gradients of a plain call, keeping nothing but x for the backward pass.

    Hooks inside ``forward`` run twice; the second time :func:`running_again` is true.
    """
    result: Tensor = checkpoint(forward, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _second_run()))
    return result


def running_again() -> bool:
    """Say whether this is the second run of a :func:`recomputed` forward pass, whose results nobody reads.

    A hook must do the same differentiable arithmetic then as in the first run, but remember nothing.
    """
    return _RUNNING_AGAIN.get()


@contextmanager
def _second_run() -> Iterator[None]:
    token = _RUNNING_AGAIN.set(True)
    try:
        yield
    finally:
        _RUNNING_AGAIN.reset(token)
