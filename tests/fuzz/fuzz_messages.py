"""Decoders of messages: what clients answer to the server, and what the server asks of clients."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from fuzz_decoder import Decoder
from fuzz_inputs import EXTREMES, mutated, texts
from hypothesis import strategies as st
from torch import nn

from strategies.client import upload_facts
from strategies.client.corrections import LocalUpdate
from strategies.client.fens import HoldoutRequest, LocalFens, OwnModel, respond
from strategies.distillation.generator_spec import GeneratorSpec
from strategies.flower.clients import GridClients
from strategies.flower.messages import read_reply
from strategies.flower.nodes import Nodes, Refusals, SentQuestion
from strategies.flower.rounds.algorithms import Stc
from strategies.flower.rounds.answers import decode_record
from strategies.run.round_folder import RoundFolder
from strategies.run.traffic import Traffic
from strategies.uploads.checks import Signatures
from strategies.uploads.packed import ensemble_digest, from_wire, pack_member, to_wire, unpack_member
from strategies.uploads.quantization import dequantize_state, quantize_state
from strategies.uploads.ternary import Compression, flatten_arrays

CLASSES = 4


def net() -> nn.Module:
    """A small model, seeded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, CLASSES))


STATE = net().state_dict()
SIGNATURES = Signatures({"net": net, "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES))})
GOOD = {key: Array(value.numpy()) for key, value in STATE.items()}
PLACES = tempfile.mkdtemp(prefix="oneshot-fuzz-")
atexit.register(shutil.rmtree, PLACES, ignore_errors=True)

# What Flower's records can hold: numbers of 64 bits, texts, bytes, truth values, and lists of one kind.
number = st.one_of(st.sampled_from([n for n in EXTREMES if n < 2**63]), st.integers(-(2**63), 2**63 - 1))
real = st.floats()
word = st.one_of(texts.filter(lambda text: "\ud800" not in text), st.sampled_from(["net", "alice", "int8", "round"]))
scalar = st.one_of(number, real, word, st.binary(max_size=9), st.booleans())
listed = st.one_of(*(st.lists(kind, max_size=6) for kind in (number, real, word, st.booleans())))
anything = st.one_of(scalar, listed)
numbers = st.one_of(number, real, st.lists(real, max_size=4), st.lists(number, max_size=4), st.just(10))


# Sizes that multiply to 0, to less than 0 or beyond 64 bits, and more dimensions than numpy has.
SHAPES = ((-1,), (-1, -8), (0, 2**62), (2**62, 0), (2**62,), (2**32, 2**32), (1,) * 65, (0,) * 65, ())


@st.composite
def consistent(draw: st.DrawFn) -> Array:
    """An array whose header says the same as its shape and dtype; only the header's length may differ."""
    dtype, shape = draw(st.sampled_from(["float32", "int64"])), draw(st.sampled_from(SHAPES))
    header = f"{{'descr': '{np.dtype(dtype).str}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = draw(st.sampled_from([len(header), len(header), 0, 1, 2**16 - 1]))
    data = b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + header + draw(st.binary(max_size=16))
    return Array(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """An array that is not what it says, or that says what cannot be."""
    if draw(st.integers(0, 3)) == 0:
        return draw(consistent())
    good = draw(st.sampled_from(list(GOOD.values())))
    return Array(
        dtype=draw(
            st.one_of(st.just(good.dtype), st.sampled_from(["float64", "int64", "object", "<U9", "uint8"]), word)
        ),
        shape=draw(st.one_of(st.just(tuple(good.shape)), st.lists(number, max_size=5).map(tuple))),
        stype=draw(st.one_of(st.just("numpy.ndarray"), word)),
        data=draw(st.one_of(st.just(good.data), mutated(good.data), st.binary(max_size=200))),
    )


@st.composite
def records(draw: st.DrawFn, good: dict[str, Array]) -> ArrayRecord:
    """An array record in which some arrays are others, lost, or too many."""
    found = dict(good)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.one_of(st.sampled_from(sorted(good)), word))
        if draw(st.integers(0, 3)) == 0:
            found.pop(key, None)
        else:
            found[key] = draw(st.one_of(arrays(), st.sampled_from(list(good.values()))))
    return ArrayRecord(found)


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any], value: st.SearchStrategy[Any] = anything) -> dict[str, Any]:
    """Facts of which some are others, lost, or too many."""
    found = dict(good)
    for _ in range(draw(st.integers(1, 4))):
        key = draw(st.one_of(st.sampled_from(sorted(good)), word))
        if draw(st.integers(0, 4)) == 0:
            found.pop(key, None)
        else:
            found[key] = draw(value)
    return found


