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

from ..errors import QuorumError, UploadError
from ..seeds import generator
from ..upload_checks import CLIENT_NAME, Signature
from .collect import last_line
from .exchange import LOG_EVERY_S, POLL_S, SETTLE_S, is_simulation
from .global_model import Answered, check_trained
from .messages import count_bytes, read_reply

if TYPE_CHECKING:
    from ..store.run_folder import RoundFolder
    from ..traffic import Traffic

PHASE = "rounds"


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
        self._names: dict[int, str] = {}
        self._late: dict[str, int] = {}
        self._refused: set[tuple[str, str]] = set()
        self._settled = False

    def nodes(self, server_round: int, *, fraction: float, seed: int) -> list[int]:
        """Return the nodes that a round asks, in the order of their clients' names.

        Args:
            server_round: From 1.
            fraction: Share of the connected clients; a share of all is drawn by name, so that it is the same in every
                run of the seed.
            seed: Of the run.

        Raises:
            QuorumError: Too few clients are connected.
        """
        connected = self._connected()
        if fraction < 1.0:
            self._introduce([node for node in connected if node not in self._names])
        ordered = sorted(connected, key=lambda node: (node not in self._names, self._names.get(node, ""), node))
        count = max(1, math.ceil(fraction * len(ordered) - 1e-9))
        drawn = torch.randperm(len(ordered), generator=generator(seed, "sample", server_round))[:count]
        self._receive_late()
        busy = set(self._late.values())
        return [ordered[k] for k in sorted(drawn.tolist()) if ordered[k] not in busy]

    def ask(
        self, contents: Mapping[int, RecordDict], check: Callable[[RecordDict, str], RecordDict], what: str
    ) -> list[Answered]:
        """Send every node its request, and return the usable answers in the order of client names.

        Args:
            contents: Node -> request.
            check: Checks and unpacks what the strategy knows of an answer: (content, sender) -> content.
            what: What is asked, for the log.
        """
        answers = self.read(self._exchange(contents, MessageType.TRAIN, what), check)
        # Equal contents are counted once: a strategy asks most clients the same.
        sizes = {id(content): count_bytes(content) for content in contents.values()}
        for node, content in contents.items():
            self._traffic.add(PHASE, self._names.get(node, f"node-{node}"), down=sizes[id(content)])
        self._traffic.save(lambda line: log(WARNING, "%s", line))
        return answers

    def read(self, replies: Iterable[Message], check: Callable[[RecordDict, str], RecordDict]) -> list[Answered]:
        """Return the usable answers among some replies, in the order of client names; the others are refused."""
        answers: dict[str, Answered] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                answer = self._read(reply, self._names.get(node, f"node-{node}"), check)
                if answer.client in answers:
                    raise UploadError(f"{answer.client}: two nodes answer under this name, the second is refused")
            except UploadError as error:
                name, _, reason = str(error).partition(": ")
                self._refuse(name, reason)
                continue
            self._names[node] = answer.client
            answers[answer.client] = answer
            self._traffic.add(PHASE, answer.client, up=count_bytes(reply.content))
        return [answers[name] for name in sorted(answers)]

    def _read(self, reply: Message, sender: str, check: Callable[[RecordDict, str], RecordDict]) -> Answered:
        if reply.has_error():
            raise UploadError(f"{sender}: {last_line(reply.error.reason or f'error code {reply.error.code}')}")
        facts = reply.content.config_records.get("upload", ConfigRecord())
        content = reply.content if "error" in facts else check(reply.content, sender)
        checked = read_reply(
            content, self._signatures,
            num_classes=self._limits.num_classes, max_bytes=self._limits.max_bytes, sender=sender,
        )  # fmt: skip
        check_trained(checked)
        return Answered(checked.client, reply, content, checked)

    def _exchange(self, contents: Mapping[int, RecordDict], message_type: str, what: str) -> list[Message]:
        """Send, and wait until all have answered, or the deadline; who is late then is remembered."""
        pending, came = {}, []
        for node, content in contents.items():
            ids = list(self._grid.push_messages([Message(content, dst_node_id=node, message_type=message_type)]))
            if ids:
                pending[ids[0]] = node
            else:
                self._refuse(self._names.get(node, f"node-{node}"), "the node has left")
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
            reason = f"no answer within {self._limits.timeout_s:.0f} s"
            self._refuse(self._names.get(node, f"node-{node}"), reason)
        self._late.update(pending)
        return came

    def _connected(self) -> list[int]:
        """Wait for a quorum of nodes; before the first round also until no more of them join."""
        began = joined = time.monotonic()
        before: set[int] = set()
        while True:
            nodes, now = set(self._grid.get_node_ids()), time.monotonic()
            if nodes != before:
                before, joined = nodes, now
            enough = bool(nodes) and (len(nodes) >= self._limits.quorum or is_simulation(self._grid))
            if enough and (self._settled or now - joined >= SETTLE_S):
                self._settled = True
                self.most = max(self.most, len(nodes))
                return sorted(nodes)
            if now - began >= self._limits.timeout_s:
                raise QuorumError(
                    f"{len(nodes)} clients are connected after {self._limits.timeout_s:.0f} s, min-uploads is "
                    f"{self._limits.quorum}. The run can be resumed"
                )
            time.sleep(POLL_S)

    def _introduce(self, nodes: Sequence[int]) -> None:
        """Ask for the names of clients that have not answered yet; who has none is called by its node."""
        question = RecordDict({"config": ConfigRecord({"names": True})})
        for reply in self._exchange(dict.fromkeys(nodes, question), MessageType.QUERY, "names"):
            if not reply.has_error():
                name = reply.content.config_records.get("upload", ConfigRecord()).get("client")
                if isinstance(name, str) and CLIENT_NAME.fullmatch(name):
                    self._names[reply.metadata.src_node_id] = name

    def _receive_late(self) -> None:
        late: Iterable[Message] = self._grid.pull_messages(list(self._late)) if self._late else ()
        for reply in late:
            self._late.pop(reply.metadata.reply_to_message_id, None)

    def _refuse(self, client: str, reason: str) -> None:
        if (client, reason) not in self._refused:  # said once, however many rounds it comes again in
            self._refused.add((client, reason))
            self._folder.refuse(client, reason)
            log(WARNING, "refused %s: %s", client, reason)
