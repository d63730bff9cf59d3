"""Asking every node and taking the answers one by one, in simulation and in deployment alike.

Flower's own ``send_and_receive`` holds all replies in memory at once, drops late ones, and its node sampling waits
for ever. Here ids are pulled one at a time, answered ones are dropped, and nodes that connect meanwhile are asked too.

A node whose machine or connection failed is asked again as soon as it is connected, a bounded number of times: what
its client says itself, an error of its own included, is an answer, and nobody is asked twice for one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

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


@dataclass(frozen=True)
class _Sent:
    """A question on its way.

    Attributes:
        node: Whom it went to.
        activated: When that node was last activated, as the SuperLink says; empty if it does not.
    """

    node: int
    activated: str


class Exchange:
    """One question to every node.

    Args:
        grid: Flower's grid.
        question: Node id -> the message to it.
        receive: Called with every reply as it arrives and the id of its node, for a reply that Flower makes up does not
            bear it; whatever it keeps is its own affair. Returns whether the client has given what it was asked for.
        lost: Called with the id of a node that will not be asked again, and the reason.
        log: Takes a line for the user.
        unneeded: Tells of a node that its answer is here already, from another node: it is not waited for.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        question: Callable[[int], Message],
        receive: Callable[[Message, int], bool],
        lost: Callable[[int, str], None],
        log: Callable[[str], None],
        unneeded: Callable[[int], bool] = lambda node: False,  # noqa: ARG005  nobody is known to be two nodes
    ) -> None:
        self._grid = grid
        self._question = question
        self._receive = receive
        self._lost = lost
        self._log = log
        self._unneeded = unneeded
        self._pending: dict[str, _Sent] = {}
        self._asked: set[int] = set()
        self._questions: Counter[int] = Counter()
        self._away: dict[int, str] = {}
        self._failed: set[int] = set()
        self._last_joined = time.monotonic()
        self._asking = True
        self._poll_s = POLL_S if is_simulation(grid) else DEPLOYED_POLL_S

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ids of the nodes that were asked and have not answered."""
        return tuple(sent.node for sent in self._pending.values() if not self._unneeded(sent.node))

    @property
    def away(self) -> dict[int, str]:
        """Nodes that were asked, failed, and have not come back to be asked again, with the reason."""
        return {node: reason for node, reason in self._away.items() if not self._unneeded(node)}

    @property
    def asked(self) -> int:
        """How many nodes were asked."""
        return len(self._questions)

    def wait(self, deadline_s: float, min_clients: int, here: Callable[[], int]) -> bool:
        """Ask and take answers until every asked node has answered, or the deadline.

        Args:
            deadline_s: Seconds from now.
            min_clients: In deployment, keep waiting for nodes to connect, or to come back, until so many clients have
                given something or said why not.
            here: Returns how many clients have given something.

        Returns:
            True if every asked node has answered, False at the deadline.
        """
        began = logged = time.monotonic()
        while self._asking:
            self.poll()
            self._ask_nodes()  # last: a node that has just failed and is connected is asked again, not left behind
            now, waiting = time.monotonic(), self.waiting_for
            settled = now - self._last_joined >= SETTLE_S
            without = sum(not self._unneeded(node) for node in self._failed)  # one client may have been two nodes
            complete = is_simulation(self._grid) or here() + without >= min_clients
            if (not waiting and settled and complete and self._questions) or now - began >= deadline_s:
                self._asking = False
                break
            if now - logged >= LOG_EVERY_S:
                logged = now
                away = f", {len(self.away)} have lost their connection" if self.away else ""
                left = f"{deadline_s - (now - began):.0f} s to the deadline"
                self._log(f"uploads: {here()} here, waiting for {len(waiting)} of {self.asked} nodes{away}, {left}")
            time.sleep(min(self._poll_s, max(0.0, deadline_s - (now - began))))
        return not self.waiting_for

    def poll(self, *, everybody: bool = False) -> None:
        """Take answers that are there; returns at once.

        Args:
            everybody: Look for the answer of each node now, instead of some in turn.
        """
        for message_id in list(self._pending)[: None if everybody else PULLS_PER_POLL]:
            self._pull(message_id)

    def _pull(self, message_id: str) -> bool:
        """Take an answer if it is there; return whether it was."""
        sent = self._pending.pop(message_id)
        replies = list(self._grid.pull_messages([message_id]))
        if not replies:
            self._pending[message_id] = sent  # behind the others
        for reply in replies:
            self._take(reply, sent.node)
        return bool(replies)

    def _take(self, reply: Message, node: int) -> None:
        if reply.has_error() and reply.error.code in LOST_CODES:
            self._fail(node, LOST_CODES[reply.error.code])
        elif not self._receive(reply, node):
            self._failed.add(node)

    def _fail(self, node: int, reason: str) -> None:
        if not self._asking or self._questions[node] >= MOST_QUESTIONS:
            self._failed.add(node)
            times = self._questions[node]
            self._lost(node, f"{reason}, {times} times" if times > 1 else reason)
            return
        self._asked.discard(node)
        self._away[node] = reason
        self._log(f"node-{node}: {reason}; it is asked again when it is connected")

    def _ask_nodes(self) -> None:
        listed = self._listed()
        for message_id, sent in list(self._pending.items()):
            # A SuperNode that started anew has forgotten its question, and Flower would wait for its answer for hours.
            anew = sent.activated and listed.get(sent.node, sent.activated) != sent.activated
            if anew and not self._pull(message_id):  # it may have answered before
                del self._pending[message_id]
                self._fail(sent.node, "its SuperNode was restarted")
        for node in sorted(set(listed) - self._asked - self._failed):
            self._ask(node, listed[node])

    def _ask(self, node: int, activated: str) -> None:
        if node not in self._questions:
            self._last_joined = time.monotonic()
        self._asked.add(node)
        self._away.pop(node, None)
        self._questions[node] += 1
        # One push per node: an id that comes back belongs to it; a node unknown by now gives none.
        ids = list(self._grid.push_messages([self._question(node)]))
        if ids and ids[0]:
            self._pending[ids[0]] = _Sent(node, activated)
        else:
            self._failed.add(node)
            self._lost(node, "the node has left")

    def _listed(self) -> dict[int, str]:
        """Return the connected nodes, and when each was activated if that is known."""
        if is_simulation(self._grid) or not hasattr(self._grid, "get_nodes"):
            return dict.fromkeys(self._grid.get_node_ids(), "")
        return {info.node_id: info.last_activated_at for info in self._grid.get_nodes()}


def is_simulation(grid: Grid) -> bool:
    """Tell whether the ServerApp runs beside Flower's simulation engine, which starts and ends Ray itself."""
    return hasattr(grid, "pull_interval")
