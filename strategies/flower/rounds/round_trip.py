"""The messages of one round after the other: who is asked, and whose answer can be used.

A client whose answer is late is not asked again before it has come; that answer then counts for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import Strategy

from ...core import refusals
from ...core.errors import QuorumError, UploadError, blaming
from ...core.facts import UNNAMED, Agreed, Agreement
from ...core.seeds import generator
from ...uploads.checks import Signature
from ...uploads.parts import Part
from ..asking import POLL_S, Exchange, to_each
from ..evaluation import EVALUATION, receive_scores
from ..messages import count_bytes, read_reply
from ..nodes import Nodes, SentQuestion, cause_of_failure
from .answers import CheckedAnswer, check_trained, drop_incomplete

PHASE = "rounds"
# Nodes come back within seconds; between two looks the answers alone are asked for.
LOOK_S = 1.0

Check = Callable[[RecordDict], RecordDict]


class RoundTrip:
    """Asks the clients, round by round.

    Args:
        quorum: Connected clients without which no round begins, and usable answers without which one is lost.
        timeout: Seconds that the clients have for an answer.
        num_classes: C.
        agreement: The server's classes and preprocessing, which answers must share.
        part: The arrays that travel; None for all of the model's.
    """

    def __init__(  # noqa: PLR0913  what all rounds have in common
        self,
        nodes: Nodes,
        *,
        run_id: str,
        signatures: Mapping[str, Signature],
        quorum: int,
        timeout: float,
        num_classes: int,
        agreement: Agreement = UNNAMED,
        part: Part | None = None,
    ) -> None:
        self.run_id = run_id
        self._nodes = nodes
        self._signatures = signatures
        self._quorum, self._timeout, self._num_classes, self._part = quorum, timeout, num_classes, part
        self._agreed = Agreed(agreement)
        self._settled = False
        self._before, self._widest = 0, set[int]()

    @property
    def most(self) -> int:
        """The most clients that were ever connected at once, without nodes that get no more questions.

        A client whose SuperNode has started again is on two nodes for a while, as long as Flower lists the old one. It
        counts once, as soon as both have answered.
        """
        return max(self._before, self._clients(self._widest))

    def _clients(self, nodes: set[int]) -> int:
        return len({self._nodes.names.describe(node) for node in nodes - self._nodes.names.barred})

    @property
    def causes(self) -> list[str]:
        """The last few reasons why answers were refused, each once."""
        reasons = dict.fromkeys(reason for _, reason in self._nodes.refusals.recorded)
        return [reason.rstrip(".") for reason in list(reasons)[-2:]]

    def restore(self, most: int) -> None:
        """Continue from an earlier process's :attr:`most`."""
        self._before = most

    def name_of(self, node: int) -> str | None:
        """Return the name of the client on a node; None while it is unknown."""
        return self._nodes.names.name_of(node)

    def nodes(self, server_round: int, *, fraction: float, seed: int, named: bool = False, least: int = 0) -> list[int]:
        """Return the nodes that a round asks, in the order of their clients' names.

        Args:
            server_round: From 1.
            fraction: Share of the connected clients; a share of all is drawn by name, so that it is the same in every
                run of the seed.
            named: Whether the clients' names are asked for, even where all of them are in the round.
            least: How many must be connected, beside the quorum.

        Raises:
            QuorumError: Too few clients are connected.
        """
        connected = self._connected(least)
        if named or fraction < 1.0:
            self._introduce(self._nodes.names.unnamed(connected))
        ordered = self._nodes.names.in_order(set(connected) - self._nodes.names.barred)
        count = max(1, math.ceil(fraction * len(ordered) - 1e-9))
        drawn = torch.randperm(len(ordered), generator=generator(seed, "sample", server_round))[:count]
        return [ordered[k] for k in sorted(drawn.tolist())]

    def connected(self) -> list[int]:
        """Return the nodes that are connected now, in the order of their clients' names."""
        return self._nodes.names.in_order(self._nodes.present())

    def free(self, contents: Mapping[int, RecordDict]) -> dict[int, RecordDict]:
        """Return the requests without those to clients that still owe an answer to an earlier one."""
        busy = self._nodes.busy()
        return {node: content for node, content in contents.items() if node not in busy}

    def ask(
        self, contents: Mapping[int, RecordDict], check: Check, what: str, message_type: str = MessageType.TRAIN
    ) -> list[CheckedAnswer]:
        """Send every node its request, and return the usable answers in the order of client names.

        Args:
            check: The strategy's check, which unpacks an answer: content -> content.
        """
        answers: dict[str, CheckedAnswer] = {}

        def receive(reply: Message, sent: SentQuestion) -> bool:
            self._take(reply, sent.node, check, answers)
            return True

        self._exchange(contents, message_type, what, PHASE, receive, answers=answers).book()
        return [answers[name] for name in sorted(answers)]

    def evaluate(
        self, contents: Mapping[int, RecordDict], strategy: Strategy, what: str, message_type: str
    ) -> list[Message]:
        """Send every node its request for scores, and return the usable answers in the order of client names."""
        found: dict[int, Message] = {}

        def receive(reply: Message, sent: SentQuestion) -> bool:
            receive_scores(self._nodes, strategy, found, reply, sent.node)
            return True

        self._exchange(contents, message_type, what, EVALUATION, receive).book()
        return [found[node] for node in self._nodes.names.in_order(found)]

    def read(self, replies: Iterable[Message], check: Check) -> list[CheckedAnswer]:
        """Return the usable answers among some replies, in the order of client names; the others are refused."""
        answers: dict[str, CheckedAnswer] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                self._take(reply, node, check, answers)
            except UploadError as error:
                self._nodes.refuse(node, error)
        return [answers[name] for name in sorted(answers)]

    def of_one_form(self, strategy: Strategy, answers: Sequence[CheckedAnswer]) -> list[CheckedAnswer]:
        """Return the answers that the strategy can compute with; the others are refused."""
        usable, others = drop_incomplete(strategy, answers)
        for node, error in others.items():
            self._nodes.refuse(node, error)
        return usable

    def _take(self, reply: Message, node: int, check: Check, answers: dict[str, CheckedAnswer]) -> None:
        """Add one answer to those of its round."""
        sender = self._nodes.names.describe(node)
        if reply.has_error():
            raise refusals.client_error(cause_of_failure(reply)).of(sender)
        facts = reply.content.config_records.get("upload", ConfigRecord())
        with blaming(sender):
            content = reply.content if "error" in facts else check(reply.content)
        checked = read_reply(
            content,
            self._signatures,
            num_classes=self._num_classes,
            max_bytes=self._nodes.max_bytes,
            sender=sender,
            part=self._part,
            agreed=self._agreed,
        )
        check_trained(checked)
        self._agreed.add(checked.facts.client, checked.facts.agreement)
        # Of a client without a name, its node's rank is the same in every run of a simulation; its weights change.
        client = sender if checked.anonymous and self._nodes.names.is_ranked(node) else checked.facts.client
        if client in answers and not checked.anonymous:
            raise refusals.second_answer().of(client)
        if not checked.anonymous or self._nodes.names.keyed:
            self._nodes.names.pin(node, checked.facts.client)
        while client in answers:
            client += "-2"
        answers[client] = CheckedAnswer(client, reply, content, checked)
        self._nodes.traffic.add(PHASE, self._nodes.names.describe(node), up=count_bytes(reply.content))

    def _exchange(
        self,
        contents: Mapping[int, RecordDict],
        message_type: str,
        what: str,
        phase: str,
        receive: Callable[[Message, SentQuestion], bool],
        *,
        answers: Mapping[str, CheckedAnswer] | None = None,
    ) -> Exchange:
        """Send, and wait until all have answered, or the deadline.

        While the usable answers, if they are given, are fewer than the quorum, a lost node is waited for as well.
        """
        needed = 0 if answers is None else min(self._quorum, len(contents))
        found: Mapping[str, CheckedAnswer] = {} if answers is None else answers
        exchange = Exchange(
            self._nodes,
            phase,
            question=to_each(contents, message_type),
            receive=receive,
            unneeded=lambda node: self._nodes.names.name_of(node) in found,
            poll_s=POLL_S,
            look_s=LOOK_S,
        )

        def enough() -> bool:
            return not exchange.waiting_for and (not exchange.away or len(found) >= needed)

        def progress() -> str:
            waiting = len(exchange.waiting_for)
            return f"{what}: {exchange.asked - waiting} answers, waiting for {waiting}"

        exchange.wait(self._timeout, enough, progress)
        exchange.refuse_missing(self._timeout)
        for node in contents.keys() - exchange.questions.keys() - self._nodes.names.barred:
            self._nodes.refuse(node, refusals.node_left())
        exchange.close(_drop)
        return exchange

    def _connected(self, least: int) -> list[int]:
        """Wait for a quorum of nodes; before the first round also until no more of them join."""
        began = time.monotonic()
        quorum = max(least, 0 if self._nodes.simulated else self._quorum)
        while True:
            nodes = self._nodes.present()
            enough = bool(nodes) and len(nodes) >= quorum
            if enough and (self._settled or self._nodes.settled):
                self._settled = True
                self._widest = max(self._widest, nodes, key=self._clients)
                self._nodes.names.rank(nodes, self._nodes.grid)
                return sorted(nodes)
            if time.monotonic() - began >= self._timeout:
                wanted = f"min-uploads is {self._quorum}" + (f", the strategy waits for {least}" if least else "")
                raise QuorumError(
                    f"{len(nodes)} clients are connected after {self._timeout:.0f} s, {wanted}. The run can be resumed"
                )
            time.sleep(POLL_S)

    def _introduce(self, nodes: Sequence[int]) -> None:
        """Ask for the names of clients that have not answered yet."""
        question = RecordDict({"config": ConfigRecord({"names": True})})
        introduced: list[tuple[int, Message]] = []

        def receive(reply: Message, sent: SentQuestion) -> bool:
            introduced.append((sent.node, reply))
            return True

        contents = self.free(dict.fromkeys(nodes, question))
        self._exchange(contents, MessageType.QUERY, "names", PHASE, receive)
        self._nodes.names.take_names(introduced)


def _drop(reply: Message, sent: SentQuestion) -> None:
    """A late answer of a round counts for nothing."""
