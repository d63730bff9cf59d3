"""Scores of a model from the clients' own data: their check, their average, and those of the resulting student."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from logging import INFO, WARNING
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError, InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from ..core import refusals
from ..core.errors import UploadError, one_line
from .arguments import Participation, kept_scores
from .asking import Exchange, to_each
from .messages import count_bytes, is_epsilon, is_weight, mean_metrics, metrics_of
from .nodes import Nodes, SentQuestion, cause_of_failure
from .surroundings import ShownNodes, seeded_strategy

EVALUATION = "evaluation"
POLL_S = 0.1


def check_scores(content: RecordDict, weight: str = "num-examples", *, finite: bool = True) -> None:
    """Refuse scores that would spoil the average of all clients.

    Args:
        finite: Whether every score must be a finite number; a project's own average may do without.

    Raises:
        UploadError: There is no single record of metrics, it has no score, or a weight or a score is no such number.
    """
    records = list(content.metric_records.values())
    if len(records) != 1:
        raise refusals.no_scores(f"the reply has {len(records)} metric records", "be one")
    if not is_weight(value := records[0].get(weight)):
        raise refusals.bad_score(weight, value, "a finite number above 0, and below 2**63")
    if len(records[0]) == 1:
        raise refusals.no_scores(f"metrics has {weight!r} alone", "hold a score beside it")
    for key, score in records[0].items() if finite else ():
        if not all(-math.inf < number < math.inf for number in (score if isinstance(score, list) else [score])):
            raise refusals.bad_score(key, score, "finite numbers alone")


def scores_check(strategy: Strategy) -> Callable[[RecordDict], None]:
    """Return the check of the scores that a strategy averages; one with an average of its own gets every answer."""
    if not _collects_as_flower(strategy):
        return lambda content: None  # noqa: ARG005  its own form of answers is unknown
    weight = getattr(strategy, "weighted_by_key", "num-examples")
    return partial(check_scores, weight=weight, finite=_averages_as_flower(strategy))


def _collects_as_flower(strategy: Strategy) -> bool:
    return type(strategy).aggregate_evaluate is FedAvg.aggregate_evaluate


def _averages_as_flower(strategy: Strategy) -> bool:
    average = getattr(strategy, "evaluate_metrics_aggr_fn", None)
    return _collects_as_flower(strategy) and average in (aggregate_metricrecords, mean_of_scores)


def mean_of_scores(contents: list[RecordDict], weight: str) -> MetricRecord:
    """Average the clients' scores as Flower does, but for an epsilon, see :func:`.messages.mean_metrics`."""
    return MetricRecord(with_largest_epsilon(aggregate_metricrecords(contents, weight), contents))


def averages_training_as_flower(strategy: Strategy) -> bool:
    """Return whether a strategy averages the clients' numbers of a round of training as Flower's do by default."""
    return getattr(strategy, "train_metrics_aggr_fn", aggregate_metricrecords) is aggregate_metricrecords


def with_largest_epsilon(means: Mapping[str, Any], contents: Sequence[RecordDict]) -> dict[str, Any]:
    """Return the means of the clients' numbers with the largest epsilon of all clients in place of its mean."""
    records = [{key: value for key, value in metrics_of(content).items() if is_epsilon(key)} for content in contents]
    others = {key: value for key, value in means.items() if not is_epsilon(key)}
    return {**others, **mean_metrics(records, [1.0] * len(records))}


def _alike(replies: list[Message]) -> list[Message]:
    """Return the replies with the scores that most clients share, under one name; the log names who lacks one."""
    records = [next(iter(reply.content.metric_records.values())) for reply in replies]
    forms = [{(key, len(value) if isinstance(value, list) else -1) for key, value in each.items()} for each in records]
    common, holders, counts = set[tuple[str, int]](), forms, Counter(chain.from_iterable(forms))
    for number in sorted(counts, key=lambda number: (-counts[number], number)):
        if 2 * len(still := [form for form in holders if number in form]) > len(forms):
            common.add(number)
            holders = still
    if forms and len(common) < 2:  # the weight alone: of clients without a score in common some count
        common = set(Counter(map(frozenset, forms)).most_common(1)[0][0])
    names, usable = {name for name, _ in common}, []
    for reply, record, form in zip(replies, records, forms, strict=True):
        if common <= form:
            kept = MetricRecord({key: value for key, value in record.items() if key in names})
            reply.content = RecordDict({"metrics": kept})
            usable.append(reply)
        else:
            log(WARNING, "refused node-%d: scores: they are not those of the others", reply.metadata.src_node_id)
    return usable


