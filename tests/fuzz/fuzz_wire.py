"""Answers as they travel: Flower's objects with lies in them, which a live exchange pulls beside an honest answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from flower_fakes import CLASSES, SIGNATURES, net
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_id
from flwr.supercore.task_identity import TaskIdentity
from fuzz_decoder import Decoder
from fuzz_inputs import HOSTILE_JSON, mangled, mutated
from fuzz_messages import (
    CODE,
    DENSITY,
    GOOD,
    PARAMETERS,
    STATE,
    UPLOAD,
    WEIGHTS,
    changed,
    codes,
    number,
    numbers,
    records,
    uploads,
    usable,
    word,
)
from hypothesis import strategies as st
from wire_fakes import LEVELS, Link, Objects, deflated, grid_of, resealed, rewritten

from strategies.combiners.aggregator_trainers import Dialogue
from strategies.core.errors import UploadError
from strategies.core.facts import UploadFacts
from strategies.flower.asking import MOST_QUESTIONS, Exchange, to_each
from strategies.flower.clients import GridClients
from strategies.flower.messages import read_reply
from strategies.flower.nodes import Nodes, Refusals, SentQuestion
from strategies.flower.rounds.algorithms import FedNova, Stc
from strategies.flower.rounds.answers import decode_record
from strategies.flower.rounds.round_trip import RoundTrip
from strategies.method import Job, Normalization, Upload
from strategies.methods.fens import FensConfig
from strategies.run.traffic import Traffic

HONEST = 1  # the node whose answer arrives beside every hostile one
MOST_BYTES = 10**6
Receive = Callable[[Message, SentQuestion], Any]


def identity() -> AbstractContextManager[Any]:
    """Flower stamps messages with the identity of its process."""
    return mock.patch.multiple(TaskIdentity, _run_id=1, _node_id=1, _task_id=1)


# Every kind of answer: what an honest client sends, and what a hostile one makes of it.

CONTROL = {name: Array(value.numpy()) for name, value in PARAMETERS.items()}
COUNTS = np.full((1, CLASSES, CLASSES), 1, np.int64)
LAMBDA = {"weights": np.zeros((1, CLASSES), np.float32)}
JOB = Job(
    (Upload(UploadFacts("alice", "net", 99, (1, 2, 3, 93)), lambda: dict(STATE)),),
    {"net": net},
    student="net",
    num_classes=CLASSES,
    input_shape=(1, 8, 8),
    normalization=Normalization((0.5,), (0.5,)),
    config=FensConfig(precision="float32"),
)
ENSEMBLE = {"client": "alice", "ensemble": Dialogue(JOB, None)._ensemble, "examples": 9, "round": 3}  # type: ignore[arg-type]


def content(facts: str, told: Mapping[str, Any], **arrays: Mapping[str, Array]) -> RecordDict:
    """An answer without lies."""
    metrics = MetricRecord({"num-examples": 10, "loss": 0.5, "travel": 0.25})
    kept = {name: ArrayRecord(dict(record)) for name, record in arrays.items()}
    return RecordDict({**kept, "metrics": metrics, facts: ConfigRecord(dict(told))})


TERNARY = {name: Array(value) for name, value in CODE.items()}
GOODS: dict[str, RecordDict] = {
    "upload": content("upload", UPLOAD, arrays=GOOD),
    "ensemble": content("answer", {**ENSEMBLE, "needs": [0]}),
    "fens round": content("answer", ENSEMBLE, arrays={name: Array(value) for name, value in LAMBDA.items()}),
    "votes": content("answer", ENSEMBLE, arrays={"counts": Array(COUNTS)}),
    "scaffold": content("upload", UPLOAD, arrays=GOOD, control=CONTROL),
    "fednova": content("upload", UPLOAD, arrays=GOOD),
    "stc": content("upload", UPLOAD, arrays={k: v for k, v in GOOD.items() if k not in WEIGHTS}, ternary=TERNARY),
    "names": content("upload", UPLOAD),
}
CLAIMS = {
    "needs": st.one_of(
        st.just([0.0]), st.just([2**62]), st.lists(number, max_size=3), st.lists(st.floats(), max_size=3)
    ),
    "examples": number,
    "round": number,
}


@st.composite
def lying(draw: st.DrawFn, kind: str) -> RecordDict:
    """An answer of one kind in which facts, numbers and arrays are others."""
    if kind == "upload" and draw(st.booleans()):
        return draw(uploads())
    found = dict(GOODS[kind])
    for name, record in GOODS[kind].items():
        if draw(st.booleans()):
            continue
        if isinstance(record, MetricRecord):
            found[name] = MetricRecord(draw(changed(dict(record), numbers)))
        elif isinstance(record, ConfigRecord):
            told = draw(changed(dict(record)))
            claim = draw(st.sampled_from(sorted(CLAIMS)))
            found[name] = ConfigRecord({**told, claim: draw(CLAIMS[claim])} if kind in FENS else told)
        elif name == "ternary":
            found[name] = ArrayRecord({key: Array(value) for key, value in draw(codes()).items()})
        else:
            found[name] = draw(records(dict(record)) if record else st.just(record))
    if kind == "votes" and draw(st.booleans()):
        most = draw(st.sampled_from([2**62, 2**63 - 1, -1, 0]))
        found["arrays"] = ArrayRecord({"counts": Array(np.full_like(COUNTS, most))})
    if draw(st.integers(0, 9)) == 0:
        found[draw(word)] = draw(records(GOOD))
    return RecordDict(found)


FENS = ("ensemble", "fens round", "votes")


@st.composite
def travelling(draw: st.DrawFn, kind: str) -> tuple[str, Message, dict[str, bytes]]:
    """A kind of answer, and a hostile answer of this kind as objects."""
    with identity():
        if draw(st.integers(0, 19)) == 0:
            code, reason = draw(st.sampled_from([0, 1, 2, 5, 100, 999])), draw(word)
            answer = Message(Error(code=code, reason=reason), reply_to=question(HONEST))
        else:
            answer = Message(draw(st.one_of(lying(kind), st.just(GOODS[kind]))), reply_to=question(HONEST))
        objects = deflated(answer)
    for turn in range(draw(st.integers(0, 2))):
        objects = draw(hurt(objects, ONCE * (turn == 0) + AGAIN))
    return kind, answer, objects


def question(node: int) -> Message:
    """A question to a node."""
    return Message(RecordDict(), dst_node_id=node, message_type="train")


# Changes of the objects. Those of ONCE need bodies that can be read.
ONCE = ("json", "json", "repeat", "deep")
AGAIN = ("body", "head", "head", "drop", "swap", "cycle")


@st.composite
def hurt(draw: st.DrawFn, objects: Objects, ways: Sequence[str]) -> dict[str, bytes]:
    """Objects with one lie in a head or a body, one too few, one often, or one far too deep."""
    name = draw(st.sampled_from(list(objects)))
    how = draw(st.sampled_from(ways))
    if how == "drop":
        return {key: value for key, value in objects.items() if key != name or key == next(iter(objects))}
    if how == "swap":  # the ids of both are false
        other = draw(st.sampled_from(list(objects)))
        return {**objects, name: objects[other], other: objects[name]}
    if how == "cycle":
        head, _, body = objects[name].partition(b"\0")
        kind, _, length = _three(head)
        return {**objects, name: b" ".join([kind, name.encode(), length]) + b"\0" + body}
    if how == "repeat":
        return _repeated(objects, draw(st.sampled_from([2, 50, 2000])))
    if how == "deep":
        return _deepened(objects, draw(st.sampled_from([1, 2, 5, 50, 1500])))
    content = objects[name]
    return resealed(objects, {name: draw(_headed(content, objects) if how == "head" else _bodied(content, how))})


@st.composite
def _headed(draw: st.DrawFn, content: bytes, objects: Objects) -> bytes:
    head, _, body = content.partition(b"\0")
    kind, children, length = _three(head)
    named = children.split(b",") if children else []
    part = draw(st.sampled_from(["kind", "children", "length", "bytes"]))
    if part == "kind":
        kind = draw(st.sampled_from([*LEVELS, "Nothing", "", "A B"])).encode()
    elif part == "length":
        length = draw(st.sampled_from([b"0", b"-1", b"1" * 5000, b"x", b"", str(2**62).encode()]))
    elif part == "bytes":
        return draw(mutated(head)) + b"\0" + body
    else:
        others = [*map(str.encode, objects), b"", b"f" * 64, b"../x"]
        named = draw(st.lists(st.sampled_from([*named, *others]), max_size=len(named) + 3))
    return b" ".join([kind, b",".join(named), length]) + b"\0" + body


def _three(head: bytes) -> list[bytes]:
    return [*head.split(b" ", 2), b"", b""][:3]


@st.composite
def _bodied(draw: st.DrawFn, content: bytes, how: str) -> bytes:
    head, _, body = content.partition(b"\0")
    if how == "json" and body.startswith(b"{"):
        made = mangled(json.loads(body)).map(lambda tree: json.dumps(tree).encode("utf-8", "surrogatepass"))
        body = draw(st.one_of(made, st.sampled_from(HOSTILE_JSON)))
    else:
        body = draw(mutated(body))
    if draw(st.integers(0, 3)):
        head = b" ".join([*head.split(b" ")[:2], str(len(body)).encode()])
    return head + b"\0" + body


def _repeated(objects: Objects, times: int) -> dict[str, bytes]:
    """Name every chunk of an array many times, and every array of a record often."""
    found = rewritten(objects, "Array", lambda facts: {**facts, "arraychunk_ids": facts["arraychunk_ids"] * times})
    each = range(min(times, 50))
    return rewritten(found, "ArrayRecord", lambda facts: {f"{key}-{n}": facts[key] for key in facts for n in each})


def _deepened(objects: Objects, depth: int) -> dict[str, bytes]:
    """Put records around the message's record."""
    found = dict(objects)
    first = next(iter(found))
    head, _, body = found[first].partition(b"\0")
    kind, inner, length = head.split(b" ")
    for _ in range(depth):
        facts = json.dumps({"inside": inner.decode()}).encode()
        around = b"RecordDict %s %d\0" % (inner, len(facts)) + facts
        inner = get_object_id(around).encode()
        found[inner.decode()] = around
    fresh = b" ".join([kind, inner, length]) + b"\0" + body
    del found[first]
    return {get_object_id(fresh): fresh, **found}


