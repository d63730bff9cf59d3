"""The conversation with the nodes: one engine sends, pulls, waits, repeats and refuses.

An :class:`Exchange` is one question to some nodes. Uploads, questions after the upload and rounds of federated learning
differ in their questions, in the form of an answer, and in how many answers are enough.

Flower's own ``send_and_receive`` holds all replies in memory at once, drops late ones, and its node sampling never
gives up. Here answers are pulled one at a time, and nodes that connect later are asked too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from logging import INFO

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from ..core import refusals
from ..core.errors import UploadError
from .messages import count_bytes
from .nodes import Nodes, SentQuestion

POLL_S = 0.1
DEPLOYED_POLL_S = 0.2
LOCAL_POLL_S = 0.001
# The longer real nodes are quiet, the later the next look: by this share of the time, up to a second. No answer is
# delayed by more, and a SuperLink whose clients train for hours is asked once a second.
QUIET_SHARE, LONGEST_POLL_S = 0.05, 1.0
# Every id is a call of its own: of hundreds of silent nodes, some are looked at in turn.
PULLS_PER_POLL = 16
LOG_EVERY_S = 9.0
# One question, and one more after each of two failures of the node.
MOST_QUESTIONS = 3
# The message, its answer, the SuperNode or the ClientApp's process is lost; Flower sends these codes, never a client.
LOST_CODES = {
    ErrorCode.MESSAGE_UNAVAILABLE: "the question or its answer was lost on its way",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its answer was lost on its way",
    ErrorCode.NODE_UNAVAILABLE: "the connection to the node was lost",
    ErrorCode.CLIENT_APP_CRASHED: "the process of its ClientApp ended without an answer",
}


class Exchange:
    """One question to a set of nodes.

    A node whose machine or connection failed is asked again as soon as it is connected, a bounded number of times. An
    answer of its client is final, even if it is an error: no client gets a second question for one answer.

    Args:
        question: Node -> the message to it; None to leave it out.
        receive: Takes an answer and its question. Returns whether the client has met the request, or raises an
            UploadError.
        unneeded: Whether another node has already given a node's answer: the exchange then does not wait for it.
        poll_s: Seconds between two looks at the answers, as long as they come; None for those of uploads.
        look_s: Seconds between two looks at the connected nodes.

    Attributes:
        questions: Node -> how often it was asked.
        sent_bytes: Node -> bytes of its questions.
    """

    def __init__(
        self,
        nodes: Nodes,
        phase: str,
        *,
        question: Callable[[int], Message | None],
        receive: Callable[[Message, SentQuestion], bool],
        unneeded: Callable[[int], bool] = lambda node: False,  # noqa: ARG005  no client runs two nodes as far as known
        poll_s: float | None = None,
        look_s: float = 0.0,
    ) -> None:
        self._nodes, self._phase = nodes, phase
        self._question, self._receive, self._unneeded = question, receive, unneeded
        usual = POLL_S if nodes.simulated else DEPLOYED_POLL_S
        self._poll_s, self._look_s = usual if poll_s is None else poll_s, look_s
        self._pending: dict[str, SentQuestion] = {}
        self._asked: set[int] = set()
        self.questions: Counter[int] = Counter()
        self._away: dict[int, str] = {}
        self._failed: set[int] = set()
        self._began = time.monotonic()
        self._looked = float("-inf")
        self._heard = self._began  # when a question was last sent or answered
        self._asking = True
        self.sent_bytes: Counter[int] = Counter()

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Ids of the nodes that were asked and have not answered."""
        return tuple(sent.node for sent in self._pending.values() if not self._unneeded(sent.node))

    @property
    def away(self) -> dict[int, str]:
        """Nodes that were asked, failed, and have not connected again, with the reason."""
        return {node: reason for node, reason in self._away.items() if not self._unneeded(node)}

    @property
    def failed(self) -> int:
        """The number of nodes whose answers gave nothing; one client may run two nodes."""
        return sum(not self._unneeded(node) for node in self._failed)

    @property
    def asked(self) -> int:
        """The number of nodes asked."""
        return len(self.questions)

    @property
    def waited(self) -> float:
        """Seconds since the first question."""
        return time.monotonic() - self._began

    def wait(self, timeout_s: float, enough: Callable[[], bool], progress: Callable[[], str]) -> None:
        """Ask and take answers until they suffice, or for ``timeout_s`` seconds.

        Args:
            timeout_s: Seconds from the beginning.
            enough: Whether to stop; called after every look.
            progress: The line that is logged every few seconds.
        """
        logged = time.monotonic()
        while True:
            self.poll()
            self.look()  # last: it repeats the question to a node that has just failed and is still connected
            if enough() or self.waited >= timeout_s:
                break
            if time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                log(INFO, "%s", progress())
            time.sleep(min(self._pause(), max(0.0, timeout_s - self.waited)))
        self._asking = False

    def _pause(self) -> float:
        if self._nodes.local:
            return LOCAL_POLL_S
        if self._nodes.simulated or len(self._pending) > PULLS_PER_POLL:  # in turn: longer pauses would add up
            return self._poll_s
        quiet = time.monotonic() - self._heard
        return max(self._poll_s, min(QUIET_SHARE * quiet, LONGEST_POLL_S))

    def refuse_missing(self, timeout_s: float) -> None:
        """Record the nodes that have not answered in time, and those that have not connected again."""
        for node in self.waiting_for:
            self._nodes.refuse(node, refusals.no_answer(timeout_s))
        for node, lost in self.away.items():
            self._nodes.refuse(node, refusals.not_back(lost))

    def book(self) -> None:
        """Add the bytes of the questions to the account, and save it."""
        for node, size in self.sent_bytes.items():
            self._nodes.traffic.add(self._phase, self._nodes.names.describe(node), down=size)
        self._nodes.traffic.save()

    def close(self, receive: Callable[[Message, SentQuestion], object]) -> None:
        """Leave missing answers to ``receive``, and do not disturb their nodes until then."""

        def late(reply: Message, sent: SentQuestion) -> None:
            if not _lost(reply):  # the client has not failed
                receive(reply, sent)

        for message_id, sent in self._pending.items():
            self._nodes.leave(message_id, sent, late)
        self._pending.clear()

    def poll(self, *, everybody: bool = False) -> None:
        """Take the answers that have arrived; returns at once.

        Args:
            everybody: Look for the answer of each node now, instead of some in turn.
        """
        misses = 0
        for message_id in list(self._pending):
            misses += not self._pull(message_id)
            if misses == PULLS_PER_POLL and not everybody:
                return

    def look(self) -> None:
        """Ask the connected nodes that have no question yet, and again those that have connected again."""
        if time.monotonic() - self._looked < self._look_s:
            return
        self._looked = time.monotonic()
        connected = self._nodes.connected()
        for message_id, sent in list(self._pending.items()):
            if sent.is_forgotten(connected) and not self._pull(message_id):  # it may have answered before
                del self._pending[message_id]
                self._fail(sent.node, "its SuperNode was restarted")
        for node in sorted(set(connected) - self._asked - self._failed - self._nodes.names.barred):
            self._ask(node, connected[node])

    def _pull(self, message_id: str) -> bool:
        """Take an answer if it has arrived; return whether it has."""
        sent = self._pending.pop(message_id)
        try:
            with self._nodes.guarded(sent.node):
                reply = self._nodes.pull(message_id, sent.node)
                if reply is None:
                    self._pending[message_id] = sent  # behind the others
                    return False
                self._heard = time.monotonic()
                if lost := _lost(reply):
                    self._fail(sent.node, lost)
                elif not self._receive(reply, sent):
                    self._failed.add(sent.node)
        except UploadError as error:
            self._failed.add(sent.node)
            self._nodes.refuse(sent.node, error)
        return True

    def _fail(self, node: int, reason: str) -> None:
        if not self._asking or self.questions[node] >= MOST_QUESTIONS:
            self._failed.add(node)
            self._nodes.refuse(node, refusals.lost_answer(reason, self.questions[node]))
            return
        self._asked.discard(node)
        self._away[node] = reason
        self._looked = float("-inf")  # it may be connected
        log(INFO, "%s: %s; it is asked again when it is connected", self._nodes.names.describe(node), reason)

    def _ask(self, node: int, activated: str) -> None:
        message = self._question(node)
        if message is None:
            return
        self._asked.add(node)
        self._heard = time.monotonic()
        self._away.pop(node, None)
        self.questions[node] += 1
        sent = SentQuestion(node, self._phase, count_bytes(message.content), activated)
        if message_id := self._nodes.push(message):
            self._pending[message_id] = sent
            self.sent_bytes[node] += sent.size
        else:
            self._failed.add(node)
            self._nodes.refuse(node, refusals.node_left())


def to_each(contents: Mapping[int, RecordDict], message_type: str) -> Callable[[int], Message | None]:
    """Return the question of an exchange with a content per node; nodes without content are left out."""

    def question(node: int) -> Message | None:
        content = contents.get(node)
        return None if content is None else Message(content, dst_node_id=node, message_type=message_type)

    return question


def _lost(reply: Message) -> str | None:
    """Return the lost part if Flower gives this reply in place of an answer."""
    return LOST_CODES.get(reply.error.code) if reply.has_error() else None