UPLOAD = dict(
    upload_facts(
        client="alice", architecture="net", label_counts=[1, 2, 3, 4], ranges={"0": (0.0, 1.0), "4": (-1.0, 1.0)}
    )
)


@st.composite
def uploads(draw: st.DrawFn) -> RecordDict:
    """An answer of the upload phase."""
    content = RecordDict({draw(st.one_of(st.just("arrays"), word)): draw(records(GOOD))})
    content["metrics"] = MetricRecord(draw(changed({"num-examples": 10, "loss": 0.5}, numbers)))
    if draw(st.booleans()):
        content["upload"] = ConfigRecord(draw(changed({**UPLOAD, "held": False, "pretrained": False})))
    return content


def _usable(state: dict[str, torch.Tensor]) -> None:
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


def _read_upload(content: RecordDict) -> Any:
    return read_reply(content, SIGNATURES, num_classes=CLASSES, max_bytes=10**6, sender="node-7")


@st.composite
def answers(draw: st.DrawFn) -> RecordDict:
    """An answer to a question after the upload."""
    facts = draw(changed({"client": "alice", "ensemble": "ab" * 32, "round": 3, "examples": 9}))
    return RecordDict({"answer": ConfigRecord(facts), "arrays": draw(records(GOOD))})


def _read_answer(content: RecordDict) -> Any:
    folder = Path(PLACES)
    clients = GridClients(
        Nodes(object(), Refusals(RoundFolder(folder, None)), Traffic(), max_bytes=10**6),  # type: ignore[arg-type]
        common={},
        timeout=1.0,
    )
    reply: Any = SimpleNamespace(has_error=lambda: False, content=content)
    return clients._read(reply, SentQuestion(7, "fens", 10))


def _read_record(content: RecordDict) -> Any:
    return decode_record(content, "control", {key: value.numpy() for key, value in STATE.items()})


WEIGHTS = {key: value.numpy() for key, value in STATE.items() if value.is_floating_point()}
DENSITY = 0.1
STC = Compression(DENSITY)
CODE = STC.encode(STC.compress(flatten_arrays(WEIGHTS)))


