"""The clients after their upload: questions to all or some of them, whose answers suffice at a quorum.

Methods ask many small rounds this way, so answers are looked for often. A client that has missed an answer is not
waited for until that answer has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from ..core import refusals
from ..core.clients import Answer, Question
from ..core.errors import QuorumError, UploadError
from ..core.facts import CLIENT_NAME
from .asking import DEPLOYED_POLL_S, Exchange
from .messages import count_bytes, decode_array
from .nodes import Nodes, SentQuestion, cause_of_failure

# In a deployment an answer takes seconds; in a simulation it comes within a tenth, and the rounds are many.
SIMULATION_POLL_S = 0.005
JOIN_S = 1.0
SAVE_EVERY_S = 5.0
ALLOWED_DTYPES = ("float32", "int64", "uint32")
# After this many failures in a row, a client gets no more questions.
MOST_FAILURES = 3


class GridClients:
    """The :class:`strategies.core.clients.Clients` of a Flower grid.

    Args:
        timeout: Seconds after which a question is given up.
        members: The clients whose answers count, those that have uploaded; None: all.
    """

    def __init__(
        self,
        nodes: Nodes,
        *,
        common: Mapping[str, Any],
        timeout: float,
        left_out: Collection[str] = (),
        members: Collection[str] | None = None,
    ) -> None:
        self._nodes = nodes
        self._common = dict(common)
        self._timeout = timeout
        self._left_out, self._members = set(left_out), members
        self._failures: Counter[int] = Counter()
        self._saved_phase = ""

    @property
    def mib_per_client(self) -> float:
        """MiB that a client has sent and received so far, on average, its upload included."""
        return self._nodes.traffic.mib_per_client

    @property
    def refused(self) -> dict[str, str]:
        """Client -> why its last answer of these clients that does not count was refused."""
        return dict(self._nodes.refusals.recorded.keys())

    def ask(
        self,
        questions: Question | Mapping[str, Question],
        *,
        phase: str,
        quorum: int = 0,
        patience_s: float | None = None,
        check: Callable[[Answer], None] = lambda answer: None,  # noqa: ARG005  accepts every answer
    ) -> dict[str, Answer]:
        """Ask clients, and return their usable answers by name, in the order of names.

        Args:
            questions: One for every connected client, or one for each name; a named client that is not connected is
                not waited for.
            phase: The phase that the bytes are booked under.
            patience_s: Seconds after which a quorum suffices; None: wait for all.
            check: Raises UploadError for an answer that cannot be used.

        Raises:
            QuorumError: Fewer usable answers than the quorum within the time limit.
        """
        timeout = self._timeout
        patience = timeout if patience_s is None else min(patience_s, timeout)
        answers: dict[str, Answer] = {}
        contents = _contents(questions, self._common)
        wanted = self._wanted(contents)

        exchange = Exchange(
            self._nodes,
            phase,
            question=self._question(contents),
            receive=lambda reply, sent: self._take(reply, sent, check, answers),
            unneeded=lambda node: self._nodes.names.name_of(node) in answers,
            poll_s=SIMULATION_POLL_S if self._nodes.simulated else DEPLOYED_POLL_S,
            look_s=JOIN_S,
        )

        def enough() -> bool:
            waited, here = exchange.waited, len(answers) >= quorum
            if waited >= patience and here:
                return True
            # A simulation's clients are all connected, and none returns. Elsewhere another client may join for a while
            # and replace one that has answered badly. A lost client is waited for.
            given_up = self._nodes.simulated or (waited >= patience and exchange.asked > 0 and not exchange.away)
            complete = bool(wanted) and wanted <= answers.keys()
            return not exchange.waiting_for and (complete or self._nodes.settled) and (here or given_up)

        exchange.wait(timeout, enough, lambda: f"{phase}: {len(answers)} answers, {len(exchange.waiting_for)} to come")
        missing = sorted(self._nodes.names.describe(node) for node in (*exchange.waiting_for, *exchange.away))
        exchange.close(self._read)
        self._save_traffic(phase)
        if len(answers) < quorum:
            silent = f"; no answer from {', '.join(missing)}" if missing else ""
            raise QuorumError(
                f"{phase}: {len(answers)} usable answers within {exchange.waited:.0f} s, needs {quorum}{silent}. "
                "The run can be resumed"
            )
        return dict(sorted(answers.items()))

    def _save_traffic(self, phase: str) -> None:
        # Rounds are many and alike; the bytes of an ensemble before them must not be lost with the process.
        self._nodes.traffic.save(interval_s=SAVE_EVERY_S if phase == self._saved_phase else 0.0)
        self._saved_phase = phase

    def _wanted(self, contents: Mapping[str, object]) -> set[str]:
        """Return the clients whose answers count; empty where those of all count."""
        return {name for name in self._members or () if "" in contents or name in contents} - self._left_out

    def _question(self, contents: Mapping[str, tuple[str, RecordDict]]) -> Callable[[int], Message | None]:
        busy = self._nodes.busy()

        def message(node: int) -> Message | None:
            name = self._nodes.names.name_of(node) or ""
            found = contents.get(name, contents.get(""))
            skipped = node in busy or name in self._left_out or self._failures[node] >= MOST_FAILURES
            if found is None or skipped:
                return None
            kind, content = found
            return Message(content, dst_node_id=node, message_type=f"train.{kind}")

        return message

    def _take(
        self, reply: Message, sent: SentQuestion, check: Callable[[Answer], None], answers: dict[str, Answer]
    ) -> bool:
        answer = self._read(reply, sent)
        if answer.client in answers:
            raise refusals.second_answer().of(answer.client)
        if answer.client not in self._left_out:
            check(answer)
            answers[answer.client] = answer
        return True

    def _read(self, reply: Message, sent: SentQuestion) -> Answer:
        sender = self._nodes.names.describe(sent.node)
        if reply.has_error():
            self._failures[sent.node] += 1
            raise refusals.client_error(cause_of_failure(reply)).of(sender)
        self._failures[sent.node] = 0
        facts = dict(reply.content.config_records.get("answer", ConfigRecord()))
        client = facts.pop("client", None)
        if not isinstance(client, str) or not CLIENT_NAME.fullmatch(client):
            raise refusals.bad_name("answer.client", client, CLIENT_NAME.pattern).of(sender)
        if self._members is not None and client not in self._members:
            self._failures[sent.node] = MOST_FAILURES
            raise refusals.no_upload_of(client).of(sender)
        if "error" in facts:
            self._failures[sent.node] = MOST_FAILURES  # of this node alone: the name may not be its own
        else:
            self._nodes.names.pin(sent.node, client)
        self._nodes.traffic.add(sent.phase, client, up=count_bytes(reply.content), down=sent.size)
        if "error" in facts:
            raise refusals.client_error(facts["error"]).of(self._nodes.names.name_of(sent.node) or client)
        record = reply.content.array_records.get("arrays", ArrayRecord())
        try:
            arrays = {key: _decode(array, f"arrays[{key[:80]!r}]") for key, array in record.items()}
        except UploadError as error:
            raise error.of(client) from error
        return Answer(client, facts, arrays)


def _contents(
    questions: Question | Mapping[str, Question], common: Mapping[str, Any]
) -> dict[str, tuple[str, RecordDict]]:
    found = {}
    for name, question in ({"": questions} if isinstance(questions, Question) else questions).items():
        arrays = ArrayRecord({key: Array(value) for key, value in question.arrays.items()})
        config = ConfigRecord({**common, **question.facts})
        found[name] = question.kind, RecordDict({"arrays": arrays, "config": config})
    return found


def _decode(array: Array, where: str) -> np.ndarray[Any, Any]:
    if array.dtype not in ALLOWED_DTYPES:
        raise refusals.broken_rule(f"{where} is {array.dtype[:80]!r}", " or ".join(ALLOWED_DTYPES))
    return decode_array(array, tuple(array.shape), array.dtype, where)
