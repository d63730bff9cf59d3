"""A grid whose nodes are Python functions, and what those functions answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from strategies import Dense, DenseConfig, OneShot, RunOptions
from strategies.client import already_held, disagreement, upload_facts
from strategies.client.corrections import LocalUpdate, read_round
from strategies.client.round_state import RoundState
from strategies.flower import asking, evaluation, nodes
from strategies.flower.collect import Collector
from strategies.flower.rounds import round_trip
from strategies.run.run_folder import RoundFolder
from strategies.uploads.checks import Signatures

State = dict[str, torch.Tensor]
Client = Callable[[Message], Message | None]

SHAPE = (1, 8, 8)
CLASSES = 4
SUPERLINK = 1
ONE_THREAD = RunOptions(threads=1, device="cpu", checkpoint_s=0.0)
TINY = {"epochs": 2, "generator_steps": 2, "latent": 8, "batch_size": 6, "synthesis_batch_size": 8}
TINY_DENSE = DenseConfig(**TINY)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, CLASSES))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))


class Clock:
    """Stands for the module ``time``: only sleeping takes time, and none of ours."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_without_time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the waiting loops a clock of their own, and return it."""
    found = Clock()
    for module in (asking, evaluation, nodes, round_trip):
        monkeypatch.setattr(module, "time", found)
    return found


def act_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process an identity in a run of Flower's, which stamps messages with it."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


BUILDERS = {"net": net, "linear": linear}
SIGNATURES = Signatures(BUILDERS)


def weights(seed: int, architecture: str = "net") -> State:
    rng, state = torch.Generator().manual_seed(seed), BUILDERS[architecture]().state_dict()
    return {key: torch.rand(v.shape, generator=rng) if v.is_floating_point() else v for key, v in state.items()}


def records(
    state: State | None, *, num_examples: Any = 10, facts: Mapping[str, Any] | None = None, **metrics: Any
) -> RecordDict:
    """What a client answers; without facts it is what a stock ClientApp sends."""
    content = RecordDict({"metrics": MetricRecord({"num-examples": num_examples, **metrics})})
    if state is not None:
        content["arrays"] = ArrayRecord(state)
    if facts is not None:
        content["upload"] = ConfigRecord(dict(facts))
    return content


def stock(seed: int, *, architecture: str = "net", num_examples: int = 10, work: list[int] | None = None) -> Client:
    """A plain Flower client; it notes each training in ``work``."""

    def answer(message: Message) -> Message:
        if work is not None:
            work.append(message.metadata.dst_node_id)
        return Message(records(weights(seed, architecture), num_examples=num_examples), reply_to=message)

    return answer


def named(
    name: str,
    seed: int,
    *,
    architecture: str = "",
    label_counts: Sequence[int] | None = None,
    classes: Sequence[str] = (),
    work: list[str] | None = None,
) -> Client:
    """A client that uses our client half; it notes each training in ``work``."""

    def answer(message: Message) -> Message:
        if reply := already_held(message, client=name) or disagreement(message, client=name, classes=classes):
            return reply
        if work is not None:
            work.append(name)
        facts = upload_facts(client=name, architecture=architecture, label_counts=label_counts, classes=classes)
        num_examples = sum(label_counts) if label_counts else 10 + seed
        content = records(weights(seed, architecture or "net"), num_examples=num_examples, facts=facts)
        return Message(content, reply_to=message)

    return answer


def trains_in_rounds(
    name: str,
    build: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, LocalUpdate], torch.Tensor],
    *,
    steps: int,
    rate: float = 0.1,
    examples: int = 10,
    label_counts: Sequence[int] | None = None,
    place: Path | None = None,
    asked: list[tuple[str, Mapping[str, Any], Mapping[str, State]]] | None = None,
) -> Client:
    """A client that takes steps of SGD by the rules of the strategy in rounds; it notes each request in ``asked``."""
    facts = upload_facts(client=name, label_counts=label_counts)

    def answer(message: Message) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            return Message(RecordDict({"upload": facts}), reply_to=message)
        said, sent = read_round(message)
        if asked is not None:
            asked.append((name, said, sent))
        model = build()
        update = LocalUpdate(model, said, sent, memory=RoundState(place, name), label_counts=label_counts)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model.train(), update)
            loss.backward()
            optimizer.step()
            update.step(rate)
        trained, metrics = update.finish(model)
        content = RecordDict({key: ArrayRecord(state) for key, state in trained.items()})
        content["metrics"] = MetricRecord({"num-examples": examples, "train-loss": loss.item(), **metrics})
        content["upload"] = facts
        return Message(content, reply_to=message)

    return answer


def answering(content: RecordDict) -> Client:
    """A client that answers everything with these records."""
    return lambda message: Message(content, reply_to=message)


def spoilt(client: Client, change: Callable[[RecordDict], object]) -> Client:
    """A client whose answers to training are changed."""

    def answer(message: Message) -> Message | None:
        reply = client(message)
        if reply is not None and message.metadata.message_type == MessageType.TRAIN:
            change(reply.content)
        return reply

    return answer


class KilledError(Exception):
    """Stands for whatever ends a process."""


def failing(reason: str) -> Client:
    return lambda message: Message(Error(code=2, reason=reason), reply_to=message)


def silent(message: Message) -> None:
    """A node that never answers."""


GRID = {1: named("alice", 1, label_counts=[1, 2, 3, 4]), 2: named("bob", 2, label_counts=[4, 3, 2, 1])}


