"""The model of a run in rounds: a Flower strategy moves its parameters, its buffers are averaged here.

So a strategy that steps along an update (FedAdam) never steps along running variances or counters, whichever it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from typing import TYPE_CHECKING, Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, FedYogi, Strategy

from ..distillation.average import weighted_mean
from ..errors import OneShotError, UploadError
from ..iterative import OWN_LR
from ..seeds import seeded_torch
from .fednova import FedNova
from .messages import Reply
from .scaffold import Scaffold
from .stc import Stc

if TYPE_CHECKING:
    from ..iterative import IterativeConfig
    from ..method import Job, State

# Whom to ask is not the strategy's affair here: it is shown the nodes of the round, and asks all of them.
EVERYONE: dict[str, Any] = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}


@dataclass(frozen=True)
class Base:
    """A Flower strategy and what of it has to outlive the process.

    Attributes:
        strategy: It is asked for the requests of a round, and for the next model.
        remembers: Names of its attributes that a resumed run needs: trees of arrays and numbers.
    """

    strategy: Strategy
    remembers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answered:
    """One checked answer of a round.

    Attributes:
        client: The client's name.
        message: The reply.
        content: Its content, with what a strategy's own check has made of it.
        reply: What is known to be true of it.
    """

    client: str
    message: Message
    content: RecordDict
    reply: Reply


def base_of(config: IterativeConfig) -> Base:
    """Return the strategy that the settings name: Flower's own where it has it."""
    lr = config.server_lr or OWN_LR.get(config.strategy, 1.0)
    adaptive: dict[str, Any] = {
        "eta": lr, "beta_1": config.beta1, "beta_2": config.beta2, "tau": config.tau, **EVERYONE,
    }  # fmt: skip
    moments = ("m_t", "v_t")
    if config.strategy == "fedprox":
        return Base(FedProx(proximal_mu=config.mu, **EVERYONE))
    if config.strategy == "fedadam":
        return Base(FedAdam(**adaptive), moments)
    if config.strategy == "fedyogi":
        return Base(FedYogi(**adaptive), moments)
    if config.strategy == "fednova":
        return Base(FedNova(server_lr=lr, **EVERYONE))
    if config.strategy == "scaffold":
        return Base(Scaffold(server_lr=lr, **EVERYONE), ("control",))
    if config.strategy == "stc":
        return Base(Stc(density=config.stc_density, **EVERYONE), ("left",))
    return Base(FedAvg(**EVERYONE))


