"""A second backbone of random weights, for head+other_backbone:make beside that of tiny_backbone."""

from torch import nn

from fl_app.models.backbones import Backbone


def make() -> Backbone:
    return Backbone("other", 64, lambda: nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), _Pairs()), side=8)


class _Pairs(nn.Module):
    """Products of neighbouring places."""

    def forward(self, flat):  # type: ignore[no-untyped-def]
        """Map [B, 48] to [B, 64]."""
        own = flat[:, :16] + 1.1
        return own[:, :, None].mul(own[:, None, :4]).flatten(1)
