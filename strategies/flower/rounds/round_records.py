"""Records of a round's messages: from arrays to numpy and back, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from ...core.errors import UploadError
from ...uploads.checks import check_finite, check_keys
from ..decoding import decode_array


def answers_of(replies: Iterable[Message]) -> list[RecordDict]:
    """Return the contents of the replies that are no errors."""
    return [reply.content for reply in replies if not reply.has_error()]


def to_numpy(record: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of an array record by name."""
    return {name: array.numpy() for name, array in record.items()}


def to_record(arrays: Mapping[str, np.ndarray[Any, Any]]) -> ArrayRecord:
    """Return arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def checked_record(
    content: RecordDict, name: str, wanted: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a record of an answer, decoded and compared with what they must be like.

    Args:
        content: The content of the reply.
        name: The record's name.
        wanted: Arrays of the same names, shapes and dtypes.

    Raises:
        UploadError: It is missing, or is not like that.
    """
    record = content.array_records.get(name)
    if record is None:
        raise UploadError(f"the array record {name!r} is missing from the answer")
    check_keys(record, {key: (value.shape, str(value.dtype)) for key, value in wanted.items()}, name, name)
    found = {}
    for key, value in wanted.items():
        what = f"{name}[{key!r}]"
        found[key] = decode_array(record[key], value.shape, str(value.dtype), what)
        check_finite(found[key], what)
    return found
