"""Differential privacy of a client's upload: its settings, and which training is possible under it.

Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, https://arxiv.org/abs/1607.00133 (DP-SGD).
Symbols: (epsilon, delta) -> epsilon, delta; C -> clip.
Where: the training -> client_app.training.private.
Deviations: none here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strategies.core.errors import OptionError
from strategies.core.options import Option, config_class, option

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, int, int]


@config_class("privacy")
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

    def check_options(self, options: Sequence[Option]) -> None:
        """Refuse settings with which an upload would reveal more than the budget permits.

        Raises:
            OptionError: Names the setting, its value, the required value and why.
        """
        for entry in options if self.on else ():
            value, required = entry.default, entry.rules.get("private")
            found = f"setting {entry.key!r} is {value!r}: must be"
            if required is not None and value != required[0]:
                raise OptionError(f"{found} {required[0]!r} with 'privacy.epsilon' {self.epsilon:g}; {required[1]}")
            if value in (never := entry.rules.get("never_private", {})):
                raise OptionError(f"{found} another with 'privacy.epsilon' {self.epsilon:g}; {never[value]}")

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

    Raises:
        OptionError: Names the architecture, and the fitting ones.
    """
    import torch

    from fl_app.models import build, builders

    with torch.random.fork_rng(devices=[]):
        if not mixes_examples(build(name, num_classes=num_classes, input_shape=input_shape)):
            return
    with torch.device("meta"):  # only their layers count
        fitting = [key for key, make in builders(num_classes, input_shape).items() if not mixes_examples(make())]
    raise OptionError(
        f"architecture {name!r} has batch normalisation, by which one example changes the gradients of others: must be "
        f"one of {', '.join(fitting)} with 'privacy.epsilon'"
    )