# The live exchange.


class _Links:
    """Hands over the answer of each node."""

    def __init__(self) -> None:
        self.of: dict[str, Link] = {}
        self._now: Link

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Let the nodes answer: one that is asked again, once more."""
        names = [str(message.metadata.dst_node_id) for message in messages]
        for name in names:
            self.of[name].waiting = [self.of[name].announced]
        return names

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        self._now = self.of[request.message_ids[0]]
        return self._now.PullMessages(request)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        return self._now.PullObject(request)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self._now.ConfirmMessageReceived(request)


@dataclass(frozen=True)
class _Heard:
    """One exchange: the values that were taken, by node, and all refusals."""

    taken: dict[int, Any]
    refused: list[tuple[str, str]]


class Sitting:
    """One server that hears thousands of nodes, each with one hostile answer beside the same honest one."""

    def __init__(self) -> None:
        self._links, self._last = _Links(), HONEST
        grid: Any = grid_of(self._links)
        grid.get_node_ids = lambda: [HONEST, self._last]
        grid.get_nodes = lambda: [SimpleNamespace(node_id=node, last_activated_at="") for node in grid.get_node_ids()]
        grid.push_messages = self._links.push
        self._nodes = Nodes(grid, Refusals(None), Traffic(), max_bytes=MOST_BYTES)
        with identity():
            self._good = {}
            for kind, good in GOODS.items():
                answer = Message(good, reply_to=question(HONEST))
                self._good[kind] = answer, deflated(answer)
            honest = {kind: self._exchange(kind, [HONEST]).taken[HONEST] for kind in GOODS}
        self._expected = {kind: _bits(value) for kind, value in honest.items()}

    def hear(self, hostile: tuple[str, Message, dict[str, bytes]]) -> Any:
        """Return the value of a hostile answer that is taken.

        Raises:
            UploadError: It is refused, as it should be.
            AssertionError: The honest answer suffered, or the hostile one was neither taken nor refused.
        """
        kind, answer, objects = hostile
        self._last += 1
        with identity():
            self._links.of[str(self._last)] = Link(answer, objects)
            heard = self._exchange(kind, [HONEST, self._last])
        del self._links.of[str(self._last)]
        assert _bits(heard.taken[HONEST]) == self._expected[kind], "the honest answer suffered"
        if self._last in heard.taken:
            assert not heard.refused, heard.refused
            return heard.taken[self._last]
        ((_, reason),) = heard.refused
        raise UploadError(reason)

    def _exchange(self, kind: str, nodes: list[int]) -> _Heard:
        self._links.of[str(HONEST)] = Link(*self._good[kind])
        heard, read = _Heard({}, []), reader(kind, self._nodes)
        self._nodes.refusals = Refusals(
            SimpleNamespace(refused=list, refuse=lambda *row: heard.refused.append(row))  # type: ignore[arg-type]
        )

        def receive(reply: Message, sent: SentQuestion) -> bool:
            heard.taken[sent.node] = read(reply, sent)
            return True

        exchange = Exchange(
            self._nodes, "fuzz", question=to_each(dict.fromkeys(nodes, RecordDict()), "train"), receive=receive
        )
        for _ in range(MOST_QUESTIONS + 1):
            exchange.look()
            exchange.poll(everybody=True)
        assert not exchange.waiting_for
        assert not exchange.away
        return heard


def reader(kind: str, nodes: Nodes) -> Receive:
    """Return the function that takes an answer of one kind, as the run's own phases do."""
    if kind == "upload":
        return lambda reply, sent: _upload(reply, nodes.names.describe(sent.node))
    if kind in FENS:
        clients, dialogue = GridClients(nodes, common={}, timeout=1.0), Dialogue(JOB, None)  # type: ignore[arg-type]
        checks: dict[str, Any] = {
            "ensemble": dialogue._check_ensemble,
            "fens round": partial(dialogue._check_round, 3, LAMBDA),
            "votes": dialogue._check_votes,
        }
        return lambda reply, sent: _answered(clients, dialogue, checks[kind], reply, sent)
    if kind in ("scaffold", "fednova", "stc"):
        signatures = {"net": SIGNATURES["net"]}
        trip = RoundTrip(nodes, run_id="ab", signatures=signatures, quorum=1, timeout=1.0, num_classes=CLASSES)
        return lambda reply, sent: _trained(trip, _check_of(kind), reply, sent)
    return lambda reply, sent: _scored(nodes, reply, sent)


