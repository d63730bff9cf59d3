"""The nodes of a run: connection and names, one message there and one answer back, refusals and bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import WARNING
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from ..core import refusals
from ..core.errors import OneShotError, UploadError, one_line, with_remedy
from .local_grid import LocalGrid
from .names import ClientNames
from .pulling import Puller

if TYPE_CHECKING:
    from ..run.run_folder import RoundFolder
    from ..run.traffic import Traffic

# Nodes of a simulation register at its start, within moments of each other.
SETTLE_S = 2.0
MAX_BYTES = 2**28
# A client's error as Flower writes it, and the error that Flower puts around it in a simulation.
_WRAPPED = re.compile(r"<class '(?P<kind>[\w.()]+)'>:<'(?P<text>.*)'>", re.DOTALL)
_BY_FLOWER = "ClientAppException"
# What is missing in a request for a ClientApp of another API or workflow -> what it is, and what to do.
FOREIGN_APPS = {
    **dict.fromkeys(
        ("fitins.parameters", "evaluateins.parameters"),
        "its ClientApp is a NumPyClient or Client of Flower's former API (client_fn), which message-based strategies "
        "cannot ask: must be a ClientApp with @app.train()",
    ),
    "secaggplus_configs": "its ClientApp has the mod secaggplus_mod or secagg_mod, which hides its model from "
    "the server and answers SecAggPlusWorkflow alone: must be without this mod",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class SentQuestion:
    """A question on its way.

    Attributes:
        size: Its bytes.
        activated: When the SuperLink last activated that node; empty if unknown.
    """

    node: int
    phase: str
    size: int
    activated: str = ""

    def is_forgotten(self, connected: Mapping[int, str]) -> bool:
        """Return whether the node's SuperNode was restarted since; Flower would wait for the answer for hours."""
        return bool(self.activated) and connected.get(self.node, self.activated) != self.activated


class Refusals:
    """Records and logs answers that do not count, each client and reason once.

    Args:
        folder: The folder of the records; None for the log alone. What a crashed process recorded there is not recorded
            again when a node gives the resumed one the same answer.

    Attributes:
        recorded: Client and reason of this process' refusals, in order.
    """

    def __init__(self, folder: RoundFolder | None) -> None:
        self._folder = folder
        self._recorded = {(row["client"], row["reason"]) for row in folder.refused()} if folder is not None else set()
        self.recorded: dict[tuple[str, str], None] = {}  # an ordered set

    def add(self, client: str, reason: str) -> None:
        """Record a refusal."""
        found = client, one_line(reason)
        if found in self.recorded:
            return
        self.recorded[found] = None
        if self._folder is not None and found not in self._recorded:
            self._folder.refuse(*found)
        log(WARNING, "refused %s: %s", *found)


