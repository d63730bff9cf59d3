"""The client half of FuseFL, without Flower: everybody's frozen blocks, and a client's own net above them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..combiners.fused_blocks import ADAPTERS, SideBySide, adapt_block
from ..combiners.fused_blocks import sum_members as sum_members
from ..core import refusals

State = dict[str, Tensor]


class Frozen(nn.Sequential):
    """The blocks that all clients have sent so far, stage by stage: [B, ch, H, W] -> joined maps [B, M C, ...].

    It stays in evaluation mode, and passes no gradient.

    Args:
        blocks: The client's own blocks, as many as there are stages or more; their weights do not matter.
        sent: Of every stage the weights of all M copies, stacked: name -> [M, ...].
        adapter: What later blocks begin with, a key of :data:`ADAPTERS`.
        input_shape: (ch, H, W).

    Attributes:
        members: M.

    Raises:
        UploadError: The adapter is unknown, or weights do not fit their block.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], sent: Sequence[State], adapter: str, input_shape: Sequence[int]
    ) -> None:
        super().__init__()
        if adapter not in ADAPTERS or not all(sent) or len(sent) > len(blocks):
            raise refusals.broken_rule(
                f"the server's adapter is {adapter[:80]!r}, for {len(sent)} blocks",
                f"one of {', '.join(ADAPTERS)}, and the weights of 1 to {len(blocks)} blocks",
            )
        first = next(iter(sent[0].values()))
        self.members, self.channels, joined = len(first) if first.ndim else 0, 0, torch.zeros(1, *input_shape)
        for number, (block, stacked) in enumerate(zip(blocks, sent, strict=False), 1):
            template = (
                adapt_block(block, adapter, members=self.members, channels=self.channels) if number > 1 else block
            )
            # Before M copies are made, so that the bytes that were sent bound those that they take.
            _check_fits(template, stacked, self.members, f"the server's blocks {number}")
            states = [{key: value[k] for key, value in stacked.items()} for k in range(self.members)]
            self.append(SideBySide(template, states).eval())
            with torch.no_grad():
                joined = self[-1](joined)
            self.channels = joined.shape[1] // self.members
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Frozen:  # noqa: ARG002  its statistics stay those of the senders
        """Stay in evaluation mode, whatever ``mode`` is."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return joined outputs."""
        for stage in self:
            x = stage(x)
        return x


def above(whole: nn.Sequential, stage: int, frozen: Frozen, adapter: str, kept: State) -> nn.Sequential:
    """Return what a client trains in a stage: its blocks from this one on, after an adapter of its own.

    Args:
        stage: s, from 2 to the number of blocks.
        adapter: A key of :data:`ADAPTERS`; a convolution is drawn from torch's global generator.

    Raises:
        UploadError: Weights are missing.
    """
    net = nn.Sequential(OrderedDict([*whole.named_children()][stage - 1 :]))
    try:
        net.load_state_dict({key: kept[key] for key in net.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise refusals.lost_state(f"what follows block {stage - 1} of its own model: {_line(error)}") from error
    net[0] = adapt_block(net[0], adapter, members=frozen.members, channels=frozen.channels)
    return net


def _check_fits(template: nn.Module, stacked: State, members: int, what: str) -> None:
    """Compare stacked weights of M copies with the module that all of them are like."""
    wanted = {key: (value.dtype, (members, *value.shape)) for key, value in template.state_dict().items()}
    found = {key: (value.dtype, tuple(value.shape)) for key, value in stacked.items()}
    wrong = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
    if wrong or not members:
        raise refusals.broken_rule(
            f"{what} do not fit this client's: their tensors {wrong[:3]!s:.200}",
            "those of at least one copy of its block, with the same number of copies, shapes and types",
        )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
