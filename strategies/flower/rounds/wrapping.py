"""From a Flower strategy of somebody's project to the base of rounds whose model is changed between them.

What makes a strategy fit: it returns one model from a round's models, and starts the next round from the model that it
is handed then. What it keeps from round to round has to be known, for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedMedian,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from ...core.errors import OptionError
from ..one_shot import OneShot
from .base import Base
from .feddyn import FedDyn
from .fednova import FedNova
from .iterative import Iterative
from .scaffold import Scaffold
from .stc import Stc
from .surroundings import within

# What a strategy keeps from round to round; its copy of the last model is handed to it in every round.
REMEMBERS: tuple[tuple[type[Strategy], tuple[str, ...]], ...] = (
    (FedAvgM, ("momentum_vector",)),
    (FedAdagrad, ("m_t", "v_t")),
    (FedAdam, ("m_t", "v_t")),
    (FedYogi, ("m_t", "v_t")),
    (Scaffold, ("control",)),
    (FedDyn, ("mean_drift",)),
    (Stc, ("left",)),
)
# They step along an update, which running statistics are no part of.
STEPPING = (FedAvgM, FedAdagrad, FedAdam, FedYogi, QFedAvg, Scaffold, FedDyn, FedNova, Stc)
# They choose among the clients' values. Krum is a MultiKrum.
ROBUST = (FedMedian, FedTrimmedAvg, MultiKrum, Bulyan)

_TREES = "it returns trees, and a refinement fine-tunes the weights of one network"
_NOISE = (
    "it adds its noise to the combined model, on the server, and a refinement learns from each client's own model, "
    "which has none: what it promises would not hold. Allowed is noise on the clients (flwr.clientapp.mod.LocalDpMod)"
)
_LOOP = "it runs a server stage of its own. Allowed is the strategy that combines a round's models"
REFUSED: tuple[tuple[type[Strategy], str], ...] = (
    (FedXgbBagging, _TREES),
    (FedXgbCyclic, _TREES),
    (DifferentialPrivacyServerSideFixedClipping, _NOISE),
    (DifferentialPrivacyServerSideAdaptiveClipping, _NOISE),
    (DifferentialPrivacyClientSideFixedClipping, _NOISE),
    (DifferentialPrivacyClientSideAdaptiveClipping, _NOISE),
    (OneShot, _LOOP),
    (Iterative, _LOOP),
)
ALLOWED = "must be a strategy that returns one model from a round's models, as FedAvg(...) does"


def wrap(strategy: Any, remembers: Iterable[str] = ()) -> Base:
    """Return the base of rounds that a Flower strategy is.

    A subclass is taken for its parent, and a strategy around another one for both. FedAvg, FedProx and strategies of
    unknown classes see the whole model, as in Flower; those that choose among the clients' values (FedMedian,
    FedTrimmedAvg, Krum, MultiKrum, Bulyan) all but its counters; those that step along an update its trainable
    parameters. What a strategy has not seen is averaged beside it.

    Args:
        strategy: The strategy object.
        remembers: Further attributes that a resumed run needs, trees of arrays and numbers: what a subclass has added.
            A name with dots is an attribute's attribute.

    Raises:
        OptionError: It is no strategy, it cannot be refined, or it has no such attribute.
    """
    if not isinstance(strategy, Strategy):
        found = f"the class {strategy.__name__}" if isinstance(strategy, type) else f"a {type(strategy).__name__}"
        raise OptionError(f"base is {found}: {ALLOWED}")
    held = list(within(strategy))
    for _, each in held:
        for kind, reason in REFUSED:
            if isinstance(each, kind):
                raise OptionError(f"base is {_called(strategy, each)}, which cannot be refined: {reason}")
    if getattr(strategy, "fraction_train", 1.0) == 0.0:
        raise OptionError("base has fraction_train 0.0, so it trains nothing: must be a number above 0, to 1")
    known = [
        path + name for path, each in held for kind, names in REMEMBERS if isinstance(each, kind) for name in names
    ]
    for name in remembers:
        try:
            attrgetter(name)(strategy)
        except AttributeError as error:
            has = ", ".join(sorted(vars(strategy)))
            raise OptionError(
                f"remembers names {name!r}, but the strategy has no such attribute: it has {has}"
            ) from error
    return Base(
        strategy,
        remembers=tuple(dict.fromkeys([*known, *remembers])),
        samples=True,
        evaluates=True,
        sees=_sees([each for _, each in held]),
    )


def _sees(held: Iterable[Strategy]) -> str:
    kinds = list(held)
    if any(isinstance(each, STEPPING) for each in kinds):
        return "parameters"
    return "numbers" if any(isinstance(each, ROBUST) for each in kinds) else "everything"


def _called(strategy: Strategy, refused: Strategy) -> str:
    name = type(refused).__name__
    return name if strategy is refused else f"a {type(strategy).__name__} around {name}"
