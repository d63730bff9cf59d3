"""Records of a round's messages: from arrays to numpy and back, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from ...core.errors import UploadError, printable
from ...uploads.checks import check_arrays
from ..decoding import array_form

# The names of a round's own numbers in its row of metrics.
OWN = ("epoch", "answers", "accuracy", "mib_up", "mib_down", "mib_per_client")


def in_row(told: Mapping[str, float]) -> dict[str, float]:
    """Return the clients' numbers as a round's row names them: ``train-accuracy`` is theirs, ``accuracy`` the server's.

    Args:
        told: By the clients' own names, of which any may be one of :data:`OWN`, or steer a terminal. No value takes
            the place of another: a name that is taken gets one more ``train-``.
    """
    row = {printable(name): value for name, value in told.items() if name not in OWN}
    for name in filter(told.__contains__, OWN):
        free = f"train-{name}"
        while free in row:
            free = f"train-{free}"
        row[free] = told[name]
    return row


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
    """Return the arrays of a record of an answer, decoded and compared with the expected ones.

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
    signature = {key: (value.shape, str(value.dtype)) for key, value in wanted.items()}
    return check_arrays(record, name, signature, array_form(name))
