"""The clients after their upload, as a method sees them: questions, answers and the protocol. Independent of Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

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
