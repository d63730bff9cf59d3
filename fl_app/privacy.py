"""Differential privacy of what a client sends: its settings, and what can be trained under it.

Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, https://arxiv.org/abs/1607.00133 (DP-SGD).
Symbols: (epsilon, delta) -> epsilon, delta; C -> clip.
Where: the training -> client_app.private_training.
Deviations: none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strategies.core.errors import OptionError
from strategies.core.options import Scalar, check, option

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]

# Setting -> the value that it must have, and why.
WANTED: Mapping[str, tuple[Scalar, str]] = {
    "client.share-label-counts": (False, "they are counted without noise"),
    "client.loss": ("cross-entropy", "another loss looks at the label counts"),
    "client.sam-rho": (0.0, "its second gradient is not accounted for"),
    "client.checkpoint": ("", "nobody knows what a checkpoint tells"),
}

# Setting and value -> why a run with it cannot be private.
OUTSIDE: Mapping[tuple[str, str], str] = {
    ("data.name", "heart-disease"): "each row is standardised by the client's other rows, without noise",
    ("attack.kind", "copy"): "a copy is trained anew, and spends the copied client's budget twice",
}


@dataclass(frozen=True)
class PrivacyConfig:
    """How much one example may change what its client sends, in one run."""

    epsilon: float = option(0.0, "budget of differential privacy of a client's examples; 0 = no privacy", low=0.0)
    delta: float = option(1e-5, "delta of the budget; less than 1 / examples of a client", above=0.0, high=0.1)
    clip: float = option(1.0, "largest norm of one example's gradient; takes the place of client.clip", above=0.0)

    def __post_init__(self) -> None:
        """Check every value."""
        check(self, "privacy")

    @property
    def on(self) -> bool:
        """Whether clients train privately."""
        return self.epsilon > 0

    def check_settings(self, settings: Mapping[str, Scalar]) -> None:
        """Refuse settings by which an upload would tell more than the budget allows.

        Args:
            settings: The app's, flat.

        Raises:
            OptionError: Names the setting, its value, what is allowed and why.
        """
        for key, (wanted, why) in WANTED.items() if self.on else ():
            if (value := settings[key]) != wanted:
                raise OptionError(
                    f"setting {key!r} is {value!r}: allowed with 'privacy.epsilon' {self.epsilon:g} is {wanted!r}; "
                    f"{why}"
                )
        for (key, value), why in OUTSIDE.items() if self.on else ():
            if settings[key] == value:
                raise OptionError(
                    f"setting {key!r} is {value!r}: allowed with 'privacy.epsilon' {self.epsilon:g} is another; {why}"
                )

    def described(self) -> str:
        """Return the guarantee in one line; empty without one."""
        if not self.on:
            return ""
        return (
            f"each client's upload is ({self.epsilon:g}, {self.delta:g})-differentially private in its examples "
            f"(DP-SGD, clip {self.clip:g}); its number of examples is public"
        )


def mixes_examples(model: nn.Module) -> bool:
    """Say whether a model has batch normalisation, by which examples of one batch see each other."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in model.modules())


def check_architecture(name: str, num_classes: int, input_shape: Shape) -> None:
    """Refuse an architecture that cannot be trained privately.

    Args:
        name: Its key in the zoo.
        num_classes: C.
        input_shape: (ch, H, W).

    Raises:
        OptionError: Names it, and those that fit.
    """
    import torch

    from fl_app.models import build, builders

    with torch.random.fork_rng(devices=[]):
        if not mixes_examples(build(name, num_classes=num_classes, input_shape=input_shape)):
            return
        fitting = [key for key, make in builders(num_classes, input_shape).items() if not mixes_examples(make())]
    raise OptionError(
        f"architecture {name!r} has batch normalisation, by which one example changes the gradients of others: allowed "
        f"with 'privacy.epsilon' are {', '.join(fitting)}"
    )
