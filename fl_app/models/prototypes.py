"""A classifier of the zoo whose last layer is replaced by prototypes of the classes.

FAFI (Zeng et al., ICML 2025) calls the rest an encoder: of ResNet-18 it has F = 512 features, of LeNet-5 84.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import penultimate


class PrototypeNet(nn.Module):
    """Maps images to ``v . P_c`` and the features e, with ``v = e / ||e||``: [B, ch, H, W] -> [B, C + F].

    Args:
        classifier: Ends with a linear layer, which is replaced.
        num_classes: C.

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
