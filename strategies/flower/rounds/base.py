"""The strategy under the rounds, Flower's own or ours, and the facts that the rounds need of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, FedYogi, Strategy

from ..surroundings import within
from .algorithms import FedDyn, FedNova, Scaffold, Stc
from .config import BETA1, BETA2, OWN_LR, TAU, IterativeConfig

# The rounds choose the clients: a strategy sees the nodes of the round only, and asks all of them.
EVERYONE: dict[str, Any] = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}


@dataclass(frozen=True)
class Base:
    """A Flower strategy, and the state of it that outlives the process.

    Attributes:
        strategy: Makes the requests of a round, and the next model.
        remembers: Names of its attributes that a resumed run needs: trees of arrays and numbers. A name with dots is an
            attribute's attribute.
        samples: It chooses among all connected clients, and waits for as many as it wants; else it asks all clients
            that the rounds show it.
        evaluates: The clients are asked for scores of their own, as the strategy is configured.
        sees: The arrays that it combines: ``"parameters"``, the trainable ones alone; ``"numbers"``, all floating-point
            arrays, buffers included; or ``"everything"``, of which whole numbers are still averaged beside it.
        begun: Copies of what it remembers, as it was given: a run that resumes nothing begins from these.
    """

    strategy: Strategy
    remembers: tuple[str, ...] = ()
    samples: bool = False
    evaluates: bool = False
    sees: str = "parameters"
    begun: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Copy what the strategy remembers."""
        begun = {name: copy.deepcopy(attrgetter(name)(self.strategy)) for name in self.remembers}
        object.__setattr__(self, "begun", begun)

    def begin_anew(self) -> None:
        """Give the strategy the state in which it was given; an earlier run may have left another one."""
        for name, value in self.begun.items():
            self.remember(name, copy.deepcopy(value))

    def remember(self, name: str, value: Any) -> None:
        """Set one of the attributes that a resumed run needs."""
        holder, _, attribute = name.rpartition(".")
        setattr(attrgetter(holder)(self.strategy) if holder else self.strategy, attribute, value)

    @property
    def asks_for_names(self) -> bool:
        """Whether it may choose some of the clients, which must then be the same in every run of a seed."""
        return self.samples and getattr(self.strategy, "fraction_train", 0.0) < 1.0

    @property
    def least(self) -> int:
        """The number of connected clients that it waits for before it asks."""
        wanted = [getattr(self.strategy, key, 1) for key in ("min_train_nodes", "min_available_nodes")]
        return max(1, *wanted)


def identify_strategy(base: Base) -> dict[str, Any]:
    """Return the identity of a strategy in plain values, which a resumed run must match.

    Returns:
        ``base``, its class, and ``base.<attribute>`` for each of its public numbers and texts.
    """
    facts: dict[str, Any] = {}
    for path, each in within(base.strategy):
        facts[f"base.{path}".rstrip(".")] = type(each).__name__
        plain = {key: value for key, value in vars(each).items() if isinstance(value, bool | int | float | str)}
        facts |= {f"base.{path}{key}": value for key, value in plain.items() if not key.startswith(("_", *_WAITING))}
    return facts


# The number of clients to wait for does not change the result that is computed from their answers.
_WAITING = ("min_available_nodes", "min_evaluate_nodes")


def configured_base(config: IterativeConfig) -> Base:
    """Return the configured strategy: Flower's own where Flower has it."""
    lr = config.server_lr or OWN_LR.get(config.strategy, 1.0)
    adaptive: dict[str, Any] = {
        "eta": lr, "beta_1": BETA1, "beta_2": BETA2, "tau": TAU, **EVERYONE,
    }  # fmt: skip
    moments = ("m_t", "v_t")
    if config.strategy == "fedprox":
        return Base(FedProx(proximal_mu=config.mu, **EVERYONE))
    if config.strategy == "fedadam":
        return Base(FedAdam(**adaptive), moments)
    if config.strategy == "fedyogi":
        return Base(FedYogi(**adaptive), moments)
    if config.strategy == "fednova":
        return Base(FedNova(server_lr=lr, server_momentum=config.server_momentum, **EVERYONE), ("velocity",))
    if config.strategy == "scaffold":
        return Base(Scaffold(server_lr=lr, **EVERYONE), ("control",))
    if config.strategy == "feddyn":
        return Base(FedDyn(alpha=config.dyn_alpha, **EVERYONE), ("mean_drift",))
    if config.strategy == "stc":
        return Base(Stc(density=config.stc_density, values=config.stc_values, **EVERYONE), ("left",))
    return Base(FedAvg(**EVERYONE))