class GlobalModel:
    """The weights that the clients of the next round start from.

    Args:
        base: The strategy.
        job: Gives the architecture.
        start: The weights before the first round.

    Attributes:
        state: The weights, buffers included.
    """

    def __init__(self, base: Base, job: Job, start: State) -> None:
        self.state = dict(start)
        self._base = base
        with seeded_torch(job.seed, "parameters"):
            self._parameters = [name for name, _ in job.builders[job.student]().named_parameters()]

    def requests(self, server_round: int, config: Mapping[str, Any], nodes: Sequence[int]) -> dict[int, RecordDict]:
        """Return what to send to every node of a round: the strategy's request, with the buffers added.

        Args:
            server_round: From 1.
            config: What the clients are told; the strategy may add to it.
            nodes: Whom to ask.

        Returns:
            Node -> content; nothing if the strategy would wait for more nodes than there are.
        """
        least = [getattr(self._base.strategy, key, 1) for key in ("min_train_nodes", "min_available_nodes")]
        if len(nodes) < max(1, *least):
            return {}
        grid = cast(Grid, _Nodes(nodes))
        buffers = {name: value for name, value in self.state.items() if name not in self._parameters}
        with _left_as_it_is():
            messages = list(
                self._base.strategy.configure_train(
                    server_round, ArrayRecord(self._trainable(self.state)), ConfigRecord(dict(config)), grid
                )
            )
        added = ArrayRecord(buffers)
        # Most strategies ask all nodes by one and the same content.
        contents = {id(message.content): _with_buffers(message.content, added) for message in messages}
        found = {message.metadata.dst_node_id: contents[id(message.content)] for message in messages}
        # In the order that is given: Flower has shuffled them.
        return {node: found[node] for node in nodes if node in found}

    def check_answer(self, content: RecordDict, sender: str) -> RecordDict:
        """Let the strategy check and unpack what only it knows; others send weights alone.

        Raises:
            UploadError: The answer is none to its question.
        """
        check = getattr(self._base.strategy, "check_answer", None)
        return content if check is None else check(content, sender)

    def take(self, server_round: int, answers: Sequence[Answered]) -> dict[str, float]:
        """Move to the next model.

        Args:
            server_round: From 1.
            answers: At least one, in the order of client names.

        Returns:
            The clients' numbers, averaged as the strategy does it.

        Raises:
            OneShotError: The strategy's model is none: it holds NaN or infinities.
        """
        shared = set.intersection(*(set(answer.reply.metrics) for answer in answers))
        for answer in answers:
            answer.message.content = self._shown(answer, shared)
        with _left_as_it_is():
            arrays, metrics = self._base.strategy.aggregate_train(server_round, [answer.message for answer in answers])
        if arrays is not None:
            moved = arrays.to_torch_state_dict()
            if not all(bool(moved[name].isfinite().all()) for name in self._parameters):
                raise OneShotError(
                    f"round {server_round}: the strategy's model holds NaN or Inf; lower the server's learning rate "
                    "(iterative.server-lr) or the clients' (client.lr), and begin a new run"
                )
            parameters = {name: moved[name].to(self.state[name].dtype) for name in self._parameters}
            self.state = {**self.state, **parameters, **self._mean_buffers(answers)}
        return {key: float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)}

    def snapshot(self) -> dict[str, Any]:
        """Return weights and strategy as a tree that a checkpoint can hold."""
        strategy = self._base.strategy
        return {"model": dict(self.state), "strategy": {name: getattr(strategy, name) for name in self._base.remembers}}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Go on from what :meth:`snapshot` has returned."""
        self.state = dict(tree["model"])
        for name, value in tree["strategy"].items():
            setattr(self._base.strategy, name, value)

    def _trainable(self, state: Mapping[str, torch.Tensor]) -> State:
        return {name: state[name] for name in self._parameters}

    def _mean_buffers(self, answers: Sequence[Answered]) -> State:
        buffers = [{n: v for n, v in a.reply.state.items() if n not in self._parameters} for a in answers]
        return weighted_mean(buffers, [float(answer.reply.num_examples or 0) for answer in answers])

    def _shown(self, answer: Answered, shared: set[str]) -> RecordDict:
        """Return an answer as strategies expect one: the parameters, one record of numbers, and what is theirs."""
        numbers = {key: answer.reply.metrics[key] for key in sorted(shared)}
        metrics = MetricRecord({"num-examples": answer.reply.num_examples or 0, **numbers})
        own = {name: record for name, record in answer.content.array_records.items() if name != "arrays"}
        return RecordDict({"arrays": ArrayRecord(self._trainable(answer.reply.state)), "metrics": metrics, **own})


def check_trained(reply: Reply) -> None:
    """Refuse an answer that holds no training.

    Raises:
        UploadError: Nothing was trained, or on nobody knows how much.
    """
    if reply.held or reply.pretrained or reply.num_examples is None:
        raise UploadError(f"{reply.client}: it trained nothing in this round, which is all that a round asks for")


class _Nodes:
    """Flower's grid, as far as a strategy looks at it when it chooses whom to ask."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = list(nodes)

    def get_node_ids(self) -> list[int]:
        """Return the nodes of the round."""
        return self._nodes


def _with_buffers(content: RecordDict, buffers: ArrayRecord) -> RecordDict:
    return RecordDict({**content, "arrays": ArrayRecord({**content.array_records["arrays"], **buffers})})


@contextmanager
def _left_as_it_is() -> Iterator[None]:
    """Keep Python's global random state, by which Flower shuffles nodes; leave out the lines it logs every round."""
    before, level = random.getstate(), FLOWER_LOGGER.level
    FLOWER_LOGGER.setLevel(WARNING)
    try:
        yield
    finally:
        FLOWER_LOGGER.setLevel(level)
        random.setstate(before)
