"""A conditional variational autoencoder of images, whose decoder FedCVAE-Ens uploads.

Heinbaugh, Luz-Ricca, Shao, Data-Free One-Shot Federated Learning Under Very High Statistical Heterogeneity, ICLR 2023,
in the sizes that FENS (Allouah et al., NeurIPS 2024) compares with. Only the decoder gets the label, the encoder does
not. Sides are 16 or 32 pixels, which four halvings reduce to 1 or 2; the paper pads smaller images to 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from strategies.core.errors import OptionError

from . import chain

SIDES = (16, 32)
WIDTHS = (32, 32, 64, 64)  # of the encoder's convolutions; the decoder has them in reverse
HIDDEN = 500


class Decoder(nn.Module):
    """From noise and a label to an image.

    Args:
        num_classes: C.
        input_shape: (channels, height, width) of one image.
        latent: d, the length of the noise.

    Attributes:
        latent: d.

    Raises:
        OptionError: The images have another size.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int], *, latent: int) -> None:
        super().__init__()
        channels, side = _sizes(input_shape)
        self.latent, self._num_classes = latent, num_classes
        widths = (*WIDTHS[-2::-1], channels)
        layers: list[nn.Module] = []
        for width_in, width_out in zip((WIDTHS[-1], *widths), widths, strict=False):
            layers += [nn.ConvTranspose2d(width_in, width_out, 4, stride=2, padding=1)]
            layers += [nn.BatchNorm2d(width_out, eps=1e-3), nn.ReLU(inplace=True)]
        self.fc = chain(
            linear=nn.Linear(latent + num_classes, WIDTHS[-1] * side * side),
            relu=nn.ReLU(inplace=True),
            unflatten=nn.Unflatten(1, (WIDTHS[-1], side, side)),
        )
        self.layers = nn.Sequential(*layers[:-2])  # pixels get no normalisation and no ReLU

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Map noise [B, d] and labels [B] to the logits of pixels [B, channels, H, W]; pixels are their sigmoid."""
        condition = F.one_hot(labels, self._num_classes).to(noise.dtype)
        pixels: torch.Tensor = self.layers(self.fc(torch.cat([noise, condition], dim=1)))
        return pixels


class Cvae(nn.Module):
    """Encoder and decoder.

    Args:
        num_classes: C.
        input_shape: (channels, height, width) of one image.
        latent: d, the length of the noise.

    Raises:
        OptionError: The images have another size.
    """

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int], *, latent: int) -> None:
        super().__init__()
        channels, side = _sizes(input_shape)
        layers: list[nn.Module] = []
        for width_in, width_out in zip((channels, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Conv2d(width_in, width_out, 4, stride=2, padding=1)]
            layers += [nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]
        self.encoder = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(WIDTHS[-1] * side * side, HIDDEN), nn.Linear(HIDDEN, 2 * latent)
        )
        self.decoder = Decoder(num_classes, input_shape, latent=latent)

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encode and decode.

        Args:
            images: Pixels x in [0, 1] [B, channels, H, W].
            labels: y [B].
            noise: Drawn from N(0, 1) [B, d].

        Returns:
            The logits of the pixels at ``z = mu + sigma * noise`` [B, channels, H, W], and the posterior's mu and
            log sigma^2 [B, d].
        """
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        return self.decoder(mean + (log_variance / 2).exp() * noise, labels), mean, log_variance


def _sizes(input_shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return the number of channels, and the side of the smallest map."""
    channels, height, width = input_shape
    if channels not in (1, 3) or height != width or height not in SIDES:
        raise OptionError(
            f"a CVAE cannot take examples of shape {tuple(input_shape)}: must be images, (channels, height, width) "
            f"with 1 or 3 channels, height = width, and {' or '.join(map(str, SIDES))} pixels a side"
        )
    return channels, height // 2 ** len(WIDTHS)