def _upload(reply: Message, sender: str) -> Any:
    if reply.has_error():
        raise UploadError(reply.error.reason)
    return read_reply(reply.content, SIGNATURES, num_classes=CLASSES, max_bytes=MOST_BYTES, sender=sender).state


def _answered(clients: GridClients, dialogue: Dialogue, check: Any, reply: Message, sent: SentQuestion) -> Any:
    found: dict[str, Any] = {}
    clients._take(reply, sent, check, found)
    ((_, answer),) = found.items()
    return dialogue._parcel(answer).facts if "needs" in answer.facts else dict(answer.arrays)


def _check_of(kind: str) -> Callable[[RecordDict], RecordDict]:
    if kind == "stc":
        stc = Stc(density=DENSITY)
        stc._start = dict(WEIGHTS)
        return stc.check_answer
    if kind == "fednova":
        return FedNova().check_answer
    control = {name: array.numpy() for name, array in CONTROL.items()}
    return lambda content: RecordDict({**content, "control": ArrayRecord(_arrays(content, control))})


def _arrays(content: RecordDict, wanted: Mapping[str, Any]) -> dict[str, Array]:
    return {name: Array(value) for name, value in decode_record(content, "control", wanted).items()}


def _trained(trip: RoundTrip, check: Any, reply: Message, sent: SentQuestion) -> Any:
    answers: dict[str, Any] = {}
    trip._take(reply, sent.node, check, answers)
    ((_, answer),) = answers.items()
    return answer.reply.state


def _scored(nodes: Nodes, reply: Message, sent: SentQuestion) -> Any:
    nodes.names.take_names([(sent.node, reply)])
    return {}


def _bits(value: Any) -> bytes:
    parts = [f"{name}{array}" if not isinstance(array, torch.Tensor) else f"{name}{array.tolist()}"
             for name, array in dict(value).items()]  # fmt: skip
    return "".join(parts).encode()


SITTING: list[Sitting] = []


def _hear(hostile: tuple[str, Message, dict[str, bytes]]) -> Any:
    if not SITTING:
        SITTING.append(Sitting())
    return SITTING[0].hear(hostile)


WIRE = {f"{kind} on the wire": Decoder(travelling(kind), _hear, look=usable) for kind in GOODS}
