"""A tiny fused network of two clients, for the tests of combiners."""

from __future__ import annotations

import torch
from torch import nn

from strategies.combiners.fused_blocks import FusedBlocks, SideBySide, adapt_block

M, C, F, K = 2, 3, 4, 5  # members, channels, features, classes


class First(nn.Conv2d):
    """Three maps 2 x 2 of images 1 x 4 x 4; two more blocks and a classifier follow."""

    def __init__(self) -> None:
        super().__init__(1, C, 2, stride=2)
        middle = nn.Sequential(nn.Conv2d(C, 2, 1), nn.BatchNorm2d(2))
        self.later = (middle, nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(8, F)), nn.Linear(F, K))


def states(template: nn.Module, seed: int) -> list[dict[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [
        {
            key: value
            if value.dtype == torch.int64
            else torch.rand(value.shape, generator=rng) - 0.5 * ("var" not in key)
            for key, value in template.state_dict().items()
        }
        for _ in range(M)
    ]


def made(adapter: str = "conv") -> FusedBlocks:
    middle, last, classifier = First().later
    templates = [adapt_block(block, adapter, members=M, channels=width) for block, width in ((middle, C), (last, 2))]
    classifier.load_state_dict(states(classifier, 9)[0])
    stages = [SideBySide(template, states(template, seed)) for seed, template in enumerate(templates)]
    return FusedBlocks(stages, classifier).eval()
