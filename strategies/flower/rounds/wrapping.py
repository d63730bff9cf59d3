"""Turns a Flower strategy of an existing project into the base of rounds whose model is changed between them.

A strategy fits if it returns one model from a round's models, and starts the next round from the model that it then
receives. Its state between rounds has to be known, for a checkpoint.
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
from ..surroundings import within
from .base import Base
from .feddyn import FedDyn
from .fednova import FedNova
from .iterative import Iterative
from .scaffold import Scaffold
from .stc import Stc

# The state of a strategy between rounds; its copy of the last model is passed to it in every round.
REMEMBERS: tuple[tuple[type[Strategy], tuple[str, ...]], ...] = (
    (FedAvgM, ("momentum_vector",)),
    (FedAdagrad, ("m_t", "v_t")),
    (FedAdam, ("m_t", "v_t")),
    (FedYogi, ("m_t", "v_t")),
    (Scaffold, ("control",)),
    (FedDyn, ("mean_drift",)),
    (FedNova, ("velocity",)),
    (Stc, ("left",)),
)
# They step along an update, and running statistics are not part of an update.
STEPPING = (FedAvgM, FedAdagrad, FedAdam, FedYogi, QFedAvg, Scaffold, FedDyn, FedNova, Stc)
# They choose among the clients' values. Krum is a MultiKrum.
ROBUST = (FedMedian, FedTrimmedAvg, MultiKrum, Bulyan)

_TREES = "it returns trees, and a refinement fine-tunes the weights of one network"
_NOISE = (
    "it adds its noise to the combined model, on the server, and a refinement learns from each client's own model, "
    "which has none: its privacy guarantee would not hold. Must be noise on the clients (flwr.clientapp.mod.LocalDpMod)"
)
_LOOP = "it runs a server stage of its own. Must be the strategy that combines a round's models"
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
    """Return a Flower strategy as the base of rounds.

    A subclass counts as its parent, and a strategy around another one as both. FedAvg, FedProx and strategies of
    unknown classes see the whole model, as in Flower. Those that choose among the clients' values (FedMedian,
    FedTrimmedAvg, Krum, MultiKrum, Bulyan) see everything except its counters. Those that step along an update see its
    trainable parameters. The arrays that a strategy does not see are averaged beside it.

    Args:
        strategy: The strategy object.
        remembers: Further attributes that a resumed run needs, trees of arrays and numbers, for example those that a
            subclass has added. A name with dots is an attribute's attribute.

    Raises:
        OptionError: The argument is not a strategy, cannot be refined, or has no such attribute.
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
