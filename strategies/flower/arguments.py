"""The checks of a strategy's plain arguments, before a client has worked, and of what a project's own code returns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from logging import INFO, WARNING
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from ..core.errors import OptionError
from ..core.places import expand_user
from ..core.seeds import derive_seed
from ..uploads.builders import check_shape
from .messages import EXAMPLES

POLL_S = 0.1  # between two looks at the connected nodes
Shape = tuple[int, int, int]
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
# Flower's steps, for callers that own the loop; start() has its own.
STEPS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


class FlowerArguments(TypedDict, total=False):
    """The arguments of Flower's FedAvg that a :class:`.one_shot.OneShot` takes by the same names.

    Attributes:
        fraction_train: Share of the nodes that are asked for an upload, in (0, 1].
        min_train_nodes: Nodes that are asked at least.
        min_evaluate_nodes: Nodes that evaluate at least, where ``fraction_evaluate`` is above 0.
        min_available_nodes: Nodes that must be connected before the first is asked.
        weighted_by_key: The metric in which clients report their number of training examples.
        arrayrecord_key: The name of the record of arrays in requests.
        configrecord_key: The name of the record of settings in requests.
        train_metrics_aggr_fn: ``(contents of the replies without arrays, weighted_by_key) -> metrics`` in place of the
            mean.
        evaluate_metrics_aggr_fn: The same for the clients' evaluation.
    """

    fraction_train: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Aggregate | None
    evaluate_metrics_aggr_fn: Aggregate | None


# Arguments of Flower's strategies, today's and those of before version 1.21, that have no place here -> what has.
ELSEWHERE = {
    "proximal_mu": "send it to the clients, train_config=ConfigRecord({'proximal-mu': ...}), whose loss has the term",
    "initial_parameters": "pass initial_arrays to start()",
    "on_fit_config_fn": "pass train_config to start()",
    "on_evaluate_config_fn": "pass evaluate_config to start()",
    "evaluate_fn": "pass it to start()",
    "fit_metrics_aggregation_fn": "it is train_metrics_aggr_fn in Flower's message API",
    "evaluate_metrics_aggregation_fn": "it is evaluate_metrics_aggr_fn in Flower's message API",
    "fraction_fit": "it is fraction_train in Flower's message API",
    "min_fit_clients": "it is min_train_nodes in Flower's message API",
    "min_evaluate_clients": "it is min_evaluate_nodes in Flower's message API",
    "min_available_clients": "it is min_available_nodes in Flower's message API",
    "accept_failures": "min_uploads is the number of clients that must succeed",
    **dict.fromkeys(
        ("server_learning_rate", "server_momentum", "eta", "eta_l", "beta_1", "beta_2", "tau", "client_learning_rate"),
        "one round has no server optimizer; FLBoost(base=FedAvgM(...)) keeps your strategy and its rounds",
    ),
    **dict.fromkeys(
        ("num_malicious_nodes", "num_nodes_to_select", "beta", "q"),
        "options=RunOptions(gatekeeper=GatekeeperConfig(policy='exclude')) leaves harmful uploads out",
    ),
}


@dataclass(frozen=True)
class Participation:
    """Which nodes a round asks, in which form, and how the numbers of their answers are combined.

    The fields are those of :class:`FlowerArguments`; None: as many nodes as there are.
    """

    fraction_train: float = 1.0
    min_train_nodes: int | None = None
    min_evaluate_nodes: int = 1
    min_available_nodes: int | None = None
    weighted_by_key: str = EXAMPLES
    arrayrecord_key: str = "arrays"
    configrecord_key: str = "config"
    train_metrics_aggr_fn: Aggregate | None = None
    evaluate_metrics_aggr_fn: Aggregate | None = None

    @classmethod
    def read(cls, strategy: str, given: Mapping[str, Any]) -> Participation:
        """Check the arguments of Flower's strategies.

        Raises:
            OptionError: One is unknown or out of its range.
        """
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                refuse_argument(strategy, name)
        found = cls(**given)
        if not (isinstance(found.fraction_train, int | float) and 0.0 < found.fraction_train <= 1.0):
            raise OptionError(f"{strategy}: fraction_train is {found.fraction_train!r}: must be above 0 and at most 1")
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            value = getattr(found, name)
            if value is not None and not (isinstance(value, Integral) and value >= 0):  # type: ignore[operator]
                raise OptionError(f"{strategy}: {name} is {value!r}: must be a whole number at least 0")
        for name in ("weighted_by_key", "arrayrecord_key", "configrecord_key"):
            if not (isinstance(value := getattr(found, name), str) and value):
                raise OptionError(f"{strategy}: {name} is {value!r}: must be a name")
        for name in ("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"):
            if not ((value := getattr(found, name)) is None or callable(value)):
                raise OptionError(f"{strategy}: {name} is {value!r}: must be a function of the replies and the weight")
        return found

    @property
    def least(self) -> int:
        """The number of nodes that must be connected before the first is asked."""
        share = 2 if self.min_train_nodes is None and self.fraction_train < 1.0 else self.min_train_nodes or 1
        return max(self.min_available_nodes or 1, share)

    def choose(self, grid: Grid, seed: int, server_round: int) -> list[int]:
        """Return the nodes that a round asks, in the order of their ids; waits for as many as must be connected."""
        while len(nodes := sorted(grid.get_node_ids())) < self.least:
            time.sleep(POLL_S)
        if self.fraction_train == 1.0:
            return nodes
        return sorted(self.draw(nodes, seed, server_round))

    def draw(self, nodes: Sequence[int], seed: int, server_round: int) -> list[int]:
        """Draw the share of these nodes that a round asks."""
        drawn = random.Random(derive_seed(seed, "train-nodes", server_round))
        chosen = drawn.sample(nodes, self.sample_size(len(nodes)))
        log(INFO, "fraction_train: %d of %d nodes are asked", len(chosen), len(nodes))
        return chosen

    def sample_size(self, connected: int) -> int:
        """Return how many of the connected nodes are asked, as Flower's FedAvg reckons it."""
        least = 2 if self.min_train_nodes is None else self.min_train_nodes
        return min(connected, max(int(connected * self.fraction_train), least))


