"""Linear layers of several models merged in closed form, by what the clients' own updates have read.

An average of weights mixes what one client has learnt of an input with what another, which never saw such inputs, has
not. RegMean weighs each client by the Gram matrix of its layer's inputs, which it must upload. Here the update itself
stands for that matrix: its rows span the inputs that the layer has read.

RegMean: Jin, Ren, Preotiuc-Pietro, Cheng, *Dataless Knowledge Fusion by Merging Weights of Language Models*, ICLR 2023.

Symbols, D_k = W_k - W_0 with the bias as a further column, D_k = U S V^T, w_k the weight of a client, d the columns::

    G_k = V S V^T / tr(S)                                the square root of D_k^T D_k, of trace 1
    M   = (sum_k w_k D_k (G_k + (a / d) I)) (sum_k w_k (G_k + (a / d) I))^-1,   W = W_0 + M

M minimises ``sum_k w_k tr((M - D_k) (G_k + (a / d) I) (M - D_k)^T)``. With a large ``a`` it is the average. The trace
of 1 bounds a client's say: it follows from the directions of its update, not from their length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

AVERAGED = (
    0.6  # a; chosen with the form of G_k on the selection half of the test images, see docs/lab/published-schedule.md
)
MOST_INPUTS = 4096  # of a merged layer: a matrix of their square is inverted
ALIKE = 0.2  # least cosine of a layer's weights with those it started from; of two independent starts it is near 0
State = dict[str, Tensor]


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers that can be merged, in the order of their declaration."""
    found = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    stored = model.state_dict()
    own = [name for name in found if f"{name}.weight" in stored]
    return [name for name in own if stored[f"{name}.weight"].shape[1] <= MOST_INPUTS]


def resembles_start(weight: Tensor, start: Tensor) -> bool:
    """Return whether a trained weight is still like a start; of two independent starts it is not."""
    flat = weight.double().flatten(), start.double().flatten()
    return float(nn.functional.cosine_similarity(*flat, dim=0)) >= ALIKE


@dataclass
class _Sums:
    """What the solution needs of all clients: sum w_k G_k [d, d], sum w_k D_k G_k and sum w_k D_k [O, d], sum w_k."""

    gram: Tensor
    read: Tensor
    moved: Tensor
    weight: float = 0.0

    @classmethod
    def of(cls, update: Tensor) -> _Sums:
        """Return empty sums for updates [O, d] of this shape."""
        return cls(update.new_zeros(update.shape[1], update.shape[1]), update * 0.0, update * 0.0)

    def include(self, update: Tensor, weight: float) -> None:
        """Add a client; one whose layer has not moved has a say by ``a`` alone."""
        _, sizes, rows = torch.linalg.svd(update, full_matrices=False)
        gram = (rows.T * (sizes / sizes.sum().clamp_min(torch.finfo(sizes.dtype).tiny))) @ rows
        self.gram += weight * gram
        self.read += weight * update @ gram
        self.moved += weight * update
        self.weight += weight

    def solved(self) -> Tensor:
        """Return M [O, d]."""
        share = AVERAGED / len(self.gram)
        whole = self.gram + share * self.weight * torch.eye(len(self.gram), dtype=self.gram.dtype)
        solution: Tensor = torch.linalg.solve(whole, (self.read + share * self.moved).T).T
        return solution


def merge_layers(
    start: Mapping[str, Tensor], clients: Iterable[tuple[Mapping[str, Tensor], float]], names: Sequence[str]
) -> State:
    """Return the merged weights and biases of some linear layers, in the dtypes of the start, on the CPU.

    Args:
        start: W_0, the weights that all clients began from.
        clients: The weights of each, finite, and its w_k >= 0, not all zero; read one at a time.
        names: The layers, see :func:`linear_layers`.
    """
    starts = {name: _join_bias(start, name) for name in names}
    sums = {name: _Sums.of(began) for name, began in starts.items()}
    for state, weight in clients:
        for name, found in sums.items():
            found.include(_join_bias(state, name) - starts[name], weight)
    merged: State = {}
    for name, found in sums.items():
        whole, weight_key = starts[name] + found.solved(), f"{name}.weight"
        merged[weight_key] = whole[:, : start[weight_key].shape[1]].to(start[weight_key].dtype)
        if (bias := f"{name}.bias") in start:
            merged[bias] = whole[:, -1].to(start[bias].dtype)
    return merged


def _join_bias(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a layer's weight, with its bias as the last column, in double precision on the CPU."""
    parts = [state[f"{name}.weight"], *([state[f"{name}.bias"][:, None]] if f"{name}.bias" in state else [])]
    return torch.cat([part.detach().cpu().double() for part in parts], dim=1)
