"""The clients after their upload, as a method sees them: questions, answers, and whom to ask. Knows no Flower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Question:
    """What a method asks the clients after their upload.

    Attributes:
        kind: Which handler of the client answers.
        facts: Numbers, texts, and lists of one of them.
        arrays: Numpy arrays by name.
    """

    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What one client answers; the parts are those of :class:`Question`."""

    client: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


class Clients(Protocol):
    """The clients, for a method that goes on with them after their upload."""

    @property
    def mib_per_client(self) -> float:
        """MiB that a client has sent and got so far, on average, its upload included."""

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
            phase: What the bytes of the messages are booked under.
            quorum: Usable answers without which there is no going on.
            patience_s: Seconds after which a quorum is enough; None: all are waited for.
            check: Raises UploadError for an answer that cannot be used; then it is refused, and the others count.

        Raises:
            QuorumError: Fewer usable answers than the quorum.
        """

    def leave_out(self, client: str, reason: str) -> None:
        """Ask a client nothing any more, and say why."""
