"""Malformed inputs: good bytes, texts and trees with lies in them, and some that are nothing else."""

from __future__ import annotations

import copy
import json
import struct
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from strategies.core.durable import with_digest

EXTREMES = (0, 1, 2, 7, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
whole = st.one_of(st.sampled_from([*EXTREMES, *(-n for n in EXTREMES)]), st.integers())
reals = st.one_of(st.floats(), st.sampled_from([1e308, -0.0, 5e-324, float("nan"), float("inf")]))
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "..", "../../etc/passwd", "/etc/passwd", "a/../b", "\x00", "\ud800", "con", "a" * 5000, "client"]
    ),
)
plain = st.one_of(st.none(), st.booleans(), whole, reals, texts)
values = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)), max_leaves=8
)


@st.composite
def mutated(draw: st.DrawFn, *good: bytes, most: int = 4) -> bytes:
    """Good bytes with a few changes, at first with none; rarely bytes that never were good."""
    if draw(st.integers(0, 19)) == 19:
        return draw(st.binary(max_size=300))
    data = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(0, most))):
        data = _changed(draw, data, draw(st.sampled_from(good)))
    return data


def _changed(draw: st.DrawFn, data: bytes, other: bytes) -> bytes:
    # Headers stand at either end, and there most is decided.
    near = st.one_of(st.integers(0, min(len(data), 200)), st.integers(max(0, len(data) - 200), len(data)))
    at = draw(st.one_of(near, st.integers(0, len(data))))
    kind = draw(st.sampled_from(["flip", "cut", "splice", "repeat", "number", "zeros", "drop", "cross"]))
    if kind == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if kind == "cut":
        return data[:at] if draw(st.booleans()) else data[at:]
    if kind == "splice":
        return data[:at] + draw(st.binary(max_size=40)) + data[at + draw(st.integers(0, 40)) :]
    if kind == "repeat":
        size = draw(st.integers(1, 64))
        return data[: at + size] + data[at : at + size] * draw(st.integers(1, 50)) + data[at + size :]
    if kind == "number":
        number, size = draw(st.sampled_from(EXTREMES)), draw(st.sampled_from([1, 2, 4, 8]))
        order = draw(st.sampled_from(["little", "big"]))
        return data[:at] + (number % 256**size).to_bytes(size, order) + data[at + size :]
    if kind == "zeros":
        size = draw(st.integers(1, 200))
        return data[:at] + bytes(size) + data[at + size :]
    if kind == "drop":
        return data[:at] + data[at + draw(st.integers(1, 100)) :]
    return data[:at] + other[draw(st.integers(0, len(other))) :]


@st.composite
def mangled(draw: st.DrawFn, *good: Any, junk: st.SearchStrategy[Any] = values) -> Any:
    """A tree of dicts and lists in which something is dropped, doubled, or replaced; at first unchanged."""
    tree = copy.deepcopy(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(0, 3))):
        tree = _mangled(draw, tree, junk)
    return tree


def _mangled(draw: st.DrawFn, tree: Any, junk: st.SearchStrategy[Any]) -> Any:
    deeper = draw(st.integers(0, 5)) > 0
    if isinstance(tree, dict) and tree and deeper:
        key = draw(st.sampled_from(list(tree)))
        kind = draw(st.integers(0, 6))
        if kind == 0:
            return {name: value for name, value in tree.items() if name != key}
        if kind == 1:
            return {**tree, draw(texts): tree[key]}
        return {**tree, key: _mangled(draw, tree[key], junk)}
    if isinstance(tree, list) and tree and deeper:
        at = draw(st.integers(0, len(tree) - 1))
        kind = draw(st.integers(0, 6))
        if kind == 0:
            return tree[:at] + tree[at + 1 :]
        if kind == 1:
            return tree + [tree[at]] * draw(st.integers(1, 3))
        return [*tree[:at], _mangled(draw, tree[at], junk), *tree[at + 1 :]]
    return draw(junk)


# What no change of a good text arrives at.
HOSTILE_JSON = tuple(
    text.encode("utf-8", "surrogatepass")
    for text in (
        "[" * 200_000, '{"a":' * 100_000, "[" * 5_000 + "]" * 5_000, "9" * 100_000, "-" + "1" * 5_000, "1e999999",
        "NaN",
        '{"a": 1, "a": 2}', '"\\ud800"', '{"\\ud800": "\\udfff"}', "\ufeff{}", "null", "",
        "\x00" * 1000, '{"a":' + "1" * 4_400,
    )
)  # fmt: skip


def json_bytes(*good: Any) -> st.SearchStrategy[bytes]:
    """Changed JSON, as a rule with its digest, or a text that is not JSON."""

    def text(tree: Any) -> bytes:
        with suppress(AttributeError, TypeError, ValueError):  # no object, or one with a number that has no digest
            tree = with_digest(tree)
        return json.dumps(tree).encode()

    whole_ones = tuple(map(text, good))
    return st.one_of(mangled(*good).map(text), mutated(*whole_ones), st.sampled_from(HOSTILE_JSON))


HOSTILE_TOML = tuple(
    text.encode("utf-8", "surrogatepass")
    for text in (
        "a = " + "[" * 20_000, "a = " + "{a = " * 5_000, "a" + ".a" * 20_000 + " = 1", "a = " + "9" * 10_000,
        "a = 1\na = 2",
        "a = nan", "a = 1e999", "[a]\n[a]", "\ufeffa = 1", 'a = "\\ud800"', "a = 1979-05-27", "a = '''", "\x00", "\xff",
        "a = 0x" + "f" * 10_000,
    )
)  # fmt: skip


@st.composite
def safetensors_files(draw: st.DrawFn, *good: bytes) -> bytes:
    """A safetensors file whose header lies: of lengths, shapes, places, kinds."""
    if draw(st.booleans()):
        return draw(mutated(*good))
    data = draw(st.sampled_from(good))
    size = struct.unpack("<Q", data[:8])[0]
    header = draw(mangled(json.loads(data[8 : 8 + size])))
    if isinstance(header, dict) and draw(st.booleans()):
        entry = {
            "dtype": draw(st.sampled_from(["F32", "F64", "I64", "BOOL", "BF16", "F8_E4M3", "U64", "X", ""])),
            "shape": draw(st.lists(whole, max_size=5)),
            "data_offsets": draw(st.lists(whole, min_size=2, max_size=2)),
        }
        header[draw(texts)] = entry
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    said = draw(st.one_of(st.just(len(text)), whole)) % 2**64
    return struct.pack("<Q", said) + text + data[8 + size :]