class FakeGrid:
    """Flower's grid, as far as the strategies use it.

    Args:
        nodes: Node id -> client.
        simulation: Whether it looks like the grid of a simulation.
        joins: Node id -> how often the nodes are listed before this one is among them.
        delays: Node id -> how often its answer is asked for before it is there.
        gone: Nodes that are listed and cannot be asked.
    """

    def __init__(
        self,
        nodes: Mapping[int, Client],
        *,
        simulation: bool = True,
        joins: Mapping[int, int] | None = None,
        delays: Mapping[int, int] | None = None,
        gone: Iterable[int] = (),
    ) -> None:
        self.nodes = dict(nodes)
        self.asked: list[Message] = []
        self.pulls: list[list[str]] = []
        self._joins, self._delays, self._gone = dict(joins or {}), dict(delays or {}), set(gone)
        self._listings = 0
        self._answers: dict[str, Message] = {}
        if simulation:
            self.pull_interval = 0.001

    def of_type(self, message_type: str = MessageType.TRAIN) -> list[int]:
        """Ids of the nodes that were asked, in order."""
        return [m.metadata.dst_node_id for m in self.asked if m.metadata.message_type == message_type]

    def get_node_ids(self) -> list[int]:
        self._listings += 1
        return [node for node in self.nodes if self._joins.get(node, 0) < self._listings]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages if message.metadata.dst_node_id not in self._gone]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        self.pulls.append(ids)
        return [self._answers.pop(i) for i in ids if i in self._answers and self._is_there(i)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        assert timeout is not None  # Flower would wait for ever
        ids = self.push_messages(messages)
        return [self._answers.pop(i) for i in ids if i in self._answers]

    def _push(self, message: Message) -> str:
        message_id = f"message-{len(self.asked)}"
        message.metadata.__dict__["_message_id"] = message_id
        self.asked.append(message)
        answer = self.nodes[message.metadata.dst_node_id](message)
        if answer is not None:
            self._answers[message_id] = answer
        return message_id

    def _is_there(self, message_id: str) -> bool:
        node_id = self._answers[message_id].metadata.src_node_id
        self._delays[node_id] = self._delays.get(node_id, 0) - 1
        return self._delays[node_id] < 0


class DeployedGrid(FakeGrid):
    """A grid whose SuperLink knows when a node is away, and answers in its place.

    Args:
        nodes: Node id -> client.
        away: Node id -> (first, last) listing in which it is not connected.
    """

    def __init__(self, nodes: dict[int, Any], *, away: dict[int, tuple[int, int]] | None = None, **more: Any) -> None:
        super().__init__(nodes, simulation=False, **more)
        self.away = away or {}

    def get_nodes(self) -> list[Any]:
        ids = [node for node in self.get_node_ids() if not self._is_away(node)]
        return [SimpleNamespace(node_id=node, registered_at="", last_activated_at="") for node in ids]

    def pull_messages(self, message_ids: Any) -> list[Message]:
        ids = list(message_ids)
        asked = {m.metadata.message_id: m for m in self.asked}
        lost = [i for i in ids if self._is_away(asked[i].metadata.dst_node_id)]
        return [unavailable(asked[i]) for i in lost] + super().pull_messages([i for i in ids if i not in lost])

    def _is_away(self, node: int) -> bool:
        first, last = self.away.get(node, (10**9, 0))
        return first <= self._listings <= last


def unavailable(message: Message, code: int = ErrorCode.NODE_UNAVAILABLE) -> Message:
    """What the SuperLink says in a node's place: under its own id."""
    reply = Message(Error(code=code, reason="Error: Node Unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = SUPERLINK
    return reply


def in_turn(*clients: Any) -> Callable[[Message], Message | None]:
    """A client that answers every question in another way, the last way from then on."""
    left = list(clients)
    return lambda message: (left.pop(0) if len(left) > 1 else left[0])(message)


def crashing(message: Message) -> Message:
    return unavailable(message, ErrorCode.CLIENT_APP_CRASHED)


class Hostile(DeployedGrid):
    """A deployment in which the answers of some nodes cannot be inflated."""

    def __init__(self, nodes: dict[int, Any], *, hostile: Iterable[int], error: Exception, **more: Any) -> None:
        super().__init__(nodes, **more)
        self.hostile, self.error = set(hostile), error

    def pull_messages(self, message_ids: Any) -> list[Message]:
        ids = list(message_ids)
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in self.asked}
        if any(asked[i] in self.hostile for i in ids):
            raise self.error
        return super().pull_messages(ids)


def strategy(kind: Any, run_dir: Path | None, *, model: Any = net, **changes: Any) -> OneShot:
    """A strategy of the given class over tiny models, in process."""
    settings = {"num_classes": CLASSES, "input_shape": SHAPE, "compute": "in-process", "options": ONE_THREAD}
    found: OneShot = kind(model, **{**settings, "run_dir": run_dir, **changes})
    return found


def dense(run_dir: Path | None, **changes: Any) -> OneShot:
    return strategy(Dense, run_dir, **{"config": TINY_DENSE, **changes})


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def collector(folder: RoundFolder) -> Collector:
    """The upload phase of a round."""
    return Collector(folder, SIGNATURES, num_classes=CLASSES, max_bytes=10**6)


def lines_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of one of a run's files."""
    return [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]


def reasons(folder: RoundFolder) -> dict[str, str]:
    """Why each client was refused."""
    return {row["client"]: row["reason"] for row in folder.refused()}