def average_scores(strategy: Strategy, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
    """Average the clients' scores as a strategy does, without those that would spoil it; the log names their nodes.

    Args:
        strategy: Its ``aggregate_evaluate`` is used.
        server_round: From 1.

    Returns:
        The scores; None without any, and where they cannot be averaged, of which the log has the reason.
    """
    check, failed, usable = scores_check(strategy), list[Message](), list[Message]()
    for reply in replies:
        try:
            if not reply.has_error():
                check(reply.content)
            (failed if reply.has_error() else usable).append(reply)
        except UploadError as error:
            log(WARNING, "refused node-%d: %s", reply.metadata.src_node_id, error.reason)
    if _averages_as_flower(strategy):
        usable = _alike(usable)
    contents = [reply.content for reply in usable]
    try:
        scores = strategy.aggregate_evaluate(server_round, [*usable, *failed])  # Flower logs the reasons of the failed
    except (AggregationError, InconsistentMessageReplies) as error:
        log(WARNING, "round %d: the clients' scores cannot be averaged: %s", server_round, one_line(str(error)))
        return None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of a project's own average, say
        line = "round %d: the clients' scores cannot be averaged: %s: %s"
        log(WARNING, line, server_round, type(error).__name__, one_line(str(error)))
        return None
    if scores is not None and _averages_as_flower(strategy):
        scores = MetricRecord(with_largest_epsilon(scores, contents))
    return kept_scores(f"{type(strategy).__name__}.aggregate_evaluate", scores)


def receive_scores(nodes: Nodes, strategy: Strategy, found: dict[int, Message], reply: Message, node: int) -> None:
    """Take a node's answer with scores; one that cannot be used raises an UploadError."""
    if reply.has_error():
        raise refusals.client_error(f"scores: {cause_of_failure(reply)}")
    nodes.traffic.add(EVALUATION, nodes.names.describe(node), up=count_bytes(reply.content))
    scores_check(strategy)(reply.content)
    found[node] = reply


@dataclass(frozen=True)
class ClientEvaluation:
    """Flower's own federated evaluation, with a limited wait; a failure costs the scores only.

    Attributes:
        fraction: Share of the connected nodes to ask, in (0, 1].
        seed: The run's seed, from which the draw of a share follows.
        participation: Which nodes are asked at least, in which form, and how their scores are combined.
    """

    fraction: float
    seed: int = 0
    participation: Participation = field(default_factory=Participation)

    def configure(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask a share of the nodes to evaluate ``arrays``, as Flower's FedAvg does; it waits forever for a node."""
        return list(self._fedavg().configure_evaluate(server_round, arrays, config, grid))

    def aggregate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' scores by their examples, as Flower's FedAvg does; None if they do not fit together."""
        return average_scores(self._fedavg(), server_round, replies)

    def run(
        self, nodes: Nodes, server_round: int, arrays: ArrayRecord, config: ConfigRecord, timeout: float
    ) -> MetricRecord | None:
        """Ask, wait at most ``timeout`` seconds for nodes and as long for answers, log each node's, and average."""
        deadline = time.monotonic() + timeout
        while not (present := nodes.present()):
            if time.monotonic() >= deadline:
                log(WARNING, "no client connected within %.0f s to evaluate the student", timeout)
                return None
            time.sleep(POLL_S)
        nodes.names.rank(present, nodes.grid)
        # Flower would wait for a node that leaves meanwhile, and its draw would follow from nothing.
        shown = cast(Grid, ShownNodes(nodes.names.in_order(present)))
        with seeded_strategy(self.seed, "evaluate", server_round):
            messages = self.configure(server_round, arrays, ConfigRecord(dict(config)), shown)
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        found, strategy = dict[int, Message](), self._fedavg()

        def receive(reply: Message, sent: SentQuestion) -> bool:
            receive_scores(nodes, strategy, found, reply, sent.node)
            (scores,) = reply.content.metric_records.values()
            log(INFO, "scores of %s: %s", nodes.names.describe(sent.node), one_line(str(dict(scores))))
            return True

        exchange = Exchange(nodes, EVALUATION, question=to_each(contents, MessageType.EVALUATE), receive=receive)
        exchange.wait(timeout, lambda: not exchange.waiting_for, lambda: f"scores: {len(found)} here")
        exchange.book()
        return self.aggregate(server_round, found.values())

    def _fedavg(self) -> FedAvg:
        # Made on demand: Flower warns about a fraction that is 0.
        asked = self.participation
        return FedAvg(
            fraction_evaluate=self.fraction,
            min_evaluate_nodes=asked.min_evaluate_nodes,
            min_available_nodes=1,
            weighted_by_key=asked.weighted_by_key,
            arrayrecord_key=asked.arrayrecord_key,
            configrecord_key=asked.configrecord_key,
            evaluate_metrics_aggr_fn=asked.evaluate_metrics_aggr_fn or mean_of_scores,
        )
