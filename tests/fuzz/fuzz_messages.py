"""Decoders of messages: what clients answer to the server, and what the server asks of clients."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flower_fakes import CLASSES, SIGNATURES, net
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from fuzz_decoder import Decoder
from fuzz_inputs import EXTREMES, mutated, texts
from hypothesis import strategies as st

from strategies.client import upload_facts
from strategies.client.corrections import LocalUpdate
from strategies.client.fens import HoldoutRequest, LocalFens, OwnModel, respond
from strategies.distillation.generator_spec import GeneratorSpec
from strategies.flower.messages import read_reply
from strategies.uploads.packed import ensemble_digest, from_wire, pack_member, to_wire, unpack_member
from strategies.uploads.quantization import dequantize_state, quantize_state
from strategies.uploads.ternary import Compression, flatten_arrays

with torch.random.fork_rng():
    torch.manual_seed(0)
    STATE = net().state_dict()
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
def changed(
    draw: st.DrawFn, good: Mapping[str, Any], value: st.SearchStrategy[Any] = anything, least: int = 1
) -> dict[str, Any]:
    """Entries of which some are others, lost, or too many."""
    found = dict(good)
    for _ in range(draw(st.integers(least, 4))):
        key = draw(st.one_of(st.sampled_from(sorted(good)), word))
        if draw(st.integers(0, 4)) == 0:
            found.pop(key, None)
        else:
            found[key] = draw(value)
    return found


def records(good: Mapping[str, Array]) -> st.SearchStrategy[ArrayRecord]:
    """Array records in which some arrays are others, lost, or too many."""
    return changed(good, st.one_of(arrays(), st.sampled_from(list(good.values()))), 0).map(ArrayRecord)


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


def usable(state: Mapping[str, Any]) -> None:
    """Check that the tensors of an answer are finite."""
    assert all(bool(torch.isfinite(value).all()) for value in state.values() if isinstance(value, torch.Tensor))


def _read_upload(content: RecordDict) -> Any:
    return read_reply(content, SIGNATURES, num_classes=CLASSES, max_bytes=10**6, sender="node-7")


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


ODD: list[np.ndarray[Any, Any]] = [
    np.zeros(0, np.float32), np.array(np.nan, np.float32), np.full((2, 2), np.inf, np.float32),
    np.zeros(3, np.complex64),
    np.array(["a"]), np.zeros((1,) * 30, np.int8), np.array(-1.0, np.float32), np.zeros((2, 2), np.uint16),
    np.zeros((1, 3), np.float32), np.array([[2.0, -2.0]], np.float32), np.array([[1e38, 3e38]], np.float32),
]  # fmt: skip


def wires() -> st.SearchStrategy[dict[str, np.ndarray[Any, Any]]]:
    """The arrays of an ensemble with some that are others."""
    return changed(SENT, st.sampled_from([*SENT.values(), *ODD]), 0)


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
PARAMETERS = {name: STATE[name] for name, _ in net().named_parameters()}
ROUND: dict[str, Any] = {"server-round": 2, "last-round": 1, "safe-round": 1, "seed": 0, **SPEC}


ODD_TENSORS = (
    torch.zeros(0), torch.full((2,), torch.nan), torch.zeros(1, dtype=torch.int8), torch.zeros(2, 3, 4),
    torch.tensor(1),
)  # fmt: skip


def states(good: Mapping[str, torch.Tensor]) -> st.SearchStrategy[dict[str, torch.Tensor]]:
    """Weights of which some are others."""
    return changed(good, st.sampled_from([*ODD_TENSORS, *good.values()]), 0)


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
        sent["control"] = draw(states(PARAMETERS))
    if draw(st.integers(0, 3)) == 0:
        sent["ternary"] = {name: torch.from_numpy(value.copy()) for name, value in draw(codes()).items()}
    return said, sent


def _start_round(request: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    said, sent = request
    model = net()
    model.load_state_dict(STATE)
    update = LocalUpdate(model, said, sent)
    images, labels = torch.zeros(4, 1, 8, 8), torch.arange(4)
    return update.penalty(model, model(images), labels)


MESSAGES: dict[str, Decoder] = {
    "upload": Decoder(uploads(), _read_upload, look=lambda found: usable(found.state)),
    "int8 weights": Decoder(wires().map(lambda sent: {**sent, **quantize_state(STATE)}), dequantize_state),
    "fens question": Decoder(questions(), _respond, look=_told),
    "ensemble member": Decoder(members(), _unpack),
    "round request": Decoder(rounds(), _start_round),
    "spec generator": Decoder(changed(dict(SPEC)), GeneratorSpec.read),
}
