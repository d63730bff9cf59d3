"""The clients after their upload, as a method sees them: questions, answers and the protocol. Independent of Flower."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from . import refusals

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Question:
    """A method's question to the clients after their upload.

    Attributes:
        kind: Name of the client's handler that answers.
        facts: Numbers, texts, and lists of either.
        arrays: Numpy arrays by name.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One client's answer, with the parts of a :class:`Question`."""

    client: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


FOLDER_KEY = "folder:"  # of requests: before a model's name, the digest of its folder
TEST_SHARE = "test-share"  # of requests: the share of each class that a client keeps for the result's evaluation


class Clients(Protocol):
    """The clients, for a method that continues with them after their upload."""

    @property
    def mib_per_client(self) -> float:
        """MiB that a client has sent and received so far, on average, its upload included."""

    def ask(
        self,
        questions: Question | Mapping[str, Question],
        *,
        phase: str,
        quorum: int = 0,
        patience_s: float | None = None,
        check: Callable[[Answer], None] = ...,
    ) -> dict[str, Answer]:
        """Ask clients, and return their usable answers by name, in the order of names.

        Args:
            questions: One for every connected client, or one for each name.
            phase: The name under which the messages' bytes are counted.
            quorum: The least number of usable answers.
            patience_s: Seconds after which a quorum is enough; None waits for all clients.
            check: Raises UploadError for an unusable answer, which is then refused; the others count.

        Raises:
            QuorumError: Fewer usable answers than the quorum.
        """


# The requests of a method to its clients, and how a client reads the numbers of one.


@dataclass(frozen=True)
class ClientAsks:
    """The requests of a method to its clients beside the upload, whose kind is ``Method.uploads``.

    Attributes:
        holdout: Share of its examples that a client keeps from training; 0: none.
        holdout_per_class: Keep the share of every class, not of all examples at random.
        calibrate: A client sends the ranges of its layers' outputs, so that the server can quantise its model.
        sums: What a client measures on its examples for a merge of weights: ``"fisher"`` or ``"gram"``; empty: nothing.
    """

    holdout: float = 0.0
    holdout_per_class: bool = False
    calibrate: bool = False
    sums: str = ""


def read_int(said: Mapping[str, Any], key: str, usual: int | None = None) -> int:
    """Return a whole number of a request's config, or its default.

    Args:
        usual: The default; None: the config must have the key.

    Raises:
        UploadError: The server has sent something else.
    """
    value = said.get(key, usual)
    if type(value) is not int:
        raise refusals.bad_request(key, value, "a whole number of 64 bits")
    return value


def read_test_share(said: Mapping[str, Any]) -> float:
    """Return the share that a request has each client keep for the evaluation, from 0 to one half; 0 if it has none.

    Raises:
        UploadError: The server has sent something else.
    """
    value = read_float(said, TEST_SHARE, 0.0)
    if not 0.0 <= value <= 0.5:
        raise refusals.bad_request(TEST_SHARE, value, "a number from 0 to 0.5")
    return value


def read_float(said: Mapping[str, Any], key: str, usual: float | None = None) -> float:
    """Return a finite number of a request's config, or its default; see :func:`read_int`.

    Raises:
        UploadError: The server has sent something else.
    """
    value = said.get(key, usual)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise refusals.bad_request(key, value, "a finite number")
    return float(value)
