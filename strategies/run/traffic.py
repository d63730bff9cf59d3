"""Bytes of the messages of a round: per phase, client and way, kept in a file across restarts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.durable import MIB, read_json
from ..core.errors import StoreError
from ..core.scan import LOG
from .files import write_json

UPLOAD_PHASE = "upload"


@dataclass
class Moved:
    """Bytes of the messages of one phase.

    Attributes:
        up: Client -> bytes of its answers.
        down: Client -> bytes of the requests to it.
    """

    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)

    @property
    def clients(self) -> set[str]:
        """The clients that have sent or received messages."""
        return set(self.up) | set(self.down)

    @property
    def total(self) -> int:
        """Bytes of all clients, both ways."""
        return sum(self.up.values()) + sum(self.down.values())

    def add(self, client: str, *, up: int = 0, down: int = 0) -> None:
        """Add the bytes of one message, or of several."""
        self.up[client] = self.up.get(client, 0) + up
        self.down[client] = self.down.get(client, 0) + down


@dataclass
class Traffic:
    """The account of a round, saved now and then: a process that ends loses the bytes since the last save.

    Attributes:
        phases: Name of a phase -> its bytes, in the order in which they began.
        path: Its file; None to keep no file.
    """

    phases: dict[str, Moved] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)
    _saved: float = field(default=float("-inf"), compare=False, repr=False)

    @classmethod
    def read(cls, path: Path) -> Traffic:
        """Return the account of a file, an empty one if the file is missing; later additions are saved there.

        Raises:
            StoreError: The file is damaged.
        """
        facts = read_json(path) if path.exists() else {"phases": {}}
        try:
            return cls({name: _moved(phase) for name, phase in facts["phases"].items()}, path)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise StoreError(f"{path} is not an account of messages: it lacks bytes per client, up and down") from error

    @classmethod
    def sum_of(cls, accounts: Iterable[Traffic]) -> Traffic:
        """Return one account of several rounds, phase by phase."""
        whole = cls()
        for account in accounts:
            for phase, moved in account.phases.items():
                for client in sorted(moved.clients):
                    whole.add(phase, client, up=moved.up.get(client, 0), down=moved.down.get(client, 0))
        return whole

    def add(self, phase: str, client: str, *, up: int = 0, down: int = 0) -> None:
        """Add the bytes of one message, or of several, to a phase."""
        self.phases.setdefault(phase, Moved()).add(client, up=up, down=down)

    def save(self, *, interval_s: float = 0.0) -> None:
        """Write the file, unless the last write was less than ``interval_s`` ago.

        A disk that refuses only causes a warning: an incomplete account must not end a run.
        """
        if self.path is None or time.monotonic() - self._saved < interval_s:
            return
        try:
            write_json(self.path, self.as_json())
        except StoreError as error:
            LOG.warning("%s", error)
        self._saved = time.monotonic()

    def as_json(self) -> dict[str, Any]:
        """Return the account in the form of its file."""
        return {"phases": {name: asdict(moved) for name, moved in self.phases.items()}}

    @property
    def clients(self) -> set[str]:
        """The clients that have sent or received messages in any phase."""
        return set().union(*(moved.clients for moved in self.phases.values()))

    @property
    def up(self) -> dict[str, int]:
        """Client -> bytes of its answers, over all phases."""
        return _over_phases(moved.up for moved in self.phases.values())

    @property
    def down(self) -> dict[str, int]:
        """Client -> bytes of the requests to it, over all phases."""
        return _over_phases(moved.down for moved in self.phases.values())

    @property
    def mib_per_client(self) -> float:
        """Mean MiB per client so far, both ways and over all phases; 0 without clients."""
        return sum(moved.total for moved in self.phases.values()) / max(1, len(self.clients)) / MIB


def _moved(facts: Mapping[str, Mapping[str, int]]) -> Moved:
    up, down = ({str(client): int(size) for client, size in facts[way].items()} for way in ("up", "down"))
    return Moved(up, down)


def _over_phases(phases: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for phase in phases:
        for client, size in phase.items():
            total[client] = total.get(client, 0) + size
    return total
