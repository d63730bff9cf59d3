"""Forward passes that keep no activations: the backward pass runs them a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

_RUNNING_AGAIN = ContextVar("running_again", default=False)


def recomputed(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``forward(x)``, keeping only x for the backward pass.

    Values and gradients equal those of a plain call bit for bit. Hooks inside ``forward`` run twice; the second time
    :func:`running_again` is true.
    """
    result: Tensor = checkpoint(forward, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _second_run()))
    return result


def running_again() -> bool:
    """Return whether this is the second run of a :func:`recomputed` forward pass, whose results are discarded.

    In the second run a hook must repeat the differentiable arithmetic of the first, but store nothing.
    """
    return _RUNNING_AGAIN.get()


@contextmanager
def _second_run() -> Iterator[None]:
    token = _RUNNING_AGAIN.set(True)
    try:
        yield
    finally:
        _RUNNING_AGAIN.reset(token)
