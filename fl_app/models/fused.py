"""A frozen net in a faster form with the same features, to rounding of 1e-6.

Three changes take half of the CPU time of a mobile net off. Normalisations are folded into their convolutions. Padding,
for which a net copies each map, becomes the convolution's own. Activations are computed in place.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# The names under which the packaged net's blocks have a convolution and its normalisation.
PAIRS = (
    ("_conv_stem", "_bn0"), ("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"),
    ("_conv_head", "_bn1"),
)  # fmt: skip
ACTIVATION, PADDING = "_swish", "static_padding"


def fused(net: nn.Module) -> nn.Module:
    """Return a frozen net with the changes of this module, made in place; other nets stay as they are.

    Args:
        net: In eval mode.
    """
    for module in list(net.modules()):
        for conv, norm in PAIRS:
            if isinstance(getattr(module, norm, None), nn.BatchNorm2d) and hasattr(module, conv):
                folded = torch.nn.utils.fusion.fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm))
                setattr(module, conv, folded)
                setattr(module, norm, nn.Identity())
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d) and hasattr(child, PADDING):
                setattr(module, name, padded(child))
        if isinstance(getattr(module, ACTIVATION, None), nn.ReLU6):
            setattr(module, ACTIVATION, nn.ReLU6(inplace=True))
    return net


def padded(conv: nn.Conv2d) -> nn.Conv2d:
    """Return a convolution that pads its input itself.

    A padding that is one larger on the right and below becomes an even one. The kernel then grows by a row and a column
    of zeros on the left and above. With stride 2 and maps of an even side the places of the answer stay the same.

    Args:
        conv: With a submodule ``static_padding``: the identity, or zeros around its input.

    Raises:
        ValueError: The padding is neither even nor one larger on the right and below.
    """
    around = getattr(conv, PADDING)
    left, right, top, bottom = around.padding if isinstance(around, nn.ZeroPad2d) else (0, 0, 0, 0)
    grown = (right - left, bottom - top)
    if grown not in {(0, 0), (1, 1)}:
        raise ValueError(f"padding is {around.padding}: must be even, or one larger on the right and below")
    more = grown[0]
    weight = F.pad(conv.weight.detach(), (more, 0, more, 0))
    found = nn.Conv2d(
        conv.in_channels, conv.out_channels, (weight.shape[2], weight.shape[3]),
        stride=(conv.stride[0], conv.stride[1]), padding=(top + more, left + more), groups=conv.groups,
        bias=conv.bias is not None,
    )  # fmt: skip
    found.load_state_dict({**conv.state_dict(), "weight": weight})
    return found.requires_grad_(False).eval()
