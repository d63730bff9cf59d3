"""The round of each client's last accepted answer, which a request sends to clients that keep a state.

A client's state belongs to one of its answers. If that answer was late, or if the server was killed and resumes from an
older checkpoint, the client's newest state belongs to an answer that never counted. The client continues from the state
of the answer that did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from flwr.app import ConfigRecord, RecordDict


class Attendance:
    """Rounds of accepted answers, by client."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._safe: dict[str, int] = {}

    def accept(self, server_round: int, clients: Iterable[str]) -> None:
        """Record the clients whose answers count in a round."""
        self._last.update(dict.fromkeys(clients, server_round))

    def checkpointed(self) -> None:
        """Record that a checkpoint holds these rounds: no server resumes from an earlier state any more."""
        self._safe = dict(self._last)

    def snapshot(self) -> dict[str, int]:
        """Return the rounds of the last accepted answers, for a checkpoint."""
        return dict(self._last)

    def restore(self, rounds: Mapping[str, int]) -> None:
        """Continue from a result of :meth:`snapshot`."""
        self._last, self._safe = dict(rounds), dict(rounds)

    def told(self, client: str) -> dict[str, int]:
        """Return the rounds of a client's last answer that counted, and of the last that every resume counts.

        Both are 0 for a client without one. The client no longer needs its state of rounds before ``safe-round``.
        """
        return {"last-round": self._last.get(client, 0), "safe-round": self._safe.get(client, 0)}

    def tell(
        self, contents: Mapping[int, RecordDict], name_of: Callable[[int], str | None], key: str = "config"
    ) -> dict[int, RecordDict]:
        """Return requests with their clients' rounds; a client without a name gets none.

        Args:
            contents: Node -> request; they stay unchanged.
            name_of: Node -> the client's name.
            key: The config's record.
        """
        found = {}
        for node, content in contents.items():
            name = name_of(node)
            told = self.told(name) if name is not None else {}
            config = ConfigRecord({**content.config_records.get(key, ConfigRecord()), **told})
            found[node] = RecordDict({**content, key: config})
        return found
