"""The conversation with the nodes: one engine sends, pulls, waits, asks again, refuses, books bytes and knows names.

:class:`Nodes` lasts as long as a run, :class:`Exchange` is one question to some of them. Uploads, questions after the
upload and rounds of federated learning differ in what they ask, in what they take for an answer, and in how many
answers are enough.

Flower's own ``send_and_receive`` holds all replies in memory at once, drops late ones, and its node sampling never
gives up. Here answers are pulled one at a time, and nodes that connect meanwhile are asked too.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid

from ..core.errors import UploadError
from .messages import count_bytes
from .names import Names

if TYPE_CHECKING:
    from ..run.run_folder import RoundFolder
    from ..run.traffic import Traffic

POLL_S, DEPLOYED_POLL_S = 0.1, 0.2
# Every id is a call of its own: hundreds of nodes are looked at in turns.
PULLS_PER_POLL = 16
LOG_EVERY_S = 9.0
# Nodes of a simulation register at its start, within moments of each other.
SETTLE_S = 2.0
# One, and again after each of two failures of the node.
MOST_QUESTIONS = 3
# The message, its answer, the SuperNode or the ClientApp's process is gone; Flower gives these, never a client.
LOST_CODES = {
    ErrorCode.MESSAGE_UNAVAILABLE: "the question or its answer was lost on its way",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer was lost on its way",
    ErrorCode.NODE_UNAVAILABLE: "the connection to the node was lost",
    ErrorCode.CLIENT_APP_CRASHED: "the process of its ClientApp ended without an answer",
}
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
class Pace:
    """How often an exchange looks for answers and nodes.

    Attributes:
        poll_s: Seconds between two looks at the answers.
        look_s: Seconds between two looks at the connected nodes.
        pulls: The most answers that one look asks for; None for all.
    """

    poll_s: float
    look_s: float = 0.0
    pulls: int | None = PULLS_PER_POLL


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
        except Exception as error:
            if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _TRANSPORT:
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


class Exchange:
    """One question to every node that it is meant for.

    A node whose machine or connection failed is asked again as soon as it is connected, a bounded number of times. An
    answer of its client, an error of its own included, is final: nobody is asked twice for one.

    Args:
        nodes: The nodes.
        phase: What the bytes are booked under.
        question: Node -> the message to it; None if it is not asked.
        receive: Takes an answer and what it answers; the reply that Flower makes up in a node's place does not bear
            its id. Returns whether the client has given what it was asked for, or raises an UploadError.
        unneeded: Whether the answer of a node is here already, from another node: it is not waited for.
        pace: How often answers and nodes are looked for; None for that of uploads.

    Attributes:
        questions: Node -> how often it was asked.
        sent_bytes: Node -> bytes of what it was sent.
    """

    def __init__(
        self,
        nodes: Nodes,
        phase: str,
        *,
        question: Callable[[int], Message | None],
        receive: Callable[[Message, Sent], bool],
        unneeded: Callable[[int], bool] = lambda node: False,  # noqa: ARG005  nobody is known to be two nodes
        pace: Pace | None = None,
    ) -> None:
        self._nodes, self._phase = nodes, phase
        self._question, self._receive, self._unneeded = question, receive, unneeded
        self._pace = pace or Pace(POLL_S if nodes.simulated else DEPLOYED_POLL_S)
        self._pending: dict[str, Sent] = {}
        self._asked: set[int] = set()
        self.questions: Counter[int] = Counter()
        self._away: dict[int, str] = {}
        self._failed: set[int] = set()
        self._began = time.monotonic()
        self._looked = float("-inf")
        self._asking = True
        self.sent_bytes: Counter[int] = Counter()

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ids of the nodes that were asked and have not answered."""
        return tuple(sent.node for sent in self._pending.values() if not self._unneeded(sent.node))

    @property
    def away(self) -> dict[int, str]:
        """Nodes that were asked, failed, and have not come back to be asked again, with the reason."""
        return {node: reason for node, reason in self._away.items() if not self._unneeded(node)}

    @property
    def failed(self) -> int:
        """How many nodes have answered without giving anything; one client may be two nodes."""
        return sum(not self._unneeded(node) for node in self._failed)

    @property
    def asked(self) -> int:
        """How many nodes were asked."""
        return len(self.questions)

    @property
    def waited(self) -> float:
        """Seconds since the question was asked first."""
        return time.monotonic() - self._began

    def wait(self, timeout_s: float, enough: Callable[[], bool], progress: Callable[[], str]) -> None:
        """Ask and take answers until they are enough, or for ``timeout_s`` seconds.

        Args:
            timeout_s: Seconds from the beginning.
            enough: Whether to stop; asked after every look.
            progress: The line that is logged every few seconds.
        """
        logged = time.monotonic()
        while True:
            self.poll()
            self.look()  # last: a node that has just failed and is connected is asked again, not left behind
            if enough() or self.waited >= timeout_s:
                break
            if time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                log(INFO, "%s", progress())
            time.sleep(min(self._pace.poll_s, max(0.0, timeout_s - self.waited)))
        self._asking = False

    def refuse_missing(self, reason: str) -> None:
        """Note the nodes that have not answered, and those that have not come back."""
        for node in self.waiting_for:
            self._nodes.refuse(node, reason)
        for node, lost in self.away.items():
            self._nodes.refuse(node, f"{lost}, and it has not come back")

    def close(self, hear: Callable[[Message, Sent], object]) -> None:
        """Leave the answers that have not come to ``hear``, and their nodes in peace until then."""
        for message_id, sent in self._pending.items():
            self._nodes.leave(message_id, sent, hear)
        self._pending.clear()

    def poll(self, *, everybody: bool = False) -> None:
        """Take answers that are there; returns at once.

        Args:
            everybody: Look for the answer of each node now, instead of some in turn.
        """
        for message_id in list(self._pending)[: None if everybody else self._pace.pulls]:
            self._pull(message_id)

    def look(self) -> None:
        """Ask the nodes that are connected and have not been asked, and again those that have come back."""
        if time.monotonic() - self._looked < self._pace.look_s:
            return
        self._looked = time.monotonic()
        connected = self._nodes.connected()
        for message_id, sent in list(self._pending.items()):
            # A SuperNode that started anew has forgotten its question, and Flower would wait for its answer for hours.
            anew = sent.activated and connected.get(sent.node, sent.activated) != sent.activated
            if anew and not self._pull(message_id):  # it may have answered before
                del self._pending[message_id]
                self._fail(sent.node, "its SuperNode was restarted")
        for node in sorted(set(connected) - self._asked - self._failed):
            self._ask(node, connected[node])

    def _pull(self, message_id: str) -> bool:
        """Take an answer if it is there; return whether it was."""
        sent = self._pending.pop(message_id)
        try:
            reply = self._nodes.pull(message_id)
            if reply is None:
                self._pending[message_id] = sent  # behind the others
                return False
            if reply.has_error() and reply.error.code in LOST_CODES:
                self._fail(sent.node, LOST_CODES[reply.error.code])
            elif not self._receive(reply, sent):
                self._failed.add(sent.node)
        except UploadError as error:
            self._failed.add(sent.node)
            self._nodes.refuse(sent.node, error.reason, error.client)
        return True

    def _fail(self, node: int, reason: str) -> None:
        if not self._asking or self.questions[node] >= MOST_QUESTIONS:
            self._failed.add(node)
            times = self.questions[node]
            self._nodes.refuse(node, f"{reason}, {times} times" if times > 1 else reason)
            return
        self._asked.discard(node)
        self._away[node] = reason
        self._looked = float("-inf")  # it may be connected
        log(INFO, "%s: %s; it is asked again when it is connected", self._nodes.names.call(node), reason)

    def _ask(self, node: int, activated: str) -> None:
        message = self._question(node)
        if message is None:
            return
        self._asked.add(node)
        self._away.pop(node, None)
        self.questions[node] += 1
        sent = Sent(node, self._phase, count_bytes(message.content), activated)
        if message_id := self._nodes.push(message):
            self._pending[message_id] = sent
            self.sent_bytes[node] += sent.size
        else:
            self._failed.add(node)
            self._nodes.refuse(node, "the node has left")


def own_error(reply: Message) -> str:
    """Return the line of a client's failure that says what happened: errors come as whole coloured tracebacks."""
    reason = reply.error.reason or f"error code {reply.error.code}"
    lines = [line.strip() for line in _ANSI.sub("", reason).splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no reason given"


def is_simulation(grid: Grid) -> bool:
    """Tell whether the ServerApp runs beside Flower's simulation engine, which starts and ends Ray itself."""
    return hasattr(grid, "pull_interval")
