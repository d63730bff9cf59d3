"""The messages of one round after the other: who is asked, and whose answer can be used.

A client whose answer is late is not asked again before it has come; that answer then counts for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import TYPE_CHECKING

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from ...core.errors import QuorumError, UploadError
from ...core.seeds import generator
from ...uploads.checks import Signature
from ..collect import last_line
from ..exchange import LOG_EVERY_S, POLL_S, SETTLE_S, is_simulation
from ..messages import count_bytes, read_reply
from ..roster import Roster
from .answers import Answered, check_trained

if TYPE_CHECKING:
    from ...run.run_folder import RoundFolder
    from ...run.traffic import Traffic

PHASE = "rounds"
EVALUATION = "evaluation"


@dataclass(frozen=True)
class Limits:
    """What an answer, and a round, must keep to.

    Attributes:
        quorum: Connected clients without which no round begins, and usable answers without which one is lost.
        timeout_s: Seconds that the clients have for a round.
        max_bytes: Largest accepted answer.
        num_classes: C.
    """

    quorum: int
    timeout_s: float
    max_bytes: int
    num_classes: int


class RoundTrip:
    """Asks the clients, round by round.

    Args:
        grid: Flower's grid.
        folder: Where refusals are noted.
        traffic: Where bytes are booked.
        run_id: The run folder's id.
        signatures: The one architecture that clients may have.
        limits: What must be kept to.

    Attributes:
        run_id: As given.
        most: The most clients that were ever connected at once.
    """

    def __init__(
        self,
        grid: Grid,
        folder: RoundFolder,
        traffic: Traffic,
        *,
        run_id: str,
        signatures: Mapping[str, Signature],
        limits: Limits,
    ) -> None:
        self.run_id = run_id
        self.most = 0
        self._grid = grid
        self._folder = folder
        self._traffic = traffic
        self._signatures = signatures
        self._limits = limits
        self._roster = Roster()
        self._late: dict[str, int] = {}
        self._refused: set[tuple[str, str]] = set()
        self._settled = False

    def name_of(self, node: int) -> str | None:
        """Return the name of the client on a node; None if it has not told it yet."""
        return self._roster.name_of(node)

    def nodes(self, server_round: int, *, fraction: float, seed: int, named: bool = False, least: int = 0) -> list[int]:
        """Return the nodes that a round asks, in the order of their clients' names.

        Args:
            server_round: From 1.
            fraction: Share of the connected clients; a share of all is drawn by name, so that it is the same in every
                run of the seed.
            seed: Of the run.
            named: Whether the clients' names are asked for, even where all of them are in the round.
            least: How many must be connected, beside the quorum.

        Raises:
            QuorumError: Too few clients are connected.
        """
        connected = self._connected(least)
        if named or fraction < 1.0:
            self._introduce(self._roster.strangers(connected))
        ordered = self._roster.in_order(connected)
        count = max(1, math.ceil(fraction * len(ordered) - 1e-9))
        drawn = torch.randperm(len(ordered), generator=generator(seed, "sample", server_round))[:count]
        return [ordered[k] for k in sorted(drawn.tolist())]

    def connected(self) -> list[int]:
        """Return the nodes that are connected now, in the order of their clients' names."""
        return self._roster.in_order(self._grid.get_node_ids())

    def free(self, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """Return the requests without those to clients that still owe an answer to an earlier one."""
        self._receive_late()
        busy = set(self._late.values())
        return {node: content for node, content in contents.items() if node not in busy}

    def ask(
        self,
        contents: Mapping[int, RecordDict],
        check: Callable[[RecordDict, str], RecordDict],
        what: str,
        message_type: str = MessageType.TRAIN,
    ) -> list[Answered]:
        """Send every node its request, and return the usable answers in the order of client names.

        Args:
            contents: Node -> request.
            check: Checks and unpacks what the strategy knows of an answer: (content, sender) -> content.
            what: What is asked, for the log.
            message_type: As Flower routes it to the clients' functions.
        """
        answers = self.read(self._exchange(contents, message_type, what), check)
        self._book(PHASE, contents)
        return answers

    def evaluate(self, contents: Mapping[int, RecordDict], message_type: str, what: str) -> list[Message]:
        """Send every node its request for scores, and return the answers in the order of client names.

        Args:
            contents: Node -> request.
            message_type: As Flower routes it to the clients' functions.
            what: What is asked, for the log.
        """
        found: dict[int, Message] = {}
        for reply in self._exchange(contents, message_type, what):
            node = reply.metadata.src_node_id
            if reply.has_error():
                self._refuse(self._roster.call(node), f"scores: {_error_of(reply)}")
            else:
                found[node] = reply
                self._traffic.add(EVALUATION, self._roster.call(node), up=count_bytes(reply.content))
        self._book(EVALUATION, contents)
        return [found[node] for node in self._roster.in_order(found)]

    def read(self, replies: Iterable[Message], check: Callable[[RecordDict, str], RecordDict]) -> list[Answered]:
        """Return the usable answers among some replies, in the order of client names; the others are refused."""
        answers: dict[str, Answered] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                answer = self._read(reply, check, answers)
            except UploadError as error:
                name, _, reason = str(error).partition(": ")
                self._refuse(name, reason)
                continue
            if not answer.reply.anonymous:
                self._roster.name(node, answer.client)
            answers[answer.client] = answer
            self._traffic.add(PHASE, self._roster.call(node), up=count_bytes(reply.content))
        return [answers[name] for name in sorted(answers)]

    def _read(
        self, reply: Message, check: Callable[[RecordDict, str], RecordDict], others: Mapping[str, Answered]
    ) -> Answered:
        node = reply.metadata.src_node_id
        sender = self._roster.call(node)
        if reply.has_error():
            raise UploadError(f"{sender}: {_error_of(reply)}")
        facts = reply.content.config_records.get("upload", ConfigRecord())
        content = reply.content if "error" in facts else check(reply.content, sender)
        checked = read_reply(
            content, self._signatures,
            num_classes=self._limits.num_classes, max_bytes=self._limits.max_bytes, sender=sender,
        )  # fmt: skip
        check_trained(checked)
        # Of a client without a name, its node's rank is the same in every run of a simulation; its weights change.
        client = sender if checked.anonymous and self._roster.is_ranked(node) else checked.client
        if client in others and not checked.anonymous:
            raise UploadError(f"{client}: two nodes answer under this name, the second is refused")
        while client in others:
            client += "-2"
        return Answered(client, reply, content, checked)

    def _book(self, phase: str, contents: Mapping[int, RecordDict]) -> None:
        # Equal contents are counted once: a strategy asks most clients the same.
        sizes = {id(content): count_bytes(content) for content in contents.values()}
        for node, content in contents.items():
            self._traffic.add(phase, self._roster.call(node), down=sizes[id(content)])
        self._traffic.save(lambda line: log(WARNING, "%s", line))

    def _exchange(self, contents: Mapping[int, RecordDict], message_type: str, what: str) -> list[Message]:
        """Send, and wait until all have answered, or the deadline; who is late then is remembered."""
        pending, came = {}, []
        for node, content in contents.items():
            ids = list(self._grid.push_messages([Message(content, dst_node_id=node, message_type=message_type)]))
            if ids:
                pending[ids[0]] = node
            else:
                self._refuse(self._roster.call(node), "the node has left")
        began = logged = time.monotonic()
        while pending and time.monotonic() - began < self._limits.timeout_s:
            for reply in self._grid.pull_messages(list(pending)):
                pending.pop(reply.metadata.reply_to_message_id, None)
                came.append(reply)
            if pending and time.monotonic() - logged >= LOG_EVERY_S:
                logged = time.monotonic()
                log(INFO, "%s: %d answers, waiting for %d", what, len(came), len(pending))
            if pending:
                time.sleep(POLL_S)
        for node in pending.values():
            self._refuse(self._roster.call(node), f"no answer within {self._limits.timeout_s:.0f} s")
        self._late.update(pending)
        return came

    def _connected(self, least: int) -> list[int]:
        """Wait for a quorum of nodes; before the first round also until no more of them join."""
        began = joined = time.monotonic()
        before: set[int] = set()
        while True:
            nodes, now = set(self._grid.get_node_ids()), time.monotonic()
            if nodes != before:
                before, joined = nodes, now
            quorum = max(least, 0 if is_simulation(self._grid) else self._limits.quorum)
            enough = bool(nodes) and len(nodes) >= quorum
            if enough and (self._settled or now - joined >= SETTLE_S):
                self._settled = True
                self.most = max(self.most, len(nodes))
                self._roster.rank(nodes, self._grid)
                return sorted(nodes)
            if now - began >= self._limits.timeout_s:
                wanted = f"min-uploads is {self._limits.quorum}" + (
                    f", the strategy waits for {least}" if least else ""
                )
                raise QuorumError(
                    f"{len(nodes)} clients are connected after {self._limits.timeout_s:.0f} s, {wanted}. The run can "
                    "be resumed"
                )
            time.sleep(POLL_S)

    def _introduce(self, nodes: Sequence[int]) -> None:
        """Ask for the names of clients that have not answered yet."""
        question = RecordDict({"config": ConfigRecord({"names": True})})
        contents = self.free(dict.fromkeys(nodes, question))
        self._roster.hear(self._exchange(contents, MessageType.QUERY, "names"))

    def _receive_late(self) -> None:
        late: Iterable[Message] = self._grid.pull_messages(list(self._late)) if self._late else ()
        for reply in late:
            self._late.pop(reply.metadata.reply_to_message_id, None)

    def _refuse(self, client: str, reason: str) -> None:
        if (client, reason) not in self._refused:  # said once, however many rounds it comes again in
            self._refused.add((client, reason))
            self._folder.refuse(client, reason)
            log(WARNING, "refused %s: %s", client, reason)


def _error_of(reply: Message) -> str:
    return last_line(reply.error.reason or f"error code {reply.error.code}")
