"""Which round each client's last accepted answer is of: what clients that remember something are told with a request.

A client's state belongs to one of its answers. If that answer was late, or the server was killed and goes on from an
older checkpoint, the client's newest state is of an answer that never counted; told which one did, it goes on from the
state of that one.
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
        """Note whose answers count in a round."""
        self._last.update(dict.fromkeys(clients, server_round))

    def checkpointed(self) -> None:
        """Note that a checkpoint holds what is known now: no server goes on from before it any more."""
        self._safe = dict(self._last)

    def snapshot(self) -> dict[str, int]:
        """Return the rounds of the last accepted answers, for a checkpoint."""
        return dict(self._last)

    def restore(self, rounds: Mapping[str, int]) -> None:
        """Go on from what :meth:`snapshot` has returned."""
        self._last, self._safe = dict(rounds), dict(rounds)

    def told(self, client: str) -> dict[str, int]:
        """Return what a client is told: the round of its last answer that counted, and of the last that is sure to.

        Both are 0 where there is none. What the client keeps of rounds before ``safe-round`` is needed no more.
        """
        return {"last-round": self._last.get(client, 0), "safe-round": self._safe.get(client, 0)}

    def tell(
        self, contents: Mapping[int, RecordDict], name_of: Callable[[int], str | None], key: str = "config"
    ) -> dict[int, RecordDict]:
        """Return requests with what their clients are told; who has no name yet is told nothing.

        Args:
            contents: Node -> request; they are not changed.
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
