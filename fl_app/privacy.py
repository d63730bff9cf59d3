"""Differential privacy of a client's upload: its settings, and which training is possible under it.

Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, https://arxiv.org/abs/1607.00133 (DP-SGD).
Symbols: (epsilon, delta) -> epsilon, delta; C -> clip.
Where: the training -> client_app.training.private.
Deviations: none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fl_app.attacks import CLAIMING
from strategies.core.errors import OptionError
from strategies.core.options import Scalar, check, option

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]

# Setting -> its required value, and why.
WANTED: Mapping[str, tuple[Scalar, str]] = {
    "client.share-label-counts": (False, "the counts carry no noise"),
    "client.loss": ("cross-entropy", "the other losses use the label counts"),
    "client.sam-rho": (0.0, "its second gradient is not accounted for"),
    "features.moments": (False, "the sums of squares carry no noise"),
    "features.min-examples": (0, "one example more or less would decide whether an upload comes, which no noise hides"),
    "client.checkpoint": ("", "a checkpoint has no privacy guarantee"),
}

# Setting and value -> why a run with it cannot be private.
OUTSIDE: Mapping[tuple[str, str], str] = {
    ("data.name", "heart-disease"): "each row is standardised by the client's other rows, without noise",
    ("attack.kind", "copy"): "the copy is trained again, which spends the copied client's budget twice",
    ("attack.kind", "backdoor"): "one example more or less would exchange most of the images that get the trigger",
    **{("attack.kind", kind): "the claim is a multiple of the true counts, without noise" for kind in CLAIMING},
}


@dataclass(frozen=True)
class PrivacyConfig:
    """How much one example may change its client's upload, in one run."""

    # Above it, neighbouring noises differ by more than the tolerance of Opacus's search, which would never end.
    epsilon: float = option(0.0, "privacy budget epsilon of each client's examples; 0 = no privacy", low=0.0, high=1e6)
    delta: float = option(1e-5, "delta of the budget; less than 1 / examples of a client", above=0.0, high=0.1)
    total_epsilon: float = option(
        0.0, "largest epsilon of a client's uploads over all its runs, by its own ledger; 0 = any", low=0.0
    )
    clip: float = option(1.0, "largest norm of one example's gradient; replaces client.clip", above=0.0)

    def __post_init__(self) -> None:
        """Check every value."""
        check(self, "privacy")
        if 0 < self.total_epsilon < self.epsilon:
            raise OptionError(
                f"setting 'privacy.total-epsilon' is {self.total_epsilon:g}: must be 0, or at least 'privacy.epsilon', "
                f"{self.epsilon:g}"
            )

    @property
    def on(self) -> bool:
        """Whether clients train privately."""
        return self.epsilon > 0

    @property
    def noise(self) -> float:
        """The deviation of the noise that the budget demands of sums of features; 0 without a budget."""
        from strategies.statistics.privacy import noise_std  # late: it imports torch

        return noise_std(self.epsilon, self.delta)

    @property
    def mu(self) -> float:
        """Sensitivity over noise of the Gaussian mechanism that spends the budget on sums of features."""
        from strategies.statistics.privacy import noise_for  # late: it imports torch

        return 1.0 / noise_for(self.epsilon, self.delta)

    def check_settings(self, settings: Mapping[str, Scalar]) -> None:
        """Refuse settings with which an upload would reveal more than the budget permits.

        Args:
            settings: The app's, flat.

        Raises:
            OptionError: Names the setting, its value, the required value and why.
        """
        for key, (wanted, why) in WANTED.items() if self.on else ():
            if (value := settings[key]) != wanted:
                raise OptionError(
                    f"setting {key!r} is {value!r}: must be {wanted!r} with 'privacy.epsilon' {self.epsilon:g}; {why}"
                )
        for (key, value), why in OUTSIDE.items() if self.on else ():
            if settings[key] == value:
                raise OptionError(
                    f"setting {key!r} is {value!r}: must be another with 'privacy.epsilon' {self.epsilon:g}; {why}"
                )

    def described(self, *, sums: bool = False) -> str:
        """Return the guarantee in one line; empty without one.

        Args:
            sums: Whether clients upload sums of features, not models.
        """
        if not self.on:
            return ""
        if sums:
            return (
                f"each client's upload is ({self.epsilon:g}, {self.delta:g})-differentially private in its examples "
                "(Gaussian noise on sums of features, counts included)"
            )
        return (
            f"each client's upload is ({self.epsilon:g}, {self.delta:g})-differentially private in its examples "
            f"(DP-SGD, clip {self.clip:g}); its number of examples is public"
        )


def mixes_examples(model: nn.Module) -> bool:
    """Return whether a model has batch normalisation, which lets the examples of a batch affect each other."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return any(isinstance(module, _BatchNorm) for module in model.modules())


def check_architecture(name: str, num_classes: int, input_shape: Shape) -> None:
    """Refuse an architecture that cannot be trained privately.

    Args:
        name: Its key in the zoo.
        num_classes: C.
        input_shape: (ch, H, W).

    Raises:
        OptionError: Names the architecture, and the fitting ones.
    """
    import torch

    from fl_app.models import build, builders

    with torch.random.fork_rng(devices=[]):
        if not mixes_examples(build(name, num_classes=num_classes, input_shape=input_shape)):
            return
        fitting = [key for key, make in builders(num_classes, input_shape).items() if not mixes_examples(make())]
    raise OptionError(
        f"architecture {name!r} has batch normalisation, by which one example changes the gradients of others: must be "
        f"one of {', '.join(fitting)} with 'privacy.epsilon'"
    )
