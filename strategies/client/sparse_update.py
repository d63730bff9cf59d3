"""STC on the client: an update as the signs of its largest entries, and the start that such an update leads to.

Paper: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data,
    TNNLS 2020, https://arxiv.org/abs/1903.02891; the code is :mod:`strategies.uploads.ternary`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..core.errors import UploadError
from ..uploads.ternary import decode, encode, flat, sparse_ternary, unflat
from .parameters import State, arrays_of, parameters_of, part_of, shapes_of


class SparseUpdate:
    """STC sends the signs of the update's largest entries, and adds the rest to the next update.

    Args:
        model: Holds the weights that local training starts from.
        density: p, the share of the entries to send, in (0, 1].
        left: The rest of earlier rounds, float32 [n]; None for nothing.
    """

    def __init__(self, model: nn.Module, density: float, left: torch.Tensor | None) -> None:
        self._start, self._density = arrays_of(parameters_of(model)), density
        size = sum(value.size for value in self._start.values())
        self._left = left.numpy() if left is not None and left.shape == (size,) else 0.0

    def finish(self, model: nn.Module) -> tuple[State, torch.Tensor]:
        """Return the code of the update (see :func:`strategies.uploads.ternary.encode`), and its rest [n]."""
        wanted = flat(arrays_of(parameters_of(model))) - flat(self._start) + self._left
        sent = sparse_ternary(wanted, self._density)
        code = {name: torch.from_numpy(value) for name, value in encode(sent, self._density).items()}
        return code, torch.from_numpy(wanted - sent.dense())


def load_start(model: nn.Module, sent: Mapping[str, State], density: float, kept: State) -> None:
    """Give a model the weights of a request: the weights sent, or those of the round before plus a ternary update.

    Args:
        model: The model to change.
        sent: The request's arrays by name of record.
        density: p of the ternary update.
        kept: The client's state of the round before; empty if it took no part in it.

    Raises:
        UploadError: The weights do not fit the model, or the client lacks the weights that the update builds on.
    """
    state = {**sent.get("arrays", {})}
    if "ternary" in sent:
        before = arrays_of(part_of(kept, "start."))
        if not before:
            raise UploadError("the client lacks the weights of the round before, which the server's update builds on")
        code = {name: value.numpy() for name, value in sent["ternary"].items()}
        step = unflat(decode(code, flat(before).size, density, "the server's update").dense(), before)
        state.update({name: torch.from_numpy(value + step[name]) for name, value in before.items()})
    if shapes_of(state) != shapes_of(model.state_dict()):
        raise UploadError("the server's weights have other names or shapes than this client's model")
    model.load_state_dict(state)
