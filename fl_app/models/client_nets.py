"""Nets that the clients of some methods train in place of a plain classifier.

FedCVAE-Ens has a conditional variational autoencoder, whose decoder it uploads; FAFI an encoder with prototypes; FuseFL
a classifier cut into blocks.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_app.models import chain, penultimate
from strategies.core.errors import OptionError

# A conditional variational autoencoder of images, whose decoder FedCVAE-Ens uploads.
#
# Heinbaugh, Luz-Ricca, Shao, Data-Free One-Shot Federated Learning Under Very High Statistical Heterogeneity, ICLR
# 2023, in the sizes that FENS (Allouah et al., NeurIPS 2024) compares with. Only the decoder gets the label, the
# encoder does not. Sides are 16 or 32 pixels, which four halvings reduce to 1 or 2; the paper pads smaller images.

SIDES = (16, 32)
WIDTHS = (32, 32, 64, 64)  # of the encoder's convolutions; the decoder has them in reverse
HIDDEN = 500


class Decoder(nn.Module):
    """From noise and a label to an image.

    Args:
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


# A classifier of the zoo whose last layer is replaced by prototypes of the classes.
#
# FAFI (Zeng et al., ICML 2025) calls the rest an encoder: of ResNet-18 it has F = 512 features, of LeNet-5 84.


class PrototypeNet(nn.Module):
    """Maps images to ``v . P_c`` and the features e, with ``v = e / ||e||``: [B, ch, H, W] -> [B, C + F].

    Args:
        classifier: Ends with a linear layer, which is replaced.

    Raises:
        OptionError: The classifier has no linear layer.
    """

    def __init__(self, classifier: nn.Module, num_classes: int) -> None:
        super().__init__()
        last = penultimate(classifier)
        # The model may call it by another of its names than the first.
        named = [name for name, module in classifier.named_modules(remove_duplicate=False) if module is last]
        for name in named:
            classifier.set_submodule(name, nn.Identity())
        self.encoder = classifier
        self.prototypes = nn.Parameter(torch.empty(num_classes, last.in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the prototypes from N(0, 1), by torch's global generator."""
        nn.init.normal_(self.prototypes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, then features [B, C + F]."""
        features = self.encoder(images)
        return torch.cat([F.normalize(features, dim=1) @ self.prototypes.T, features], dim=1)


# Classifiers cut into blocks, which FuseFL's clients train and send one by one (Tang et al., NeurIPS 2024).

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

    Attributes:
        later: The blocks after it, and the classifier. Their weights are not its own.
    """

    def __init__(self, whole: nn.Sequential) -> None:
        first, *later = whole.children()
        super().__init__(OrderedDict(first.named_children()))
        self.later = tuple(later)
