"""The upload phase: ask, check, store; a bad answer costs that answer and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from logging import INFO, WARNING
from typing import Any

from flwr.app import Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from ..core import refusals
from ..core.durable import MIB
from ..core.errors import QuorumError, StoreError, UploadError, blaming, describe, one_line, shorten_list
from ..core.facts import UNNAMED, Agreed, Agreement, UploadFacts
from ..core.scan import log_once
from ..method import State
from ..run.files import weights_bytes
from ..run.run_folder import RoundFolder
from ..run.stage import TRAFFIC_FILE
from ..run.traffic import UPLOAD_PHASE, Traffic
from ..run.uploads import equal_notes
from ..uploads.checks import Signature
from ..uploads.parts import Part
from .arguments import Participation, kept_scores
from .asking import Exchange
from .messages import (
    Reply,
    Request,
    arrays_name,
    count_bytes,
    is_anonymous,
    mean_metrics,
    read_reply,
    say_left_out_of_means,
)
from .names import ClientNames
from .nodes import Nodes, Refusals, SentQuestion, cause_of_failure

# Seconds that a resumed deployed run with its quorum of uploads waits for a first node, where it cannot know whether
# others are to come. A SuperNode whose SuperLink was restarted tries again every 20 seconds.
ALONE_S = 60.0


class Collector:
    """Takes the uploads of one round into its folder.

    Args:
        num_classes: C.
        part: The arrays that uploads have, if these are not all of their model's.
        probe: (facts, weights) -> a warning, or an empty text; raises UploadError where the model's outputs are not
            finite.

    Attributes:
        clients: Names of the uploads of this phase. A client that has a name keeps the upload that an earlier process
            took; one without a name, whose upload the server cannot recognise, trains and answers anew.
    """

    def __init__(  # noqa: PLR0913  what a round knows before its first answer
        self,
        folder: RoundFolder,
        signatures: Mapping[str, Signature],
        *,
        num_classes: int,
        max_bytes: int,
        names: ClientNames | None = None,
        agreement: Agreement = UNNAMED,
        probe: Callable[[UploadFacts, State], str] | None = None,
        participation: Participation = Participation(),  # noqa: B008  it is frozen
        part: Part | None = None,
    ) -> None:
        self._folder = folder
        self._signatures = signatures
        self._num_classes = num_classes
        self._max_bytes = max_bytes
        self._names = ClientNames() if names is None else names
        self._probe, self._participation, self._part = probe, participation, part
        self._agreed = Agreed(agreement)
        for record in folder.records():
            self._agreed.add(record.client, record.facts.agreement)
        self._refusals = Refusals(folder)
        self._late = self._closed = False
        self._reported: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._contents: dict[str, RecordDict] = {}
        # Node -> its client, which may have another name when it answers again, and why the disk refuses its upload.
        self._unstored: dict[int, tuple[str, str]] = {}
        self._chosen: set[int] | None = None
        self.clients = {client for client in folder.held() if not is_anonymous(client)}
        # The bytes before a crash count too.
        self.traffic = Traffic.read(folder.path / TRAFFIC_FILE)

    def collect(self, grid: Grid, request: Request, *, timeout: float, min_uploads: int) -> Exchange:
        """Ask every node and store the uploads, until all have answered or the deadline.

        Returns:
            The exchange; its ``poll`` takes later answers: into this round until :meth:`close`.

        Raises:
            QuorumError: Names who is missing and why.
            StoreError: This machine's disk does not take an upload, or has lost one.
        """
        if self.clients:
            log(INFO, "%d uploads are here already: %s", len(self.clients), ", ".join(sorted(self.clients)))
        if earlier := len(set(self._folder.held()) - self.clients):
            log(INFO, "%d uploads of clients without a name are here: those clients are asked anew", earlier)

        nodes = Nodes(grid, self._refusals, self.traffic, self._names, max_bytes=self._max_bytes)
        exchange = Exchange(
            nodes,
            UPLOAD_PHASE,
            question=partial(self._question, request, nodes),
            receive=self.receive,
            unneeded=lambda node: self._names.name_of(node) in self.clients,
        )
        enough = partial(self._is_complete, exchange, nodes, min_uploads)
        exchange.wait(timeout, enough, partial(self._progress, exchange, timeout))
        exchange.poll(everybody=True)  # an answer that has arrived by now is in time
        self.traffic.save()
        self._late = True
        exchange.refuse_missing(timeout)
        self.check_quorum(min_uploads, exchange.asked, timeout, connected=len(nodes.present()))
        records = {record.client: record for record in self._folder.records()}
        if gone := sorted(self.clients - records.keys()):
            raise StoreError(
                f"{self._folder.path} has lost the uploads of {shorten_list(gone)} while the run worked: put its files "
                "back, or start anew in another folder that nothing else empties"
            )
        for line in equal_notes([records[client] for client in sorted(self.clients)]):
            log(WARNING, "%s", line)
        unnamed = [name for name in sorted(self.clients) if not records[name].facts.agreement.classes.sha256]
        if unnamed and self._num_classes:  # an average of any models has no classes
            log(INFO, "classes are not named by %s: that they have one order is not checked", shorten_list(unnamed))
        return exchange

    def _question(self, request: Request, nodes: Nodes, node: int) -> Message | None:
        """Return the request to a node; None for one that is not asked, or not yet."""
        if self._chosen is None:
            self._chosen = self._draw(request, nodes)
        if self._chosen is None:
            return None
        if self._participation.fraction_train < 1.0 and node not in self._chosen:
            return None
        return replace(request, held=self._held_for(node)).message(node)

    def _draw(self, request: Request, nodes: Nodes) -> set[int] | None:
        """Draw the nodes to ask; None while too few are connected, or more may come that the draw has to know."""
        present, asked = nodes.present(), self._participation
        if len(present) < asked.least or (asked.fraction_train < 1.0 and not nodes.settled):
            return None
        if asked.fraction_train == 1.0:
            return present
        nodes.names.rank(present, nodes.grid)
        return set(asked.draw(nodes.names.in_order(present), request.seed, request.server_round))

    def _is_complete(self, exchange: Exchange, nodes: Nodes, min_uploads: int) -> bool:
        """Return whether the phase may end before its deadline."""
        # Who fails early must not end the phase while a client with a key of its own may still connect.
        everybody = self._names.enrolled or min_uploads
        complete = len(self.clients) >= min_uploads or len(self.clients) + exchange.failed >= everybody
        # A resumed run that has its uploads needs no node; who is still to come connects again soon.
        alone = complete and (len(self.clients) == self._names.enrolled or exchange.waited >= ALONE_S)
        came = bool(exchange.asked) or (alone and not nodes.simulated)
        return (nodes.simulated or complete) and nodes.settled and came and not exchange.waiting_for

    def _progress(self, exchange: Exchange, timeout: float) -> str:
        away = f", {len(exchange.away)} have lost their connection" if exchange.away else ""
        waiting = f"waiting for {len(exchange.waiting_for)} of {exchange.asked} nodes{away}"
        return f"uploads: {len(self.clients)} here, {waiting}, {timeout - exchange.waited:.0f} s to the deadline"

    def _held_for(self, node: int) -> tuple[str, ...]:
        """Return the clients whose uploads are here: the node's own, or all while its name is unknown."""
        name = self._names.name_of(node)
        return tuple(sorted(self.clients)) if name is None else (name,) * (name in self.clients)

    def close(self) -> None:
        """Begin the server stage: an upload that arrives from now on is late, and kept for replay."""
        self._closed = True

    def take(self, reply: Message) -> None:
        """Check an answer that the caller has pulled, and store its upload or refuse it."""
        node = reply.metadata.src_node_id
        try:
            self.receive(reply, SentQuestion(node, UPLOAD_PHASE, 0))
        except UploadError as error:
            self._refusals.add(self._names.describe(node, error.client), error.reason)

    def receive(self, reply: Message, sent: SentQuestion) -> bool:
        """Check one answer and store its upload.

        Raises:
            UploadError: It is refused.
        """
        if reply.has_error():
            raise refusals.client_error(cause_of_failure(reply)).of(self._names.describe(sent.node))
        self._accept(reply, sent)
        return True

    def check_quorum(self, min_uploads: int, asked: int, timeout: float, connected: int = 0) -> None:
        """Refuse to continue with too few uploads, or without those of clients that have sent theirs.

        Raises:
            QuorumError: Names who is missing and why.
            StoreError: The disk takes no further uploads, for which the clients are not to blame.
        """
        # A client with a name may have come again as another node.
        unstored = {n: why for n, why in self._unstored.values() if is_anonymous(n) or n not in self.clients}
        if unstored:
            raise StoreError(
                f"{shorten_list(sorted(unstored))}: {unstored[min(unstored)]}. Make room there and resume: "
                f"{len(self.clients)} uploads are kept, the others are asked for again"
            )
        if len(self.clients) >= min_uploads:
            return
        by_reason: dict[str, list[str]] = {}
        for client, reason in self._refusals.recorded:
            by_reason.setdefault(reason, []).append(client)
        reasons = [f"{', '.join(clients)}: {reason.rstrip('.')}" for reason, clients in by_reason.items()]
        if not asked and connected:
            reasons.append(f"only {connected} of min_available_nodes={self._participation.least} nodes connected")
        elif not asked:
            reasons.append(f"no client connected within {timeout:.0f} s")
        elif asked < min_uploads:
            reasons.append(f"only {asked} of at least {min_uploads} nodes connected")
        raise QuorumError(
            f"{len(self.clients)} uploads arrived, min-uploads is {min_uploads}. "
            f"Missing: {'; '.join(reasons) or 'no other client answered'}"
            + (f". The uploads that arrived are kept in {self._folder.path}" if self.clients else "")
        )

    def mean_metrics(self) -> dict[str, Any]:
        """Average the metrics of this process's clients by their examples, or as the project's own function does."""
        own, weight = self._participation.train_metrics_aggr_fn, self._participation.weighted_by_key
        if own is not None and self._contents:
            try:
                replies = [content for _, content in sorted(self._contents.items())]
                return dict(kept_scores("train_metrics_aggr_fn", own(replies, weight)) or {})
            except Exception as error:  # noqa: BLE001  a project's own code; the uploads matter more
                log(WARNING, "train_metrics_aggr_fn failed (%s): the mean is taken", one_line(describe(error)))
        reports = {name: report for name, report in sorted(self._reported.items()) if report[0]}
        say_left_out_of_means({name: metrics for name, (_, metrics) in reports.items()})
        return mean_metrics([metrics for _, metrics in reports.values()], [size for size, _ in reports.values()])

    def _accept(self, reply: Message, sent: SentQuestion) -> None:
        classes, most, sender = self._num_classes, self._max_bytes, self._names.describe(sent.node)
        checked = read_reply(
            reply.content,
            self._signatures,
            num_classes=classes,
            max_bytes=most,
            sender=sender,
            examples_key=self._participation.weighted_by_key,
            part=self._part,
            agreed=self._agreed,
        )
        name = checked.facts.client
        if not checked.anonymous or self._names.keyed:
            # A client that starts again is a new node, which Flower may list beside the old one for a while.
            self._names.pin(sent.node, name)
        if checked.held:
            if name not in self.clients:
                raise refusals.not_held().of(name)
            return
        _say_left_out(reply.content)
        if name in self.clients and not checked.anonymous and self._is_here(checked):
            log(INFO, "upload of %s: it came again, unchanged", name)
            return
        if checked.anonymous:
            # Equal weights of two clients without names: which of the two comes first changes nothing.
            names = [name, *(f"{name}-{k}" for k in range(2, len(self.clients) + 2))]
            name = next(n for n in names if n not in self.clients)
        # An earlier process may have stored the same weights of a client without a name.
        if self._probe is not None:
            with blaming(name):
                warning = self._probe(checked.facts, checked.state)
            if warning:
                log(WARNING, "upload of %s: %s", name, one_line(warning))
        if not (checked.anonymous and name in self._folder.held()):
            self._store(replace(checked.facts, client=name), checked.state, sent.node)
        self._unstored.pop(sent.node, None)
        self._agreed.add(name, checked.facts.agreement)
        self.clients.add(name)
        self._reported[name] = (checked.facts.num_examples or 0, checked.metrics)
        if self._participation.train_metrics_aggr_fn is not None:
            said = reply.content  # without its arrays
            self._contents[name] = RecordDict({**said.metric_records, **said.config_records})
        size = count_bytes(reply.content)
        self.traffic.add(UPLOAD_PHASE, name, up=size, down=sent.size)
        # The whole account each time: of many clients only every few seconds, or n uploads would cost n squared.
        self.traffic.save(interval_s=len(self.clients) // 200)
        log(INFO, "upload of %s: %s, %.2f MiB, %s", name, checked.facts.architecture, size / MIB, self._fate())

    def _store(self, facts: UploadFacts, state: State, node: int) -> None:
        try:
            self._folder.accept(facts, state)
        except UploadError as error:
            if isinstance(error.__cause__, OSError):
                self._unstored[node] = facts.client, error.reason
            raise

    def _is_here(self, checked: Reply) -> bool:
        """Tell whether an upload is the one that is stored under its name: a node was asked again and had answered."""
        digest = hashlib.sha256(weights_bytes(checked.state)).hexdigest()
        return any(known.client == checked.facts.client and known.sha256 == digest for known in self._folder.records())

    def _fate(self) -> str:
        if self._closed:
            return "came late: kept for replay, not part of this result"
        return "stored: it came after the deadline, but before the server stage" if self._late else "stored"


def _say_left_out(content: RecordDict) -> None:
    for other in sorted(set(content.array_records) - {arrays_name(content)})[:1]:
        log_once(WARNING, f"array record {other[:80]!r} of the clients is left out: a model is one record")
