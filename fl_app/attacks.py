"""Simulated attackers, for research on robustness: which clients misbehave in a run, and how.

Sources: the backdoor is BadNets' pattern of bright pixels. Gu, Dolan-Gavitt, Garg, BadNets: Identifying
    Vulnerabilities in the Machine Learning Model Supply Chain, 2017, https://arxiv.org/abs/1708.06733.
    Training on flipped labels is the data poisoning of Tolpegin, Truex, Gursoy, Liu, Data Poisoning Attacks Against
    Federated Learning Systems, ESORICS 2020, https://arxiv.org/abs/2007.08432.
Symbols: C -> num_classes; y -> a label.
Where: the trigger -> triggered; y -> (C - 1) - y and the poisoned share -> client_app.attacking.
Deviations: Tolpegin et al. flip one class into another; here every label y becomes (C - 1) - y, which aims at no class.
    BadNets adds poisoned copies to the training set; here they replace their originals, so the number of examples
    stays the same. The paper leaves the pattern open: here it is a white square in the lower right corner. Its side is
    an eighth of the image's, and at least 3 pixels.

:data:`KINDS` describes the upload of each kind. An attacker reports the number of examples and the label counts of its
true data, except for the kinds in :data:`CLAIMING`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from strategies.core.errors import OptionError
from strategies.core.options import config_class, listed, option

if TYPE_CHECKING:
    import torch

# Kind -> the upload of an attacker.
KINDS: Mapping[str, str] = {
    "none": "its trained model",
    "random": "weights drawn anew, by a seed of their own, and trained on nothing",
    "label-flip": "a model trained on labels y -> (C - 1) - y",
    "scale": "an honestly trained model whose weights, and buffers of real numbers, are multiplied by attack.factor",
    "last-layer": "an honestly trained model whose last linear layer is multiplied by attack.factor",
    "claim": "an honestly trained model, with attack.factor times the examples of every class that it has",
    "claim-uniform": "an honestly trained model, with attack.factor times its examples, as many of every class",
    "copy": "the upload of the next client, in order, that is no attacker, bit for bit, under its own name and facts",
    "backdoor": "a model trained on images of which a share bears a trigger and the label attack.target",
}
# These kinds report false numbers of examples, with an honest model.
CLAIMING = ("claim", "claim-uniform")
LARGEST_CLAIM = 1e6  # times the true number of examples; a message holds no whole number beyond 2^63
# These kinds change the examples and not the training, so they work with every kind of training.
POISONING = ("label-flip", "backdoor")
POISONED = 0.3  # of an attacker's training images get the trigger of a backdoor

SHARE_OF_SIDE = 8
SMALLEST = 3
WHITE = 255


@config_class("attack")
class AttackConfig:
    """The simulated attackers and their attacks; each client looks for its own name."""

    kind: str = option(
        "none",
        "attack of the clients in attack.clients, in place of honest uploads",
        choices=tuple(KINDS),
        never_private={
            "copy": "the copy is trained again, which spends the copied client's budget twice",
            "backdoor": "one example more or less would exchange most of the images that get the trigger",
            **dict.fromkeys(CLAIMING, "the claim is a multiple of the true counts, without noise"),
        },
    )
    clients: str = option("", "comma-separated names of the clients that are simulated attackers")
    factor: float = option(10.0, "factor of the weights (scale, last-layer) or of the claimed numbers (claim kinds)")
    target: int = option(0, "backdoor: the label of images with the trigger", low=0)

    def __post_init__(self) -> None:
        """Check every value, and the combinations of values."""
        if self.kind != "none" and not self.names():
            raise OptionError(
                f"setting 'attack.kind' is {self.kind!r} and 'attack.clients' {self.clients!r}: must name clients, "
                "separated by commas"
            )
        if self.kind in CLAIMING and not 0 < self.factor <= LARGEST_CLAIM:
            raise OptionError(
                f"setting 'attack.factor' is {self.factor:g}: must be a number greater than 0 and at most "
                f"{LARGEST_CLAIM:g} with 'attack.kind' {self.kind!r}"
            )
        if self.kind == "none" and self.clients:
            raise OptionError(
                f"setting 'attack.clients' is {self.clients!r} and 'attack.kind' 'none': must be '', or set "
                f"'attack.kind' to one of {', '.join(kind for kind in KINDS if kind != 'none')}"
            )

    def names(self) -> tuple[str, ...]:
        """Return the attackers' names, each once."""
        return tuple(dict.fromkeys(listed(self.clients)))

    def of(self, client: str) -> str:
        """Return the attack of one client, a key of :data:`KINDS`; ``"none"`` for an honest one."""
        return self.kind if client in self.names() else "none"

    def described(self) -> str:
        """Return the attack in a few words; empty without one."""
        details = {
            **dict.fromkeys(("scale", "last-layer", *CLAIMING), f", factor {self.factor:g}"),
            "backdoor": f", target {self.target}, {100 * POISONED:g} % of the images",
        }
        return "" if self.kind == "none" else f"{self.kind}{details.get(self.kind, '')}, by {', '.join(self.names())}"

    def check_classes(self, num_classes: int) -> None:
        """Refuse a target that is no class.

        Raises:
            OptionError: Names the setting, its value and the range.
        """
        if self.kind == "backdoor" and self.target >= num_classes:
            raise OptionError(f"setting 'attack.target' is {self.target}: must be 0 to {num_classes - 1}")

    def check_clients(self, known: Sequence[str]) -> None:
        """Refuse attackers that are no clients of the simulation.

        Raises:
            OptionError: A name is unknown, or no honest client is left to copy.
        """
        strangers = [name for name in self.names() if name not in known]
        if strangers:
            raise OptionError(
                f"setting 'attack.clients' names {', '.join(strangers)}: must be clients of this simulation, "
                f"{known[0]} to {known[-1]}"
            )
        if self.kind == "copy" and set(known) <= set(self.names()):
            raise OptionError(
                f"setting 'attack.clients' is {self.clients!r}: 'attack.kind' 'copy' must leave at least one honest "
                "client, whose upload is copied"
            )


def triggered(images: torch.Tensor) -> torch.Tensor:
    """Return images with the trigger, a white square in the lower right corner, of the same shape and type.

    Args:
        images: [N, ch, H, W], uint8 or float in [0, 1]; left unchanged.
    """
    side = max(SMALLEST, images.shape[-1] // SHARE_OF_SIDE)
    marked = images.clone()
    marked[..., -side:, -side:] = 1.0 if images.is_floating_point() else WHITE
    return marked