class Nodes:
    """The nodes of a run and the messages between them and the server.

    Args:
        traffic: The account of bytes.
        names: The clients' names from earlier rounds, or None.
        max_bytes: The largest answer, all records together.

    Attributes:
        simulated: Whether the nodes are simulated on this machine.
        local: Whether they are simulated in this process, and answer when their answers are pulled.
    """

    def __init__(
        self,
        grid: Grid,
        refusals: Refusals,
        traffic: Traffic,
        names: ClientNames | None = None,
        *,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.grid, self.refusals, self.traffic, self.max_bytes = grid, refusals, traffic, max_bytes
        self.names = ClientNames() if names is None else names
        self.local = isinstance(grid, LocalGrid)
        self.simulated = self.local or has_engine(grid)
        self._late: dict[str, tuple[SentQuestion, Callable[[Message, SentQuestion], object]]] = {}
        self._seen: set[int] = set()
        self._joined = time.monotonic()
        self._puller = Puller(grid, max_bytes)

    @property
    def settled(self) -> bool:
        """Whether no new node has connected for a while, or none can."""
        return self.local or time.monotonic() - self._joined >= SETTLE_S

    def connected(self) -> dict[int, str]:
        """Return the connected nodes, with the time of their activation if the SuperLink reports it."""
        if self.simulated or not hasattr(self.grid, "get_nodes"):
            found = dict.fromkeys(self.grid.get_node_ids(), "")
        else:
            infos = list(self.grid.get_nodes())
            self.names.identify(infos)
            found = {info.node_id: info.last_activated_at for info in infos}
        if not self._seen.issuperset(found):
            self._seen.update(found)
            self._joined = time.monotonic()
        return found

    def present(self) -> set[int]:
        """Return the connected nodes that get questions."""
        return set(self.connected()) - self.names.barred

    def push(self, message: Message) -> str | None:
        """Send a message and return its id; None if its node has left."""
        # One push per node: a returned id belongs to it, and a node that has become unknown gives none.
        ids = list(self.grid.push_messages([message]))
        return ids[0] if ids and ids[0] else None

    def pull(self, message_id: str, node: int) -> Message | None:
        """Return the answer to one message; None if it has not arrived whole.

        Args:
            node: The node that it went to. The answer bears this id: a node may write another one into its answer, and
                Flower writes none of a node into an answer that it makes up.

        Raises:
            UploadError: It is larger than ``max_bytes``.
        """
        reply = self._puller.pull(message_id)
        if reply is not None:
            reply.metadata.__dict__["_src_node_id"] = node  # Flower has no setter for it
        return reply

    @contextmanager
    def guarded(self, node: int) -> Iterator[None]:
        """Refuse a node whose answer cannot be inflated or decoded, and send it no more questions.

        Raises:
            UploadError: The block raised an error that is not one of ours.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, OneShotError) or not isinstance(error, Exception):
                raise
            self.grid.get_node_ids()  # raises if the grid itself has failed, not the answer
            self.names.barred.add(node)
            raise refusals.unreadable_answer(f"{type(error).__name__}: {_last_line(str(error))}") from error

    def busy(self) -> set[int]:
        """Take late answers, and return the nodes that still owe one: they get no question meanwhile."""
        connected = self.connected() if self._late else {}
        for message_id, (sent, receive) in list(self._late.items()):
            try:
                with self.guarded(sent.node):
                    reply = self.pull(message_id, sent.node)
                    if reply is not None:
                        del self._late[message_id]
                        receive(reply, sent)
                    elif sent.is_forgotten(connected):
                        del self._late[message_id]
            except UploadError as error:
                self._late.pop(message_id, None)
                log(WARNING, "late: %s", error.of(self.names.describe(sent.node)))
        return {sent.node for sent, _ in self._late.values()}

    def leave(self, message_id: str, sent: SentQuestion, receive: Callable[[Message, SentQuestion], object]) -> None:
        """Stop waiting for an answer; ``receive`` receives it if it arrives after all."""
        self._late[message_id] = sent, receive

    def refuse(self, node: int, error: UploadError) -> None:
        """Record that an answer of a node does not count.

        The record has the name that the node is known by. Only for a node without one it has that of the error, which
        the answer claims to be: a claimed name must not put the blame on another client.
        """
        self.refusals.add(self.names.describe(node, error.client), error.reason)


def cause_of_failure(reply: Message) -> str:
    """Return the cause of a client's failure in one line, with the type of the error.

    Flower gives an error as its class and its text, in a simulation inside Ray's coloured traceback. The errors of a
    ClientApp of Flower's former API, and of one with a mod of another workflow, become what they mean.
    """
    reason = _ANSI.sub("", reply.error.reason or f"error code {reply.error.code}")
    for sign, meaning in FOREIGN_APPS.items():
        if sign in reason:
            return meaning
    wrapped = _WRAPPED.fullmatch(reason.strip())
    if wrapped is None:
        return with_remedy(_last_line(reason))
    kind, text = wrapped["kind"].rpartition(".")[2], wrapped["text"]
    if _BY_FLOWER not in f"{kind} {text}":
        return with_remedy(f"{kind}: {_last_line(text)}")
    first, direct, _ = text.partition("The above exception was the direct cause")
    return with_remedy(_last_line(first if direct else text.rpartition("Message: ")[2]))


def _last_line(reason: str) -> str:
    lines = [line.strip() for line in _ANSI.sub("", reason).splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no reason given"


def has_engine(grid: Grid) -> bool:
    """Return whether the ServerApp runs beside Flower's simulation engine, which starts and ends Ray itself."""
    return hasattr(grid, "pull_interval")
