"""Arrays from outside: numpy's own format is accepted, everything else is refused without trust."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from flwr.app import Array

from strategies.core.errors import UploadError
from strategies.flower.messages import decode_array

VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def saved(values: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, values, version=version)
    return stream.getvalue()


def with_header(text: str, body: bytes = VALUES.tobytes()) -> bytes:
    header = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


def decode(data: bytes, stype: str = "numpy.ndarray") -> np.ndarray[Any, Any]:
    array = Array(dtype="float32", shape=(2, 3), stype=stype, data=data)
    return decode_array(array, (2, 3), "float32", "alice: arrays['w']")


GOOD = saved(VALUES)
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n"
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"is 'numpy\.ndarray' beginning with b'': must be 'numpy\.ndarray' beginning with"),
    "text": (b"hello, world", r"beginning with b'hello, w'"),
    "zip": (b"PK\x03\x04" + GOOD, r"beginning with b'PK"),
    "later format": (saved(VALUES, (2, 0)), r"beginning with b'\\x93NUMPY\\x02\\x00'"),
    "cut magic": (GOOD[:7], r"beginning with b'\\x93NUMPY\\x01'"),
    "cut length": (GOOD[:9], r"holds ''"),
    "cut header": (GOOD[:40], r"holds \"\{'descr': "),
    "cut values": (GOOD[:-1], r"has 23 bytes of values, expected are 24"),
    "values too many": (GOOD + b"\0", r"has 25 bytes of values, expected are 24"),
    "no values": (with_header(HEADER, b""), r"has 0 bytes of values, expected are 24"),
    "shape lies": (saved(VALUES.T.copy()), r"holds .*\(3, 2\).*, expected is .*\(2, 3\)"),
    "shape is huge": (with_header(HEADER.replace("(2, 3)", "(2, 10**15)")), r"holds .*, expected is"),
    "shape is negative": (with_header(HEADER.replace("(2, 3)", "(-2, -3)")), r"holds .*, expected is"),
    "dtype lies": (saved(VALUES.astype(np.int32)), r"holds .*'<i4'.*, expected is .*'<f4'"),
    "other byte order": (saved(VALUES.astype(">f4")), r"holds .*'>f4'.*, expected is .*'<f4'"),
    "dtype is no dtype": (with_header(HEADER.replace("'<f4'", "('<f4',)")), r"holds .*, expected is"),
    "header never ends": (with_header("{'descr': '<f4', 'shape': (2"), r"holds .*, expected is"),
    "header is deep": (with_header("-" * 60000 + "1"), r"holds '-{120}', expected is"),
    "header is code": (with_header("__import__('os').abort()"), r"holds .*abort.*, expected is"),
    "header is binary": (with_header("\x00\x1b[31m\xff\n"), r"holds '\\x00\\x1b\[31m�', expected is"),
}


@pytest.mark.parametrize(("data", "reason"), BAD.values(), ids=BAD.keys())
def test_decode_array_when_bytes_are_bad_refuses_them(data: bytes, reason: str) -> None:
    tracemalloc.start()
    with pytest.raises(UploadError, match=rf"^alice: arrays\['w'\] .*{reason}") as caught:
        decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert str(caught.value).replace("�", "").isprintable()
    assert len(str(caught.value)) < 500


def test_decode_array_when_it_holds_objects_never_unpickles_them() -> None:
    woken: list[int] = []

    class Trap:
        def __reduce__(self) -> Any:
            return woken.append, (1,)

    trap = np.empty((2, 3), dtype=object)
    trap[:] = Trap()
    with pytest.raises(UploadError, match=r"holds .*'\|O'.*, expected is"):
        decode(saved(trap))
    assert woken == []


@pytest.mark.parametrize("stype", ["torch.tensor", "", "pickle"])
def test_decode_array_when_it_is_serialised_otherwise_refuses_it(stype: str) -> None:
    with pytest.raises(UploadError, match=rf"is '{stype}' beginning with .*: must be 'numpy\.ndarray'"):
        decode(GOOD, stype)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 2), "float32"), ((6,), "float32"), ((2, 3), "int32"), ((), "<O")])
def test_decode_array_when_its_record_says_otherwise_refuses_it(shape: tuple[int, ...], dtype: str) -> None:
    array = Array(dtype=dtype, shape=shape, stype="numpy.ndarray", data=GOOD)
    with pytest.raises(UploadError, match=rf"w is {dtype}\[.*\], expected is float32\[2, 3\]"):
        decode_array(array, (2, 3), "float32", "w")


@pytest.mark.parametrize(
    "values",
    [
        VALUES,
        np.asfortranarray(VALUES),
        np.array(7),
        np.array([True, False]),
        np.zeros((0, 4), np.float32),
        np.arange(5, dtype=np.float16),
        np.arange(-3, 3, dtype=np.int8),
        np.array([[1 + 2j]]),
        np.full((1, 2, 3, 4), np.nan),
    ],
    ids=lambda values: f"{values.dtype}{list(values.shape)}",
)
def test_decode_array_when_numpy_wrote_it_returns_equal_values_of_its_own(values: np.ndarray[Any, Any]) -> None:
    array = Array(values)
    found = decode_array(array, values.shape, str(values.dtype), "w")
    np.testing.assert_array_equal(found, values)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    assert found.flags["C_CONTIGUOUS"]
    assert found.flags["WRITEABLE"]
