"""STC on the client: the largest entries of an update, and the start that such an update leads to.

Paper: Sattler, Wiedemann, Mueller, Samek, Robust and Communication-Efficient Federated Learning from Non-i.i.d. Data,
    TNNLS 2020, https://arxiv.org/abs/1903.02891; the code is :mod:`strategies.uploads.ternary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import UploadError
from ..uploads.ternary import LEAST_DENSITY, VALUES, Compression, flat, unflat
from .parameters import State, arrays_of, parameters_of, part_of, shapes_of


def compression_of(density: float, said: Mapping[str, Any]) -> Compression | None:
    """Return the compression that a request asks for; None if it asks for none.

    Args:
        density: Its ``stc-density``; 0 for none.
        said: Its config.

    Raises:
        UploadError: It asks for one that does not exist.
    """
    values = str(said.get("stc-values", VALUES[0]))
    if not density:
        return None
    if not LEAST_DENSITY <= density <= 1.0 or values not in VALUES:
        raise UploadError(
            f"the request's stc-density is {density} and its stc-values {values[:80]!r}: must be "
            f"at least {LEAST_DENSITY} and at most 1, and one of {', '.join(VALUES)}"
        )
    return Compression(density, values)


class SparseUpdate:
    """STC sends the update's largest entries, and adds the rest to the next update.

    Args:
        model: Holds the weights that local training starts from.
        compression: The share of the entries to send, and their form.
        left: The rest of earlier rounds, float32 [n]; None for nothing.
    """

    def __init__(self, model: nn.Module, compression: Compression, left: torch.Tensor | None) -> None:
        self._start, self._compression = arrays_of(parameters_of(model)), compression
        size = sum(value.size for value in self._start.values())
        self._left = left.numpy() if left is not None and left.shape == (size,) else 0.0

    def finish(self, model: nn.Module) -> tuple[State, torch.Tensor]:
        """Return the code of the update, see :class:`strategies.uploads.ternary.Compression`, and its rest [n]."""
        wanted = flat(arrays_of(parameters_of(model))) - flat(self._start) + self._left
        sent = self._compression.compress(wanted)
        code = {name: torch.from_numpy(value) for name, value in self._compression.encode(sent).items()}
        return code, torch.from_numpy(wanted - sent.dense())


def load_start(model: nn.Module, sent: Mapping[str, State], compression: Compression | None, kept: State) -> None:
    """Give a model the weights of a request: the weights sent, or those of the round before plus a sparse update.

    Args:
        model: The model to change.
        sent: The request's arrays by name of record.
        compression: Of the sparse update; None if none may come.
        kept: The client's state of the round before; empty if it took no part in it.

    Raises:
        UploadError: The weights do not fit the model, or the client lacks the weights that the update builds on.
    """
    state = {**sent.get("arrays", {})}
    if "ternary" in sent and compression is not None:
        before = arrays_of(part_of(kept, "start."))
        if not before:
            raise UploadError("the client lacks the weights of the round before, which the server's update builds on")
        code = {name: value.numpy() for name, value in sent["ternary"].items()}
        step = unflat(compression.decode(code, flat(before).size, "the server's update").dense(), before)
        state.update({name: torch.from_numpy(value + step[name]) for name, value in before.items()})
    if shapes_of(state) != shapes_of(model.state_dict()):
        raise UploadError("the server's weights have other names or shapes than this client's model")
    model.load_state_dict(state)
