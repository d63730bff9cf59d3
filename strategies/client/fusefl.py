"""The client half of FuseFL, without Flower: everybody's frozen blocks, and a client's own net above them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..combiners.fused_blocks import ADAPTERS, SideBySide, adapted
from ..combiners.fused_blocks import summed as summed
from ..core.errors import UploadError

State = dict[str, Tensor]


class Frozen(nn.Sequential):
    """The blocks that all clients have sent so far, stage by stage: [B, ch, H, W] -> joined maps [B, M C, ...].

    It stays in evaluation mode, and passes no gradient.

    Args:
        blocks: The client's own blocks, as many as there are stages or more; their weights do not matter.
        sent: Of every stage the weights of all M copies, stacked: name -> [M, ...].
        adapter: What later blocks begin with, a key of :data:`ADAPTERS`.

    Attributes:
        members: M.

    Raises:
        UploadError: The adapter is unknown, or weights do not fit their block.
    """

    def __init__(self, blocks: Sequence[nn.Module], sent: Sequence[State], adapter: str) -> None:
        super().__init__()
        if adapter not in ADAPTERS or not all(sent) or len(sent) > len(blocks):
            raise UploadError(
                f"the server's adapter is {adapter[:80]!r}, for {len(sent)} blocks: must be one of "
                f"{', '.join(ADAPTERS)}, and the weights of 1 to {len(blocks)} blocks"
            )
        self.members = len(next(iter(sent[0].values())))
        for number, (block, stacked) in enumerate(zip(blocks, sent, strict=False)):
            states = [{key: value[k] for key, value in stacked.items()} for k in range(self.members)]
            try:
                self.append(SideBySide(self._template(number, block, stacked, adapter), states))
            except (IndexError, RuntimeError) as error:
                raise UploadError(
                    f"the server's blocks {number + 1} do not fit this client's: {_line(error)}"
                ) from error
        self.requires_grad_(False)
        self.train(False)

    def _template(self, number: int, block: nn.Module, stacked: State, adapter: str) -> nn.Module:
        if number == 0:
            return block
        channels = len(stacked["adapter.weight"][0]) if "adapter.weight" in stacked else 1
        return adapted(block, adapter, members=self.members, channels=channels)

    def train(self, mode: bool = True) -> Frozen:  # noqa: ARG002  its statistics stay those of the senders
        """Stay in evaluation mode, whatever ``mode`` is."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return joined outputs."""
        for stage in self:
            x = stage(x)
        return x


def above(whole: nn.Sequential, stage: int, frozen: Frozen, joined: Tensor, adapter: str, kept: State) -> nn.Sequential:
    """Return what a client trains in a stage: its blocks from this one on, after an adapter of its own.

    Args:
        whole: The client's blocks and classifier; the result has its modules and their names.
        stage: s, from 2 to the number of blocks.
        frozen: The blocks below.
        joined: An output of them [B, M C, ...].
        adapter: A key of :data:`ADAPTERS`; a convolution is drawn from torch's global generator.
        kept: The weights that these blocks have after the stage before.

    Raises:
        UploadError: Weights are missing.
    """
    net = nn.Sequential(OrderedDict([*whole.named_children()][stage - 1 :]))
    try:
        net.load_state_dict({key: kept[key] for key in net.state_dict()})
    except (KeyError, RuntimeError) as error:
        raise UploadError(f"the client's own model lacks what follows block {stage - 1}: {_line(error)}") from error
    channels = joined.shape[1] // frozen.members
    net[0] = adapted(net[0], adapter, members=frozen.members, channels=channels)
    return net


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
