"""Asking every node once and taking the answers one by one, in simulation and in deployment alike.

Flower's own ``send_and_receive`` holds all replies in memory at once, drops late ones, and its node sampling waits
for ever. Here ids are pulled one at a time, answered ones are dropped, and nodes that connect meanwhile are asked too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flwr.app import Message
from flwr.serverapp import Grid

POLL_S = 0.1
LOG_EVERY_S = 9.0
# Nodes of a simulation register at its start, within moments of each other.
SETTLE_S = 2.0


class Exchange:
    """One question to every node.

    Args:
        grid: Flower's grid.
        question: Node id -> the message to it.
        receive: Called with every reply as it arrives; whatever it keeps is its own affair.
        lost: Called with the id of a node that could not be asked.
        log: Takes a line for the user.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        question: Callable[[int], Message],
        receive: Callable[[Message], None],
        lost: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self._grid = grid
        self._question = question
        self._receive = receive
        self._lost = lost
        self._log = log
        self._pending: dict[str, int] = {}
        self._asked: set[int] = set()
        self._last_joined = time.monotonic()

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ids of the nodes that were asked and have not answered."""
        return tuple(self._pending.values())

    @property
    def asked(self) -> int:
        """How many nodes were asked."""
        return len(self._asked)

    def wait(self, deadline_s: float, min_nodes: int, progress: Callable[[], str]) -> bool:
        """Ask and take answers until every asked node has answered, or the deadline.

        Args:
            deadline_s: Seconds from now.
            min_nodes: In deployment, keep waiting for nodes to connect until there are this many.
            progress: Returns what has arrived so far, for the log.

        Returns:
            True if every asked node has answered, False at the deadline.
        """
        began = logged = time.monotonic()
        while True:
            self._ask_new_nodes()
            self.poll()
            now = time.monotonic()
            settled = now - self._last_joined >= SETTLE_S
            complete = len(self._asked) >= min_nodes or is_simulation(self._grid)
            if not self._pending and settled and complete and self._asked:
                return True
            if now - began >= deadline_s:
                return False
            if now - logged >= LOG_EVERY_S:
                logged = now
                left = f"{deadline_s - (now - began):.0f} s to the deadline"
                self._log(f"uploads: {progress()}, waiting for {len(self._pending)} of {self.asked} nodes, {left}")
            time.sleep(min(POLL_S, max(0.0, deadline_s - (now - began))))

    def poll(self) -> None:
        """Take the answers that are there; returns at once."""
        for message_id in list(self._pending):
            for reply in self._grid.pull_messages([message_id]):
                self._pending.pop(message_id, None)
                self._receive(reply)

    def _ask_new_nodes(self) -> None:
        for node_id in sorted(set(self._grid.get_node_ids()) - self._asked):
            self._asked.add(node_id)
            self._last_joined = time.monotonic()
            # One push per node: an id that comes back belongs to it; a node unknown by now gives none.
            ids = list(self._grid.push_messages([self._question(node_id)]))
            if ids:
                self._pending[ids[0]] = node_id
            else:
                self._lost(node_id)


def is_simulation(grid: Grid) -> bool:
    """Tell whether the ServerApp runs beside Flower's simulation engine, which starts and ends Ray itself."""
    return hasattr(grid, "pull_interval")
