"""Federated learning in rounds: in each the clients train the global model further, and the server combines the models.

Paper: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    https://arxiv.org/abs/1602.05629 (FedAvg); Reddi et al., Adaptive Federated Optimization, ICLR 2021,
    https://arxiv.org/abs/2003.00295 (FedAdam, FedYogi). The others are cited in algorithms.py, ternary.py
    and client/corrections.py. Read version: none anew. The settings follow the published code of FENS (Allouah et al.,
    NeurIPS 2024, https://arxiv.org/abs/2411.07182), which compares one-shot methods with federated learning in rounds.
    A refiner, any method that ends with one model, generalises FLBoost (flboost.py).
Symbols: eta -> server_lr; beta_1, beta_2, tau of FedAdam and FedYogi -> BETA1, BETA2, TAU; mu of FedProx -> mu;
    alpha of FedDyn -> dyn_alpha; p of STC -> stc_density; gamma of FedNova -> server_momentum; R -> rounds;
    C -> fraction.
Where: FedAvg, FedProx, FedAdam, FedYogi -> Flower's own strategies; FedNova, SCAFFOLD, FedDyn, STC ->
    algorithms.py; refiners -> refinement.py; the clients' half -> client/corrections.py.
Deviations: batch-normalisation buffers are averaged, without correction, server step or compression. SCAFFOLD and
    FedDyn average buffers and models without weights, the others by numbers of examples. Flower's FedAdam corrects the
    bias of its moments, Reddi et al.'s does not. STC weighs clients by their examples, and compresses the model's
    parameters as one vector. A local epoch is one pass over the data, so that clients of different sizes take different
    numbers of steps; SCAFFOLD's paper counts steps.
"""

from __future__ import annotations

from ...core.errors import OptionError
from ...core.options import config_class, option
from ...method import METHODS
from ...uploads.ternary import LEAST_DENSITY, VALUES

TITLES = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "stc": "FedAvg with STC",
}
# Each server's default learning rate; for strategies without a rate the average is the next model.
OWN_LR = {"fednova": 1.0, "scaffold": 1.0, "fedadam": 0.01, "fedyogi": 0.01}

# Decay of both moments and adaptivity of FedAdam and FedYogi, as Reddi et al. recommend and FENS's comparison uses.
BETA1 = 0.9
BETA2 = 0.99
TAU = 1e-3

# Methods that end with one model of the uploads' architecture and need neither clients nor labelled images.
REFINERS = (
    "flboost", "fed-gen", "dense", "co-boosting", "tally", "f-dafl", "f-adi", "feddf", "fedkd", "fed-et",
    "distill",
)  # fmt: skip


NAME = "iterative"  # in settings, beside the methods


@config_class("iterative")
class IterativeConfig:
    """Options of federated learning in rounds."""

    strategy: str = option(
        "fedavg", "rule that combines a round's models on the server", choices=tuple(TITLES), main=True
    )
    rounds: int = option(100, "rounds R", low=1, main=True)
    fraction: float = option(1.0, "share C of the connected clients that train in a round", above=0.0, high=1.0)
    server_lr: float = option(
        0.0,
        "learning rate eta of the server; 0: the strategy's default (0.01 for fedadam and fedyogi, else 1)",
        low=0.0,
    )
    server_momentum: float = option(
        0.0, "share gamma of the last round's step that is added to a round's, for fednova", low=0.0, high=1.0
    )
    mu: float = option(0.01, "weight mu of the proximal term, for fedprox", above=0.0)
    dyn_alpha: float = option(0.01, "weight alpha of the dynamic regulariser, for feddyn", above=0.0)
    stc_density: float = option(0.01, "share p of the entries that are sent, for stc", low=LEAST_DENSITY, high=1.0)
    stc_values: str = option(
        "ternary", "form of these entries, for stc: signs and one magnitude, or 16 bits each", choices=VALUES
    )
    lr_decay: float = option(1.0, "factor of the clients' learning rate from round to round", above=0.0)
    evaluate_every: int = option(1, "rounds between two tests on held-out data; the last round is always tested", low=1)
    checkpoint_every: int = option(1, "rounds between two checkpoints, from which a killed run resumes", low=1)
    refiner: str = option(
        "none", "method that fine-tunes the global model on the server in every round", choices=("none", *REFINERS)
    )

    def __post_init__(self) -> None:
        """Check every value, and the combination of server_lr and strategy."""
        if self.server_lr and self.strategy not in OWN_LR:
            raise OptionError(
                f"setting 'iterative.server-lr' is {self.server_lr} with 'iterative.strategy' {self.strategy!r}: "
                f"must be 0; only {', '.join(OWN_LR)} take a rate"
            )
        if self.server_momentum and self.strategy != "fednova":
            raise OptionError(
                f"setting 'iterative.server-momentum' is {self.server_momentum} with 'iterative.strategy' "
                f"{self.strategy!r}: must be 0; only fednova takes it"
            )

    @property
    def label(self) -> str:
        """The beginning of the rounds' log lines."""
        refiner = "" if self.refiner == "none" else f"{METHODS[self.refiner].title} over "
        return refiner + TITLES[self.strategy]

    @property
    def title(self) -> str:
        """The result's title in the result table."""
        return f"{self.label}, {self.rounds} rounds"


NEEDS_CLIENTS = "clients answer in every round, which stored uploads cannot"
