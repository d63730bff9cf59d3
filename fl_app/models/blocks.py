"""Classifiers cut into blocks, which FuseFL's clients train and send one by one (Tang et al., NeurIPS 2024)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from strategies.core.errors import OptionError

from . import chain

_LENET: dict[int, tuple[str, ...]] = {2: ("flatten",)}
_RESNET: dict[int, tuple[str, ...]] = {2: ("layer3",), 4: ("layer1", "layer3", "layer4")}
# Architecture -> number of blocks K -> the layer that each block after the first begins with.
CUTS: dict[str, dict[int, tuple[str, ...]]] = {
    "lenet5": _LENET,
    "cnn-torch": _LENET,
    "resnet18": _RESNET,
    "resnet18-narrow": _RESNET,
}


def cut(name: str, classifier: nn.Module, blocks: int) -> nn.Sequential:
    """Return a classifier of the zoo as a row of blocks and its last layer; its weights stay as they are.

    Args:
        name: Its architecture.
        classifier: The model; its layers become those of the result.
        blocks: K.

    Returns:
        A module [B, ch, H, W] -> [B, C] of the submodules ``0`` to ``K - 1`` and ``classifier``. The last block ends
        with features [B, F].

    Raises:
        OptionError: The architecture cannot be cut into so many blocks.
    """
    starts = CUTS.get(name, {}).get(blocks)
    if starts is None:
        allowed = "; ".join(f"{known} into {', '.join(map(str, cuts))}" for known, cuts in CUTS.items())
        raise OptionError(f"model {name!r} cannot be cut into {blocks} blocks (client.blocks): must be {allowed}")
    *layers, (_, last) = classifier.named_children()
    parts: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for layer, module in layers:
        if layer in starts:
            parts.append(OrderedDict())
        parts[-1][layer] = module
    parts[-1].setdefault("flatten", nn.Flatten())  # torchvision's forward pass flattens without a layer
    return chain(**{str(number): nn.Sequential(part) for number, part in enumerate(parts)}, classifier=last)


class FirstBlock(nn.Sequential):
    """The first block of a cut classifier: images [B, ch, H, W] -> maps [B, C_1, h, w].

    Args:
        whole: See :func:`cut`.

    Attributes:
        later: The blocks after it, and the classifier. Their weights are not its own.
    """

    def __init__(self, whole: nn.Sequential) -> None:
        first, *later = whole.children()
        super().__init__(OrderedDict(first.named_children()))
        self.later = tuple(later)
