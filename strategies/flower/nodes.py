"""The nodes of a run: who is connected and called what, one message there and one answer back, refusals and bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from ..core.errors import UploadError
from .names import Names

if TYPE_CHECKING:
    from ..run.run_folder import RoundFolder
    from ..run.traffic import Traffic

# Nodes of a simulation register at its start, within moments of each other.
SETTLE_S = 2.0
# Packages whose errors say that the SuperLink is out of reach, which no node can bring about.
_TRANSPORT = {"httpx", "httpcore"}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Limits:
    """Bounds on an answer.

    Attributes:
        timeout_s: Seconds after which a question is given up.
        max_bytes: Largest accepted answer.
    """

    timeout_s: float
    max_bytes: int = 2**28


@dataclass(frozen=True)
class Sent:
    """A question on its way.

    Attributes:
        node: The node that it went to.
        phase: The phase of the run that its bytes are booked under.
        size: Its bytes.
        activated: When the SuperLink last activated that node; empty if it does not say.
    """

    node: int
    phase: str
    size: int
    activated: str = ""


class Refusals:
    """Notes and logs answers that do not count, each client and reason once.

    Args:
        folder: Where they are noted.
    """

    def __init__(self, folder: RoundFolder) -> None:
        self._folder = folder
        self._known: set[tuple[str, str]] = set()

    def add(self, client: str, reason: str) -> None:
        """Note a refusal."""
        if (client, reason) not in self._known:
            self._known.add((client, reason))
            self._folder.refuse(client, reason)
            log(WARNING, "refused %s: %s", client, reason)


class Nodes:
    """The nodes of a run and the messages between them and the server.

    Args:
        grid: Flower's grid.
        refusals: Where refusals are noted.
        traffic: Where bytes are booked.
        names: The clients' names; those that earlier rounds have learned, or None.

    Attributes:
        grid: As given.
        refusals: As given.
        traffic: As given.
        names: As given, or new.
        simulated: Whether Flower's simulation engine runs beside this process.
    """

    def __init__(self, grid: Grid, refusals: Refusals, traffic: Traffic, names: Names | None = None) -> None:
        self.grid, self.refusals, self.traffic = grid, refusals, traffic
        self.names = Names() if names is None else names
        self.simulated = is_simulation(grid)
        self._late: dict[str, tuple[Sent, Callable[[Message, Sent], object]]] = {}
        self._seen: set[int] = set()
        self._joined = time.monotonic()

    @property
    def settled(self) -> bool:
        """Whether no new node has connected for a while."""
        return time.monotonic() - self._joined >= SETTLE_S

    def connected(self) -> dict[int, str]:
        """Return the connected nodes, and when each was activated if the SuperLink says so."""
        if self.simulated or not hasattr(self.grid, "get_nodes"):
            found = dict.fromkeys(self.grid.get_node_ids(), "")
        else:
            found = {info.node_id: info.last_activated_at for info in self.grid.get_nodes()}
        if not self._seen.issuperset(found):
            self._seen.update(found)
            self._joined = time.monotonic()
        return found

    def push(self, message: Message) -> str | None:
        """Send a message and return its id; None if its node has left."""
        # One push per node: an id that comes back belongs to it, and a node unknown by now gives none.
        ids = list(self.grid.push_messages([message]))
        return ids[0] if ids and ids[0] else None

    def pull(self, message_id: str) -> Message | None:
        """Return the answer to one message, None if it has not come.

        Raises:
            UploadError: It cannot be read, whatever its bytes raise.
        """
        try:
            replies = list(self.grid.pull_messages([message_id]))
        except BaseException as error:
            ours = isinstance(error, OSError) or not isinstance(error, Exception)
            if ours or type(error).__module__.partition(".")[0] in _TRANSPORT:
                raise
            raise UploadError(f"its answer cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
        return replies[0] if replies else None

    def busy(self) -> set[int]:
        """Take answers that came late, and return the nodes that still owe one: they are not asked meanwhile."""
        for message_id, (sent, hear) in list(self._late.items()):
            try:
                reply = self.pull(message_id)
                if reply is not None:
                    del self._late[message_id]
                    hear(reply, sent)
            except UploadError as error:
                self._late.pop(message_id, None)
                log(WARNING, "late: %s", error.of(self.names.call(sent.node)))
        return {sent.node for sent, _ in self._late.values()}

    def leave(self, message_id: str, sent: Sent, hear: Callable[[Message, Sent], object]) -> None:
        """Stop waiting for an answer; ``hear`` gets it if it comes after all."""
        self._late[message_id] = sent, hear

    def refuse(self, node: int, reason: str, client: str = "") -> None:
        """Note that an answer of a node does not count, under the client's name if it is known."""
        self.refusals.add(client or self.names.call(node), reason)

    def save_traffic(self, *, interval_s: float = 0.0) -> None:
        """Write the account of bytes, unless that was done less than ``interval_s`` ago."""
        self.traffic.save(lambda line: log(WARNING, "%s", line), interval_s=interval_s)


def own_error(reply: Message) -> str:
    """Return the line of a client's failure that says what happened: errors come as whole coloured tracebacks."""
    reason = reply.error.reason or f"error code {reply.error.code}"
    lines = [line.strip() for line in _ANSI.sub("", reason).splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no reason given"


def is_simulation(grid: Grid) -> bool:
    """Tell whether the ServerApp runs beside Flower's simulation engine, which starts and ends Ray itself."""
    return hasattr(grid, "pull_interval")
