"""FLBoost around the strategy of an existing Flower project: the server fine-tunes every round's model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
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
    Result,
    Strategy,
)

from ...core.errors import OptionError
from ...core.options import option
from ...uploads.builders import Model
from ..arguments import EvaluateFn
from ..one_shot import FLOWER_DEFAULT_ROUNDS, OneShot
from ..surroundings import NOISY, within
from .algorithms import FedDyn, FedNova, Scaffold, Stc
from .base import Base
from .config import REFINERS, IterativeConfig
from .iterative import DEADLINE_S, Iterative
from .refinement import Refiner

# Turns a Flower strategy of an existing project into the base of rounds whose model is changed between them.
#
# A strategy fits if it returns one model from a round's models, and starts the next round from the model that it then
# receives. Its state between rounds has to be known, for a checkpoint.


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
    *((kind, _NOISE) for kind in NOISY),
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
                around = "" if each is strategy else f"a {type(strategy).__name__} around "
                raise OptionError(f"base is {around}{type(each).__name__}, which cannot be refined: {reason}")
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


@dataclass(frozen=True)
class WrappedConfig(IterativeConfig):
    """Options of rounds by a given strategy object; ``strategy`` and its numbers have no effect."""

    base: str = option("FedAvg", "class of the strategy that combines a round's models")

    @property
    def label(self) -> str:
        """The beginning of the rounds' log lines."""
        return f"refined {self.base}"


class FLBoost(Iterative):
    """A Flower strategy around another one: the other asks the clients and combines their models, a refiner fine-tunes.

    ``start`` has Flower's signature and gives Flower's result, federated evaluation included. The run folder and resume
    are those of :class:`strategies.flower.rounds.iterative.Iterative`.

    Args:
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable.
        base: The strategy object; see :func:`strategies.flower.rounds.flboost.wrap` for those that fit.
        refiner: The method that fine-tunes, and its config; None for FLBoost with its defaults.
        remembers: Attributes of ``base`` that a resumed run needs, beside those of the library's and Flower's own
            strategies: the attributes that a subclass has added.
        min_uploads: The quorum of a round; None for the ``min_train_nodes`` of ``base``.
        checkpoint_every: Rounds between two checkpoints, at least 1.
        evaluate_every: Rounds between two evaluations, on the server and on the clients, at least 1; the last round is
            always evaluated.
        **settings: Those of :class:`strategies.flower.rounds.iterative.Iterative`. Required: ``num_classes`` and
            ``input_shape``. Optional: ``student``, ``normalization``, ``compute``, ``run_dir``, ``seed``, ``options``,
            ``proxy``, ``observer`` and ``facts``. Every draw of ``base`` follows from ``seed`` too.

    Raises:
        OptionError: An argument is out of its range, or ``base`` cannot be refined.
    """

    def __init__(
        self,
        model: Model,
        *,
        base: Strategy,
        refiner: Refiner | None = None,
        remembers: Iterable[str] = (),
        min_uploads: int | None = None,
        checkpoint_every: int = 1,
        evaluate_every: int = 1,
        **settings: Any,
    ) -> None:
        wrapped, refiner = wrap(base, remembers), refiner or Refiner.of("flboost")
        name = refiner.method.name
        config = WrappedConfig(
            rounds=FLOWER_DEFAULT_ROUNDS,
            base=type(base).__name__,
            refiner=name if name in REFINERS else "none",
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
        )
        quorum = max(1, getattr(base, "min_train_nodes", 2)) if min_uploads is None else min_uploads
        super().__init__(model, base=wrapped, refiner=refiner, config=config, min_uploads=quorum, **settings)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = FLOWER_DEFAULT_ROUNDS,
        timeout: float = DEADLINE_S,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds that the run folder lacks; Flower's signature, default and result.

        Args:
            grid: Flower's grid.
            initial_arrays: Weights before the first round; empty or None: derived from the seed.
            num_rounds: Rounds, at least 1.
            timeout: Seconds that the clients have for each round, and for each evaluation.
            train_config: Sent to the clients with every request to train.
            evaluate_config: Sent to the clients with every request for scores.
            evaluate_fn: Called for round 0, and every ``evaluate_every`` rounds with the refined model.

        Returns:
            Flower's result; its arrays are the last round's refined model.

        Raises:
            QuorumError: Too few clients are connected, or several rounds in a row gave no model.
            OptionError: The weights are not the model's, or the run began with other settings.
            OneShotError: The result of ``base`` is not a model.
            StoreError: The run folder cannot be used.
        """
        if not num_rounds:  # which an Iterative would take for the number in its config
            raise OptionError(f"num_rounds is {num_rounds!r}: must be a whole number at least 1")
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)
