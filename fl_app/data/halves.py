"""The two halves of the held-out examples: one to choose by, the other to report on.

A figure that was chosen on the images that report it is too good. So the selection half makes a choice, such as that
of a rate, and the report half scores it. Both have the same number of examples of each class, up to one.
"""

from __future__ import annotations

import torch

from strategies.core.seeds import generator

HALVES = ("all", "selection", "report")
SEED = 2024  # the same halves in every run, whatever its seed


def half_of(labels: torch.Tensor, half: str) -> torch.Tensor:
    """Return the positions of a half of the held-out examples, ascending.

    Args:
        labels: int64 [N], of all held-out examples.
        half: One of :data:`HALVES`. Of a class with an odd number of examples, the report half has the larger part.
    """
    if half == "all":
        return torch.arange(len(labels))
    order = torch.randperm(len(labels), generator=generator(SEED, "held-out halves"))
    chosen = []
    for label in range(int(labels.max()) + 1):
        own = order[labels[order] == label]
        middle = len(own) // 2
        chosen.append(own[:middle] if half == "selection" else own[middle:])
    return torch.cat(chosen).sort().values
