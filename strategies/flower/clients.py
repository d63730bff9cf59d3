"""The clients after their upload: questions to all or to some of them, and answers that a quorum is enough for.

Many small rounds are asked this way, so nothing here waits longer than it must: ids are pulled together and often, and
a client that has missed an answer is still asked but no longer waited for until it answers again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from ..core.clients import Answer, Question
from ..core.errors import QuorumError, UploadError
from ..uploads.checks import CLIENT_NAME, check_size
from .collect import last_line
from .decoding import decode_array
from .exchange import SETTLE_S, is_simulation
from .messages import count_bytes

if TYPE_CHECKING:
    import numpy as np

    from ..run.run_folder import RoundFolder
    from ..run.traffic import Traffic

# In deployment an answer takes seconds; a simulation's comes within a tenth, and its rounds are many.
POLL_S, SIMULATION_POLL_S = 0.2, 0.005
JOIN_S = 1.0
LOG_EVERY_S, SAVE_EVERY_S = 9.0, 5.0
ALLOWED_DTYPES = ("float32", "int64")
# A node that fails so often in a row is not asked any more.
MOST_FAILURES = 3


@dataclass(frozen=True)
class Limits:
    """What an answer may cost.

    Attributes:
        timeout_s: Seconds after which a question is given up.
        max_bytes: Largest accepted answer.
    """

    timeout_s: float
    max_bytes: int = 2**28


@dataclass(frozen=True)
class _Sent:
    """One message on its way."""

    node: int
    phase: str
    size: int


@dataclass
class _UnderWay:
    """One question: whom it went to, and what has come."""

    phase: str
    contents: Mapping[str, tuple[str, RecordDict]]
    check: Callable[[Answer], None]
    began: float = field(default_factory=lambda: time.monotonic())
    asked: set[int] = field(default_factory=set)
    pending: dict[str, _Sent] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)

    @property
    def waited(self) -> float:
        """Seconds since it was asked."""
        return time.monotonic() - self.began


class GridClients:
    """The :class:`strategies.method.Clients` of a Flower grid.

    Args:
        grid: Flower's grid.
        folder: Where refusals are noted.
        traffic: Where bytes are booked.
        common: Sent with every question.
        limits: Of every answer.
        left_out: Clients that are asked nothing.
    """

    def __init__(
        self,
        grid: Grid,
        folder: RoundFolder,
        traffic: Traffic,
        *,
        common: Mapping[str, Any],
        limits: Limits,
        left_out: Collection[str] = (),
    ) -> None:
        self._grid = grid
        self._folder = folder
        self._traffic = traffic
        self._common = dict(common)
        self._limits = limits
        self._left_out = set(left_out)
        self._names: dict[int, str] = {}
        self._failures: Counter[int] = Counter()
        self._late: dict[str, _Sent] = {}
        self._refused: set[tuple[str, str]] = set()
        self._seen: set[int] = set()
        self._saved_phase = ""
        self._joined = time.monotonic()
        self._simulated = is_simulation(grid)

    @property
    def mib_per_client(self) -> float:
        """MiB that a client has sent and got so far, on average, its upload included."""
        return self._traffic.mib_per_client

    def ask(
        self,
        questions: Question | Mapping[str, Question],
        *,
        phase: str,
        quorum: int = 0,
        patience_s: float | None = None,
        check: Callable[[Answer], None] = lambda answer: None,  # noqa: ARG005  takes what comes
    ) -> dict[str, Answer]:
        """Ask clients, and return their usable answers by name, in the order of names.

        Args:
            questions: One for every connected client, or one for each name; a named client that is not connected is
                not waited for.
            phase: What the bytes are booked under.
            quorum: Usable answers without which there is no going on.
            patience_s: Seconds after which a quorum is enough; None: all are waited for.
            check: Raises UploadError for an answer that cannot be used.

        Raises:
            QuorumError: Fewer usable answers than the quorum within the time there is.
        """
        under_way = _UnderWay(phase, _contents(questions, self._common), check)
        patience = self._limits.timeout_s if patience_s is None else min(patience_s, self._limits.timeout_s)
        self._take_late()
        self._push(under_way)
        looked = logged = under_way.began
        while not self._enough(under_way, quorum, patience):
            self._pull(under_way)
            now = time.monotonic()
            if now - looked >= JOIN_S:  # clients come, and come back, at any time
                looked = now
                self._push(under_way)
            if now - logged >= LOG_EVERY_S:
                logged = now
                log(INFO, "%s: %d answers, waiting for %d", phase, len(under_way.answers), len(under_way.pending))
            if not self._enough(under_way, quorum, patience):
                time.sleep(SIMULATION_POLL_S if self._simulated else POLL_S)
        self._late.update(under_way.pending)
        # Rounds are many and alike; what went before them, an ensemble say, must not be lost with the process.
        interval_s = SAVE_EVERY_S if phase == self._saved_phase else 0.0
        self._traffic.save(lambda line: log(WARNING, "%s", line), interval_s=interval_s)
        self._saved_phase = phase
        self._check_quorum(under_way, quorum)
        return dict(sorted(under_way.answers.items()))

    def leave_out(self, client: str, reason: str) -> None:
        """Ask a client nothing any more, and say why."""
        self._left_out.add(client)
        self._refuse(client, reason)

    def _enough(self, under_way: _UnderWay, quorum: int, patience: float) -> bool:
        waited, here = under_way.waited, len(under_way.answers)
        if waited >= self._limits.timeout_s or (waited >= patience and here >= quorum):
            return True
        settled = time.monotonic() - self._joined >= SETTLE_S
        # A simulation's clients are all there, and none comes back; elsewhere one that has answered badly may be
        # followed by one that joins, for a while.
        given_up = self._simulated or (waited >= patience and bool(under_way.asked))
        return not under_way.pending and settled and (here >= quorum or given_up)

    def _push(self, under_way: _UnderWay) -> None:
        busy = {sent.node for sent in self._late.values()}
        for node in sorted(set(self._grid.get_node_ids()) - under_way.asked - busy):
            if node not in self._seen:
                self._seen.add(node)
                self._joined = time.monotonic()
            name = self._names.get(node, "")
            question = under_way.contents.get(name, under_way.contents.get(""))
            if question is None or name in self._left_out or self._failures[node] >= MOST_FAILURES:
                continue
            kind, content = question
            under_way.asked.add(node)
            ids = list(self._grid.push_messages([Message(content, dst_node_id=node, message_type=f"train.{kind}")]))
            if ids:
                under_way.pending[ids[0]] = _Sent(node, under_way.phase, count_bytes(content))

    def _pull(self, under_way: _UnderWay) -> None:
        for reply in self._replies(under_way.pending):
            sent = under_way.pending.pop(reply.metadata.reply_to_message_id)
            try:
                answer = self._read(reply, sent)
                if answer.client in under_way.answers:
                    raise UploadError(f"{answer.client}: two nodes answer under this name, the second is refused")
                if answer.client not in self._left_out:
                    under_way.check(answer)
                    under_way.answers[answer.client] = answer
            except UploadError as error:
                name, _, reason = str(error).partition(": ")
                self._refuse(name, reason)

    def _replies(self, pending: Mapping[str, _Sent]) -> Iterable[Message]:
        return self._grid.pull_messages(list(pending)) if pending else ()

    def _take_late(self) -> None:
        """Free the clients whose answers to earlier questions have come; nobody waits for these answers now."""
        for reply in self._replies(self._late):
            sent = self._late.pop(reply.metadata.reply_to_message_id)
            try:
                self._read(reply, sent)
            except UploadError as error:
                log(WARNING, "late: %s", error)

    def _read(self, reply: Message, sent: _Sent) -> Answer:
        sender = self._names.get(sent.node, f"node-{sent.node}")
        if reply.has_error():
            self._failures[sent.node] += 1
            raise UploadError(f"{sender}: {last_line(reply.error.reason or f'error code {reply.error.code}')}")
        self._failures[sent.node] = 0
        facts = dict(reply.content.config_records.get("answer", ConfigRecord()))
        client = facts.pop("client", None)
        if not isinstance(client, str) or not CLIENT_NAME.fullmatch(client):
            shown = str(client)[:80]
            raise UploadError(f"{sender}: answer.client is {shown!r}: must be names that match {CLIENT_NAME.pattern}")
        self._names[sent.node] = client
        self._traffic.add(sent.phase, client, up=count_bytes(reply.content), down=sent.size)
        if "error" in facts:
            self._left_out.add(client)
            raise UploadError(f"{client}: {str(facts['error'])[:500]}")
        record = reply.content.array_records.get("arrays", ArrayRecord())
        check_size(sum(len(array.data) for array in record.values()), self._limits.max_bytes, f"{client}: arrays")
        arrays = {key: _decoded(array, f"{client}: arrays[{key[:80]!r}]") for key, array in record.items()}
        return Answer(client, facts, arrays)

    def _refuse(self, client: str, reason: str) -> None:
        if (client, reason) not in self._refused:  # said once, however many rounds it comes again in
            self._refused.add((client, reason))
            self._folder.refuse(client, reason)
            log(WARNING, "refused %s: %s", client, reason)

    def _check_quorum(self, under_way: _UnderWay, quorum: int) -> None:
        if len(under_way.answers) < quorum:
            silent = sorted(self._names.get(sent.node, f"node-{sent.node}") for sent in under_way.pending.values())
            missing = f"; no answer from {', '.join(silent)}" if silent else ""
            raise QuorumError(
                f"{under_way.phase}: {len(under_way.answers)} usable answers within {under_way.waited:.0f} s, needed "
                f"are {quorum}{missing}. The run can be resumed"
            )


def _contents(
    questions: Question | Mapping[str, Question], common: Mapping[str, Any]
) -> dict[str, tuple[str, RecordDict]]:
    by_name = {"": questions} if isinstance(questions, Question) else questions
    return {name: (question.kind, _content(question, common)) for name, question in by_name.items()}


def _content(question: Question, common: Mapping[str, Any]) -> RecordDict:
    arrays = ArrayRecord({key: Array(value) for key, value in question.arrays.items()})
    return RecordDict({"arrays": arrays, "config": ConfigRecord({**common, **question.facts})})


def _decoded(array: Array, where: str) -> np.ndarray[Any, Any]:
    if array.dtype not in ALLOWED_DTYPES:
        raise UploadError(f"{where} is {array.dtype[:80]!r}: must be {', '.join(ALLOWED_DTYPES)}")
    return decode_array(array, tuple(array.shape), array.dtype, where)