@st.composite
def codes(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """A ternary code with other bits."""
    bits = np.frombuffer(draw(mutated(CODE["bits"].tobytes())), np.uint8)
    magnitude = np.array(draw(st.lists(st.floats(width=32), min_size=0, max_size=2)) or [1.0], np.float32)
    found = {"bits": bits, "magnitude": magnitude}
    if draw(st.integers(0, 9)) == 0:
        found[draw(word)] = bits
    return found


def _read_code(code: dict[str, np.ndarray[Any, Any]]) -> Any:
    return STC.decode(code, flatten_arrays(WEIGHTS).size, "alice: ternary").dense()


def _read_sparse(content: RecordDict) -> Any:
    strategy = Stc(density=DENSITY)
    strategy._start = dict(WEIGHTS)
    return strategy.check_answer(content)


@st.composite
def sparse_answers(draw: st.DrawFn) -> RecordDict:
    """A ternary update as it arrives."""
    code = {name: Array(value) for name, value in draw(codes()).items()}
    return RecordDict({"arrays": ArrayRecord({}), "ternary": draw(records(code))})


# What the server asks of a client.

MEMBERS = tuple(
    pack_member("net", STATE, precision=precision, ranges=ranges)
    for precision, ranges in (("int8", {"0": (-1.0, 1.0), "4": (-3.0, 3.0)}), ("float32", {}))
)
DIGESTS = [member.digest for member in MEMBERS]
SENT: dict[str, np.ndarray[Any, Any]] = {}
LAYERS: dict[str, Any] = {}
for place, packed in enumerate([MEMBERS[0], MEMBERS[0]]):
    wired, said = to_wire(place, packed)
    SENT.update(wired)
    LAYERS.update(said)
QUESTION: dict[str, Any] = {
    "run-id": "ab" * 16, "seed": 3, "holdout": 0.1, "per-class": False, "num-classes": CLASSES,
    "ensemble": ensemble_digest([DIGESTS[0]] * 2), "members": [DIGESTS[0]] * 2, "sizes": [100, 100],
    "architectures": ["net", "net"], "precision": "int8", "sees-inputs": False, "forget-others": False,
    "round": 1, "aggregator": "per-class", "steps": 2, "batch-size": 4, "lr": 0.1, **LAYERS,
}  # fmt: skip


@st.composite
def wires(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of an ensemble with some that are others."""
    found = dict(SENT)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.one_of(st.sampled_from(sorted(SENT)), word))
        if draw(st.booleans()):
            found.pop(key, None)
        else:
            found[key] = draw(st.sampled_from(list(SENT.values()) + ODD))
    return found


ODD: list[np.ndarray[Any, Any]] = [
    np.zeros(0, np.float32), np.array(np.nan, np.float32), np.full((2, 2), np.inf, np.float32),
    np.zeros(3, np.complex64),
    np.array(["a"]), np.zeros((1,) * 30, np.int8), np.array(-1.0, np.float32), np.zeros((2, 2), np.uint16),
    np.zeros((1, 3), np.float32), np.array([[2.0, -2.0]], np.float32), np.array([[1e38, 3e38]], np.float32),
]  # fmt: skip


def _examples(_: HoldoutRequest) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(9, 1, 8, 8), torch.arange(9) % CLASSES


LOCAL = LocalFens("alice", _examples, lambda name, told: net(), lambda holdout: OwnModel("net", STATE), PLACES)


@st.composite
def questions(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A question of FENS."""
    step = draw(st.sampled_from(["offer", "ensemble", "round", "votes"]))
    facts = {"step": step, **QUESTION}
    facts = draw(changed(facts)) if draw(st.integers(0, 3)) else facts
    params = draw(st.one_of(wires(), st.just({}), st.just({"weights": np.zeros((2, CLASSES), np.float32)})))
    return facts, params


def _respond(question: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    return respond(*question, LOCAL)


def _told(said: tuple[dict[str, Any], Any]) -> None:
    facts, _ = said
    assert "error" not in facts or ("\n" not in facts["error"] and facts["error"])


@st.composite
def members(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A member of an ensemble as it travels."""
    return draw(wires()), draw(changed(LAYERS)) if draw(st.booleans()) else dict(LAYERS)


def _unpack(sent: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    arrays, facts = sent
    packed = from_wire(0, arrays, facts, architecture="net", precision="int8")
    return unpack_member(packed, net)


SPEC = GeneratorSpec("images", "normal", 8, CLASSES, 16, (1, 8, 8), 4, 1.0, 2).as_config()
with torch.random.fork_rng():
    GENERATOR = GeneratorSpec.read(SPEC).build(0).state_dict()
ROUND: dict[str, Any] = {"server-round": 2, "last-round": 1, "safe-round": 1, "seed": 0, **SPEC}


@st.composite
def rounds(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """A request of a round with everything that a strategy may send."""
    said = dict(ROUND)
    for key, value in (("proximal-mu", 0.1), ("feddyn-alpha", 0.1), ("stc-density", DENSITY)):
        if draw(st.integers(0, 3)) == 0:
            said[key] = value
    said = draw(changed(said))
    sent = {"arrays": draw(states(STATE))}
    if draw(st.booleans()):
        sent["generator"] = draw(states(GENERATOR))
    if draw(st.integers(0, 3)) == 0:
        sent["control"] = draw(states(dict(net().named_parameters())))
    if draw(st.integers(0, 3)) == 0:
        sent["ternary"] = {name: torch.from_numpy(value.copy()) for name, value in draw(codes()).items()}
    return said, sent


@st.composite
def states(draw: st.DrawFn, good: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of which some are others."""
    found = {name: value.detach() for name, value in good.items()}
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.one_of(st.sampled_from(sorted(found) or ["a"]), word))
        odd = [
            torch.zeros(0),
            torch.full((2,), torch.nan),
            torch.zeros(1, dtype=torch.int8),
            torch.zeros(2, 3, 4),
            torch.tensor(1),
        ]
        found[name] = draw(st.sampled_from([*odd, *good.values()])).detach()
    return found


def _start_round(request: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    said, sent = request
    model = net()
    update = LocalUpdate(model, said, sent)
    images, labels = torch.zeros(4, 1, 8, 8), torch.arange(4)
    return update.penalty(model, model(images), labels)


MESSAGES: dict[str, Decoder] = {
    "upload": Decoder(uploads(), _read_upload, look=lambda found: _usable(found.state)),
    "answer": Decoder(answers(), _read_answer),
    "round record": Decoder(st.builds(lambda r: RecordDict({"control": r}), records(GOOD)), _read_record),
    "ternary code": Decoder(codes(), _read_code),
    "ternary answer": Decoder(sparse_answers(), _read_sparse),
    "int8 weights": Decoder(wires().map(lambda sent: {**sent, **quantize_state(STATE)}), dequantize_state),
    "fens question": Decoder(questions(), _respond, look=_told),
    "ensemble member": Decoder(members(), _unpack),
    "round request": Decoder(rounds(), _start_round),
    "spec generator": Decoder(changed(dict(SPEC)), GeneratorSpec.read),
}