def refuse_argument(strategy: str, name: str, elsewhere: str = "") -> NoReturn:
    """Refuse an argument that a strategy does not take.

    Args:
        elsewhere: What takes its place; empty for what :data:`ELSEWHERE` says.

    Raises:
        OptionError: Always.
    """
    hint = elsewhere or ELSEWHERE.get(name, "help() of the class lists what it takes")
    raise OptionError(f"{strategy} does not take {name!r}: {hint}")


def choose_task(
    strategy: str, num_classes: int | None, input_shape: tuple[int, ...] | None, *, needed: bool
) -> tuple[int, tuple[int, ...]]:
    """Return the number of classes and the shape of an example; 0 and (1, 1, 1) where they may be missing and are.

    Args:
        strategy: The name of the class that they were given to.
        num_classes: C, or None.
        input_shape: The shape, or None.
        needed: Whether the method uses the models' outputs; an average of weights needs neither.

    Raises:
        OptionError: One is missing and needed.
    """
    if needed and (num_classes is None or input_shape is None):
        raise OptionError(
            f"{strategy} needs num_classes and input_shape, as in {strategy}(Net, num_classes=10, input_shape=(3, 32, "
            "32)); rows are (F, 1, 1), and texts are (1, 1, L)"
        )
    return 0 if num_classes is None else num_classes, (1, 1, 1) if input_shape is None else input_shape


def check_arguments(input_shape: Any, *, seed: Any, min_uploads: Any, fraction_evaluate: Any = 0.0) -> Shape:
    """Refuse arguments of a strategy that are out of their range.

    Args:
        input_shape: Three whole numbers above 0.
        seed: A whole number.
        min_uploads: A whole number, at least 1.
        fraction_evaluate: From 0 to 1.

    Raises:
        OptionError: One of them is out of its range.
    """
    shape = check_shape(input_shape)
    if not isinstance(seed, Integral):
        raise OptionError(f"seed is {seed!r}: must be a whole number")
    if not isinstance(min_uploads, Integral) or not min_uploads >= 1:  # type: ignore[operator]
        raise OptionError(f"min_uploads is {min_uploads!r}: must be a whole number at least 1")
    if not isinstance(fraction_evaluate, int | float) or not 0.0 <= fraction_evaluate <= 1.0:
        raise OptionError(f"fraction_evaluate is {fraction_evaluate!r}: must be a number from 0 to 1")
    return shape


def check_start(strategy: Strategy, own: type[Strategy], timeout: Any, arrays: Any) -> None:
    """Check the deadline and the arrays of ``start()``, and warn about overridden steps that it never calls.

    Args:
        own: The class whose ``start()`` it is.
        timeout: Seconds, at least 0.
        arrays: A record, or None.

    Raises:
        OptionError: The deadline is no such number, or the arrays are no record.
    """
    if not isinstance(timeout, int | float) or not timeout >= 0:
        raise OptionError(f"timeout is {timeout!r}: must be a number of seconds, at least 0")
    if not isinstance(arrays, ArrayRecord | None):
        raise OptionError(
            f"initial_arrays is {type(arrays).__name__}: must be ArrayRecord(model.state_dict()), or None"
        )
    if changed := [step for step in STEPS if getattr(type(strategy), step) is not getattr(own, step)]:
        line = "%s overrides %s, which start() does not call: use observer or evaluate_fn, or a loop of your own"
        log(WARNING, line, type(strategy).__name__, ", ".join(changed))


def absolute(run_dir: str | Path | None) -> Path | None:
    """Return a run folder as it is meant now, wherever the process goes later; None for none.

    Raises:
        OptionError: It is no path.
    """
    if not isinstance(run_dir, str | Path | None):
        raise OptionError(f"run_dir is {run_dir!r:.80}: must be the path of a folder, or None for a new one")
    return expand_user(run_dir).absolute() if run_dir else None


def keep_plain_scores(evaluate_fn: EvaluateFn | None) -> EvaluateFn | None:
    """Return a project's own function as one whose scores a run can keep, see :func:`scores_by_name`; None for none."""
    if evaluate_fn is None:
        return None

    def scored(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return kept_scores("evaluate_fn", evaluate_fn(server_round, arrays))

    return scored


def kept_scores(what: str, found: Any) -> MetricRecord | None:
    """Return the scores that a project's own function returned; None if it returned none, see :func:`scores_by_name`.

    Numbers of numpy and torch become Python's, and their rows lists, as a checkpoint holds them.
    """
    if found is None:
        return None
    return scores_by_name(what, found, lambda value: value.tolist() if hasattr(value, "tolist") else value) or None


def scores_by_name(what: str, found: Any, read: Callable[[Any], Any] = float) -> MetricRecord:
    """Return the scores that a project's own function returned; none, and a warning, if they are not by name.

    The result of a run matters more than its scores.
    """
    try:
        return MetricRecord({key: read(value) for key, value in found.items()})
    except (AttributeError, RuntimeError, TypeError, ValueError):
        line = "%s returned %s: must be names with numbers, such as {'accuracy': 93.0}; they are left out"
        log(WARNING, line, what, " ".join(repr(found).split())[:80])
        return MetricRecord()
