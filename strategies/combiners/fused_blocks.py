"""Networks that were cut into blocks, fused block by block: FuseFL's model (Tang et al., NeurIPS 2024).

The M copies of a block stand side by side. Their outputs follow each other along the channels, client by client, as
"joined" maps [B, M C, ...]. A later block begins with an adapter, which brings joined maps back to C channels.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..core.seeds import build_module, seeded_torch
from .trained import hold_as_buffers

ADAPTERS = ("conv", "mean")


class MemberMean(nn.Module):
    """The mean over M members of joined maps: [B, M C, ...] -> [B, C, ...]."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self.members = members

    def forward(self, joined: Tensor) -> Tensor:
        """Return the mean."""
        return _by_member(joined, self.members).mean(1)


def adapt_block(block: nn.Module, adapter: str, *, members: int, channels: int) -> nn.Sequential:
    """Return a block that takes joined maps [B, M C, ...].

    Args:
        block: Takes maps [B, C, ...].
        adapter: ``"conv"``, a 1x1 convolution with bias, drawn from torch's global generator; or ``"mean"``.
        members: M.
        channels: C; not read for ``"mean"``.
    """
    begin = MemberMean(members) if adapter == "mean" else nn.Conv2d(members * channels, channels, 1)
    return nn.Sequential(OrderedDict(adapter=begin, block=block))


class SideBySide(nn.ModuleList):
    """The members' copies of one block, which all see the same input; their outputs are joined.

    Args:
        template: A module like each copy; its weights do not matter.
        states: The copies' weights, in the order of the members.

    Raises:
        RuntimeError: Weights do not fit.
    """

    def __init__(self, template: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(copy.deepcopy(template) for _ in states)
        for block, state in zip(self, states, strict=True):
            block.load_state_dict(state)

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined outputs [B, M C, ...]."""
        return torch.cat([block(x) for block in self], dim=1)


def sum_members(joined: Tensor, members: int) -> Tensor:
    """Return the sum over members of joined features: [B, M F] -> [B, F]."""
    return _by_member(joined, members).sum(1)


def _by_member(joined: Tensor, members: int) -> Tensor:
    return torch.unflatten(joined, 1, (members, -1))


class FusedBlocks(nn.Module):
    """Everything above the members' first blocks: the later blocks side by side, and one classifier of their sum.

    Built of the members' first blocks, because only these know the structure of the later ones:
    :func:`.combiners.build_combiner`.

    Args:
        stages: The later blocks, each of all members. The last one's outputs are features [B, F].
        classifier: Maps features to logits [B, C].
    """

    def __init__(self, stages: Sequence[SideBySide], classifier: nn.Module) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.classifier = copy.deepcopy(classifier)
        hold_as_buffers(self)

    @classmethod
    def of_member(cls, member: Callable[[], nn.Module] | None, weights: Mapping[str, Tensor]) -> FusedBlocks:
        """Rebuild it from its tensors.

        Args:
            member: Builds a first block with the attribute ``later``: the blocks after it, and the classifier.

        Raises:
            ValueError: The member names no later blocks, or the tensors do not fit them.
        """
        later: Sequence[nn.Module] = getattr(build_module(member), "later", ()) if member is not None else ()
        members = len({key.split(".")[2] for key in weights if key.startswith("stages.0.")})
        if not later or not members:
            raise ValueError(f"combiner 'fused-blocks' cannot be built from tensors {sorted(weights)[:4]}")
        *blocks, classifier = later
        stages = []
        for number, block in enumerate(blocks):
            mixing = weights.get(f"stages.{number}.0.adapter.weight")
            adapter, channels = ("mean", 0) if mixing is None else ("conv", len(mixing))
            with seeded_torch(0, "fused-blocks"):  # its first weights do not matter
                template = adapt_block(block, adapter, members=members, channels=channels)
            stages.append(SideBySide(template, [template.state_dict()] * members))
        made = cls(stages, classifier)
        try:
            made.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"combiner 'fused-blocks' cannot be built: {' '.join(str(error).split())}") from error
        return made.eval()

    def features(self, outputs: Tensor) -> Tensor:
        """Return h(x), the sum of the members' last outputs [B, F], of their first blocks' outputs [M, B, C, ...]."""
        return sum_members(self.stages(outputs.transpose(0, 1).flatten(1, 2)), len(outputs))

    def forward(self, outputs: Tensor) -> Tensor:
        """Map the outputs of the members' first blocks [M, B, C, ...] to logits [B, C]."""
        logits: Tensor = self.classifier(self.features(outputs))
        return logits
