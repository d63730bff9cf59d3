"""The model of a run in rounds: a Flower strategy moves its parameters, its buffers are averaged here.

So a strategy that steps along an update (FedAdam) never steps along running variances or counters, whichever it is.
One that chooses among the clients' values (a median, Krum) sees running statistics, too. An array that it drops from a
hostile client must not return by an average. One that only averages may see everything, as it does in Flower.
Counters are averaged here under every strategy. Tied weights, one parameter under several names, move by their first.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from logging import WARNING
from operator import attrgetter
from typing import Any, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError, InconsistentMessageReplies
from torch import nn

from ...core.errors import OneShotError, shorten_list
from ...method import Job, State
from ...teacher.average import renew_singular_vectors, weighted_mean
from ...uploads.parts import Part
from ..evaluation import averages_training_as_flower, with_largest_epsilon
from ..messages import in_order
from ..surroundings import ShownNodes, seeded_strategy, within
from .answers import CheckedAnswer, check_strategy_parts, show_to_strategy, to_numpy, to_record
from .base import Base


class GlobalModel:
    """The weights that the clients of the next round start from.

    Attributes:
        state: The weights, buffers included, always in the order of ``start``; they may be replaced between two
            rounds, as a refinement does.
        part: The arrays that travel, if these are not all of the model's; the others stay as every party builds them.
    """

    part: Part | None = None

    def __init__(self, base: Base, job: Job, module: nn.Module) -> None:
        start = module.state_dict()
        self._names = tuple(start)
        self.state = start
        self.message_type = MessageType.TRAIN
        self._base, self._seed, self._student = base, job.seed, job.student
        seen, self._tied = {name for name, _ in module.named_parameters()}, tied_names(module)
        fractions = [name for name, value in start.items() if value.is_floating_point()]
        shown = {"parameters": seen, "numbers": seen.union(fractions), "everything": set(start)}[base.sees]
        self._seen = [name for name in start if name in shown]
        # Counters are no matter of a strategy, though it may want to see them.
        self._moved = [name for name in self._seen if name in seen.union(fractions)]

    @property
    def state(self) -> State:
        """The weights by name."""
        return self._state

    @state.setter
    def state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights, whose names a file or a strategy may give in any order."""
        self._state = in_order(state, self._names)

    def begin_with(self, arrays: ArrayRecord, part: Part | None) -> None:
        """Replace the weights by the arrays of a message, which are all of the model's or a part."""
        sent, self.part = dict(arrays.to_torch_state_dict()), part
        self.state = sent if part is None else dict(part.complete(sent))

    def as_sent(self, state: State) -> ArrayRecord:
        """Return the arrays of a state that travel, under their names in messages."""
        return ArrayRecord(dict(state) if self.part is None else self.part.sent(state))

    def requests(self, server_round: int, config: Mapping[str, Any], nodes: Sequence[int]) -> dict[int, RecordDict]:
        """Return the requests to the nodes of a round: the strategy's, with the buffers added.

        Args:
            server_round: From 1.
            config: The request's config; the strategy may add to it.
            nodes: Whom to ask, or whom the strategy chooses among, in the order of client names.

        Returns:
            Node -> content; nothing if the strategy would wait for more nodes than there are.

        Raises:
            QuorumError: The strategy waits for more nodes than there are.
        """
        if len(nodes) < self._base.least:
            return {}
        arrays = ArrayRecord({name: self.state[name] for name in self._seen})
        self._keep_in_step(arrays)
        with seeded_strategy(self._seed, "sample", server_round):
            messages = list(
                self._base.strategy.configure_train(
                    server_round, arrays, ConfigRecord(dict(config)), cast(Grid, ShownNodes(nodes))
                )
            )
        self.message_type = _type_of(messages, MessageType.TRAIN)
        added = ArrayRecord({name: value for name, value in self.state.items() if name not in self._seen})
        return self._by_node(messages, nodes, added)

    def evaluation_requests(
        self, server_round: int, config: Mapping[str, Any], nodes: Sequence[int]
    ) -> tuple[dict[int, RecordDict], str]:
        """Return the strategy's requests for scores of the present model, and their message type.

        Args:
            server_round: From 1.
            nodes: Whom the strategy chooses among, in the order of client names.
        """
        with seeded_strategy(self._seed, "evaluate", server_round):
            messages = list(
                self._base.strategy.configure_evaluate(
                    server_round, ArrayRecord(self.state), ConfigRecord(dict(config)), cast(Grid, ShownNodes(nodes))
                )
            )
        return self._by_node(messages, nodes, ArrayRecord()), _type_of(messages, MessageType.EVALUATE)

    def check_answer(self, content: RecordDict) -> RecordDict:
        """Let the strategy check and unpack its own records; others send weights alone.

        Raises:
            UploadError: The answer does not fit the question.
        """
        return check_strategy_parts(self._base.strategy, content)

    def take(self, server_round: int, answers: Sequence[CheckedAnswer]) -> dict[str, float] | None:
        """Move to the next model.

        Args:
            server_round: From 1.
            answers: At least one, in the order of client names.

        Returns:
            The clients' numbers, averaged as the strategy does it; None if it made no model of these answers: then the
            model stays unchanged, which the log notes.

        Raises:
            OneShotError: The strategy's model is invalid: other names or shapes, or NaN or infinities.
        """
        replies, reason = show_to_strategy(self._base.strategy, answers, self._seen), "it returned none"
        try:
            with seeded_strategy(self._seed, "combine", server_round):
                arrays, metrics = self._base.strategy.aggregate_train(server_round, replies)
        except (AggregationError, InconsistentMessageReplies) as error:
            arrays, metrics, reason = None, None, str(error)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of a project's own code, say
            arrays, metrics, reason = None, None, f"{type(error).__name__}: {error} ({_place(error)})"
        if not arrays:
            log(
                WARNING,
                "round %d: strategy %s made no model of %d answers, so the model stays unchanged: %s",
                server_round, type(self._base.strategy).__name__, len(answers), reason,
            )  # fmt: skip
            return None
        self._check(arrays, server_round)
        moved = arrays.to_torch_state_dict()
        if not all(bool(moved[name].isfinite().all()) for name in self._seen):
            raise OneShotError(
                f"round {server_round}: the strategy's model holds NaN or Inf; lower the server's learning rate "
                "(iterative.server-lr) or the clients' (client.lr), and begin a new run"
            )
        taken = {name: moved[name].to(self.state[name].dtype) for name in self._moved}
        state = {**self.state, **taken, **self._mean_buffers(answers)}
        state |= {name: state[first].clone() for name, first in self._tied.items()}
        renew_singular_vectors(state, state)  # clients begin from the same ones, so that their means do not cancel out
        self.state = state
        if self.part is not None:  # a mean of equal arrays may differ from them in its last bits
            self.state = {**self.state, **self.part.rest}
        found: Mapping[str, Any] = metrics or {}
        if averages_training_as_flower(self._base.strategy):
            found = with_largest_epsilon(found, [answer.content for answer in answers])
        return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}

    def snapshot(self) -> dict[str, Any]:
        """Return weights and strategy as a tree that a checkpoint can hold."""
        remembered = {name: _as_tree(attrgetter(name)(self._base.strategy)) for name in self._base.remembers}
        return {"model": dict(self.state), "strategy": remembered}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Continue from a result of :meth:`snapshot`."""
        self.state = tree["model"]
        for name, value in tree["strategy"].items():
            self._base.remember(name, _from_tree(value))

    def _keep_in_step(self, arrays: ArrayRecord) -> None:
        """Replace a strategy's own copy of the last model: FedAvgM would step from it, and undo the later rounds."""
        for _, strategy in within(self._base.strategy):
            if isinstance(getattr(strategy, "current_arrays", None), ArrayRecord):
                vars(strategy)["current_arrays"] = ArrayRecord(dict(arrays))

    def _by_node(self, messages: Sequence[Message], nodes: Sequence[int], added: ArrayRecord) -> dict[int, RecordDict]:
        """Return the contents of messages with the arrays that the strategy has not seen, in the order of nodes."""
        # Most strategies ask all nodes by one and the same content.
        contents = {id(message.content): self._completed(message.content, added) for message in messages}
        found = {message.metadata.dst_node_id: contents[id(message.content)] for message in messages}
        # In the order that is given: Flower has shuffled them.
        return {node: found[node] for node in nodes if node in found}

    def _completed(self, content: RecordDict, added: ArrayRecord) -> RecordDict:
        key = getattr(self._base.strategy, "arrayrecord_key", "arrays")
        if key not in content.array_records:
            fitting = [name for name, record in content.array_records.items() if list(record) == self._seen]
            key = fitting[0] if fitting else key
        if key not in content.array_records or (not added and self.part is None):
            return content
        arrays = ArrayRecord(in_order({**content.array_records[key], **added}, self._names))
        if self.part is not None:
            arrays = self.as_sent(arrays.to_torch_state_dict())
        return RecordDict({**content, key: arrays})

    def _check(self, arrays: Mapping[str, Array], server_round: int) -> None:
        """Refuse a strategy's result that is not a model of this architecture."""
        wanted = {name: tuple(self.state[name].shape) for name in self._seen}
        found = {name: tuple(array.shape) for name, array in arrays.items()}
        if found != wanted:
            missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
            other = [f"{n} {list(found[n])}" for n in wanted if n in found and found[n] != wanted[n]]
            strategy = type(self._base.strategy).__name__
            raise OneShotError(
                f"round {server_round}: strategy {strategy} returned arrays that do not fit model {self._student!r}: "
                f"missing {shorten_list(missing)}; not expected {shorten_list(extra)}; of another shape "
                f"{shorten_list(other)}"
            )

    def _mean_buffers(self, answers: Sequence[CheckedAnswer]) -> State:
        buffers = [{n: v for n, v in answer.reply.state.items() if n not in self._moved} for answer in answers]
        alike = getattr(self._base.strategy, "equal_buffers", False)
        weights = [1.0 if alike else float(answer.reply.facts.num_examples or 0) for answer in answers]
        return weighted_mean(buffers, weights)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return every further name of a parameter that has several, and its first name."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[parameter] for name, parameter in every if name != first[parameter]}


# A strategy's arrays in Flower's form, in a checkpoint: their values under this one key.
_RECORD = "ArrayRecord"


def _as_tree(value: Any) -> Any:
    return {_RECORD: to_numpy(value)} if isinstance(value, ArrayRecord) else value


def _from_tree(value: Any) -> Any:
    return to_record(value[_RECORD]) if isinstance(value, dict) and set(value) == {_RECORD} else value


def _type_of(messages: Sequence[Message], usual: str) -> str:
    return messages[0].metadata.message_type if messages else usual


def _place(error: Exception) -> str:
    """Return the file and the line in which an error was raised: the last one that is in no installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
    return f"{last.filename}:{last.lineno}"
