"""The rounds of an iterative run: ask, combine, refine, test, checkpoint; and resume after the last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from logging import WARNING
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError, InconsistentMessageReplies
from flwr.serverapp.strategy import Strategy
from torch import nn

from ...compute import ServerCompute
from ...compute.in_process import torch_as_usual
from ...compute.threads import steady_threads
from ...core.bounds import Bound
from ...core.durable import MIB
from ...core.errors import OptionError, QuorumError, one_line, printable, shorten_list
from ...core.facts import EXPECTED
from ...core.gpu import resolve_device
from ...core.names import is_adapter_state
from ...method import Job, Outcome, Snapshot, State, Upload
from ...run.journal import Journal
from ...run.run_folder import RunFolder
from ...run.stage import TRAFFIC_FILE, StageReport, keep_outcome
from ...run.traffic import Traffic
from ...teacher.student import fresh_student, observe
from ...uploads.checks import Signatures
from ...uploads.parts import find_part
from ..arguments import EvaluateFn
from ..evaluation import average_scores
from ..messages import metrics_of
from ..nodes import FOREIGN_APPS, Nodes, Refusals, has_engine
from ..results import log_scores
from ..run import Account, log_info, signature_of
from .answers import CheckedAnswer, in_row, to_numpy, to_record
from .base import Base, configured_base
from .global_model import GlobalModel
from .refinement import Refinement, Refiner
from .round_trip import RoundTrip

# The round of each client's last accepted answer, which a request sends to clients that keep a state.
#
# A client's state belongs to one of its answers. If that answer was late, or if the server was killed and resumes
# from an older checkpoint, the client's newest state belongs to an answer that never counted. The client continues
# from the state of the answer that did.


class Attendance:
    """Rounds of accepted answers, by client."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._safe: dict[str, int] = {}

    def accept(self, server_round: int, clients: Iterable[str]) -> None:
        """Record the clients whose answers count in a round."""
        self._last.update(dict.fromkeys(clients, server_round))

    def checkpointed(self) -> None:
        """Record that a checkpoint holds these rounds: no server resumes from an earlier state any more."""
        self._safe = dict(self._last)

    def snapshot(self) -> dict[str, int]:
        """Return the rounds of the last accepted answers, for a checkpoint."""
        return dict(self._last)

    def restore(self, rounds: Mapping[str, int]) -> None:
        """Continue from a result of :meth:`snapshot`."""
        self._last, self._safe = dict(rounds), dict(rounds)

    def last_rounds(self, client: str) -> dict[str, int]:
        """Return the rounds of a client's last answer that counted, and of the last that every resume counts.

        Both are 0 for a client without one. The client no longer needs its state of rounds before ``safe-round``.
        """
        return {"last-round": self._last.get(client, 0), "safe-round": self._safe.get(client, 0)}

    def with_last_rounds(
        self, contents: Mapping[int, RecordDict], name_of: Callable[[int], str | None], key: str = "config"
    ) -> dict[int, RecordDict]:
        """Return requests with their clients' rounds; a client without a name gets none."""
        found = {}
        for node, content in contents.items():
            name = name_of(node)
            last = self.last_rounds(name) if name is not None else {}
            config = ConfigRecord({**content.config_records.get(key, ConfigRecord()), **last})
            found[node] = RecordDict({**content, key: config})
        return found


# The bounds on one client's influence in a round, for every strategy and refiner: parameters, statistics, records.


class RoundBounds:
    """Shortens and logs changes far longer than those of the others; see :mod:`strategies.core.bounds`.

    Trainable parameters and running statistics have bounds of their own, and so has every record of changes that the
    strategy adds. Counters of batches stay as they are.

    Args:
        module: The model, whose trainable parameters have a bound apart from its running statistics.
        records: The strategy's records that hold a change, such as SCAFFOLD's ``control``.
        divisor: The positive metric by which the strategy divides each client's change, such as FedNova's ``travel``;
            empty for none. The divided changes are bounded too.
    """

    def __init__(self, module: nn.Module, records: Sequence[str] = (), divisor: str = "") -> None:
        # A tied weight is no running statistic, under none of its names.
        self._parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._records = tuple(records)
        self._divisor = divisor
        whole = ("change", "change of running statistics")
        each = [f"{what} per {divisor}" for what in whole if divisor]
        self._bounds = {what: Bound(what) for what in (*whole, *each, *self._records)}

    @classmethod
    def of(cls, module: nn.Module, strategy: Strategy) -> RoundBounds:
        """Return the bounds for a model under a strategy, whose class names its own records and divisor."""
        records, divisor = getattr(strategy, "bounded_records", ()), getattr(strategy, "bounded_divisor", "")
        return cls(module, records, divisor)

    def apply(self, number: int, start: State, answers: Sequence[CheckedAnswer]) -> list[CheckedAnswer]:
        """Return a round's answers within the bounds; an answer within them is returned as given.

        Args:
            number: The round, from 1.
            answers: In the order of client names.
        """
        numbers = {name for name, value in start.items() if value.is_floating_point()}
        parts = {"change": numbers & self._parameters, "change of running statistics": numbers - self._parameters}
        for what, names in parts.items():
            begin = {name: start[name] for name in sorted(names)}
            answers = self._models(number, what, begin, answers)
            if self._divisor:
                per = [float(metrics_of(each.content)[self._divisor]) for each in answers]  # type: ignore[arg-type]
                answers = self._models(number, f"{what} per {self._divisor}", begin, answers, per)
        for record in self._records:
            answers = self._changes(number, record, answers)
        for bound in self._bounds.values():
            while bound.notes:
                log(WARNING, "%s", bound.notes.pop(0))
        return list(answers)

    def _models(
        self, number: int, what: str, start: State, answers: Sequence[CheckedAnswer], per: Sequence[float] = ()
    ) -> list[CheckedAnswer]:
        begin = _as_numpy(start)
        ends = {answer.client: _as_numpy({name: answer.reply.state[name] for name in start}) for answer in answers}
        found = self._bounds[what].apply(number, begin, ends, per)
        return [
            answer if near is end else _with_model(answer, near)
            for answer, near, end in zip(answers, found, ends.values(), strict=True)
        ]

    def _changes(self, number: int, record: str, answers: Sequence[CheckedAnswer]) -> list[CheckedAnswer]:
        ends = {answer.client: to_numpy(answer.content[record]) for answer in answers}
        zeros = {name: np.zeros_like(value) for name, value in next(iter(ends.values()), {}).items()}
        found = self._bounds[record].apply(number, zeros, ends)
        return [
            answer if near is end else replace(answer, content=RecordDict({**answer.content, record: to_record(near)}))
            for answer, near, end in zip(answers, found, ends.values(), strict=True)
        ]


def _as_numpy(state: State) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.detach().cpu().numpy() for name, value in state.items()}


def _with_model(answer: CheckedAnswer, near: Mapping[str, np.ndarray[Any, Any]]) -> CheckedAnswer:
    moved = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in near.items()}
    return replace(answer, reply=replace(answer.reply, state={**answer.reply.state, **moved}))


class RoundScores:
    """Asks for scores of a round's final model as a strategy's ``configure_evaluate`` does; a failure costs them only.

    Attributes:
        found: Round -> scores, averaged by the strategy.
    """

    def __init__(self, base: Base, model: GlobalModel, config: Mapping[str, Any]) -> None:
        self.found: dict[int, MetricRecord] = {}
        self._base, self._model, self._config = base, model, config

    def ask(self, server_round: int, trip: RoundTrip) -> dict[str, float]:
        """Ask the clients that the strategy chooses, if it asks any.

        Args:
            server_round: From 1.

        Returns:
            The scores, with names that begin with ``clients_``; an empty dict if there are none.
        """
        strategy = self._base.strategy
        if not self._base.evaluates or getattr(strategy, "fraction_evaluate", 1.0) == 0.0:
            return {}
        try:
            replies = self._replies(server_round, trip)
        except (AggregationError, InconsistentMessageReplies, QuorumError) as error:
            log(WARNING, "round %d: no scores of the clients: %s", server_round, one_line(str(error)))
            return {}
        if (scores := average_scores(strategy, server_round, replies)) is None:
            return {}
        self.found[server_round] = scores
        numbers = {key: float(value) for key, value in scores.items() if isinstance(value, int | float)}
        values = {f"clients_{printable(key)}": value for key, value in numbers.items()}
        log_info(f"round {server_round}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        return values

    def _replies(self, server_round: int, trip: RoundTrip) -> list[Message]:
        nodes, strategy = trip.connected(), self._base.strategy
        least = max(getattr(strategy, key, 1) for key in ("min_evaluate_nodes", "min_available_nodes"))
        if len(nodes) < least:
            raise QuorumError(f"{len(nodes)} clients are connected, the strategy waits for {least}")
        contents, kind = self._model.evaluation_requests(server_round, self._config, nodes)
        return trip.evaluate(trip.free(contents), strategy, f"scores of round {server_round}", kind)


# A round's numbers that go to the metrics only.
UNSAID = ("travel", "restarted", "arithmetic_s")
# A run ends after this many rounds without a model in a row, and can be resumed.
LOST_MOST = 3


class IterativeRounds:
    """Runs the rounds.

    Args:
        base: The strategy that combines a round's models; None for the one in the job's config.
        refiner: The method that fine-tunes the model of every round; None for none.
        compute: Where the refiner runs; None for a Ray actor, which stays for all rounds.

    Attributes:
        train_metrics: Round -> the clients' metrics, averaged by the strategy.
        scores: Round -> the result of ``evaluate_fn``.
    """

    def __init__(
        self,
        job: Job,
        base: Base | None,
        *,
        min_uploads: int,
        max_bytes: int,
        refiner: Refiner | None = None,
        compute: str | ServerCompute | None = None,
    ) -> None:
        self.base = base or configured_base(job.config)
        self.report: StageReport | None = None
        self.account = Account()
        self.train_metrics: dict[int, dict[str, float]] = {}
        self.scores: dict[int, MetricRecord] = {}
        self._job, self._min_uploads, self._max_bytes = job, min_uploads, max_bytes
        self._signatures = Signatures({job.student: job.builders[job.student]})
        self._module = fresh_student(replace(job, device="cpu"))
        self._model = GlobalModel(self.base, job, self._module)
        self._trip: RoundTrip | None = None
        self.client_scores = RoundScores(self.base, self._model, {})
        self._lost = self._wanted = 0
        self._attendance = Attendance()
        self._bounds = RoundBounds.of(self._module, self.base.strategy)
        self._config_key: str = getattr(self.base.strategy, "configrecord_key", "config")
        self._refined = Refinement(refiner, job, compute, say=log_info) if refiner is not None else None

    @property
    def state(self) -> State:
        """The weights after the last round, in copies."""
        return {name: value.detach().clone().contiguous() for name, value in self._model.state.items()}

    @property
    def message_type(self) -> str:
        """The type of the last round's requests, by which Flower routes them to the clients' functions."""
        return self._model.message_type

    def run(
        self,
        folder: RunFolder,
        grid: Grid,
        *,
        timeout: float,
        config: Mapping[str, Any],
        evaluate_fn: EvaluateFn | None = None,
        evaluate_config: Mapping[str, Any] | None = None,
    ) -> StageReport:
        """Run the rounds that the folder's checkpoint lacks, and keep the last one's model.

        Args:
            timeout: Seconds that the clients have for each round.
            evaluate_fn: Called for round 0, and as often as the observer.

        Raises:
            QuorumError: Too few clients are connected, or several rounds in a row, or all, gave no model.
            OneShotError: The strategy's model holds NaN or infinities.
        """
        began, kept, rounds = time.monotonic(), folder.round(1), self._job.config.rounds
        job = replace(self._job, device=resolve_device(self._job.device))
        self._module.to(job.device)
        self.client_scores = RoundScores(self.base, self._model, evaluate_config or {})
        with (
            torch_as_usual(steady_threads(job)),
            Journal(kept, log_info, label=job.config.label, unit="round") as journal,
            nullcontext()
            if self._refined is None
            else self._refined.held_open(journal.tick, owns_ray=not has_engine(grid)),
        ):
            trip = self.begin(folder, grid, timeout)
            done = self._restore(journal.resume(), trip)
            if not done:
                self._test(0, evaluate_fn)
            for number in range(done + 1, rounds + 1):
                values = self._one_round(number, trip, config, evaluate_fn)
                journal.record({"epoch": number, **values, **_mib_per_client(self.account.traffic)})
                journal.report(number, rounds, {key: value for key, value in values.items() if key not in UNSAID})
                if number % job.config.checkpoint_every == 0 or number == rounds:
                    journal.save(Snapshot(number, self._state_of(trip)))
                    self._attendance.checkpointed()
            resumed_at = journal.resumed_at
        if not self.train_metrics:  # fewer rounds than LOST_MOST
            raise QuorumError(f"none of the {rounds} rounds made a model; the warnings above say why")
        images = self._refined.images if self._refined is not None else None
        outcome = Outcome(student=self.state, timings=dict(self.account.seconds), images=images)
        report = StageReport(outcome, replace(job, device="cpu"), resumed_at, time.monotonic() - began)
        keep_outcome(folder, report)
        return report

    def begin(self, folder: RunFolder, grid: Grid, timeout: float) -> RoundTrip:
        """Return the object that asks the clients, the same one for all rounds of a process."""
        if self._trip is None:
            kept = folder.round(1)
            self.account.traffic = Traffic.read(kept.path / TRAFFIC_FILE)
            nodes = Nodes(grid, Refusals(kept), self.account.traffic, max_bytes=self._max_bytes)
            self._trip = RoundTrip(
                nodes,
                run_id=folder.id,
                signatures=self._signatures,
                quorum=self._min_uploads,
                timeout=timeout,
                num_classes=self._job.num_classes,
                agreement=self._job.agreement,
                part=self._model.part,
            )
        return self._trip

    def requests(self, server_round: int, trip: RoundTrip, config: Mapping[str, Any]) -> dict[int, RecordDict]:
        """Return the requests of a round to its nodes."""
        rounds, seed = self._job.config, self._job.seed
        remember = bool(getattr(self.base.strategy, "clients_remember", False))
        named, least = remember or self.base.asks_for_names, self.base.least if self.base.samples else 0
        nodes = trip.nodes(server_round, fraction=rounds.fraction, seed=seed, named=named, least=least)
        said = {
            **config,
            "server-round": server_round,
            "run-id": trip.run_id,
            "seed": seed,
            "iterative": True,
            "lr-factor": rounds.lr_decay ** (server_round - 1),
            "num-clients": trip.most,
            **self._job.agreement.to_record(EXPECTED),
        }
        contents = self._model.requests(server_round, said, nodes)
        self._wanted, contents = len(contents), trip.free(contents)
        if self._refined is not None:
            described, memory = self._refined.describe_generator(server_round), self._refined.memory
            contents = contents if described is None else _with_generator(contents, self._config_key, described, memory)
        return self._attendance.with_last_rounds(contents, trip.name_of, self._config_key) if remember else contents

    def start_from(self, arrays: ArrayRecord) -> None:
        """Replace the weights, by all arrays of the model or by the part of them that clients are to train and send.

        Raises:
            OptionError: They are neither, or a refiner would train the others.
        """
        name = self._job.student
        part = find_part(signature_of(arrays), self._signatures[name], self._job.builders[name], name)
        if part is not None and self._refined is not None:
            trained = {key for key, value in self._module.named_parameters() if value.requires_grad}
            if others := sorted(trained & part.rest.keys()):
                raise OptionError(
                    f"initial_arrays are a part of model {name!r}, and the refiner would train others too: "
                    f"{shorten_list(others)}. Must be frozen by the model (requires_grad_(False)), or in initial_arrays"
                )
        if is_adapter_state(arrays) and self._model.part is None:
            line = (
                "the strategy averages LoRA factors A and B apart, which is not the mean of the updates: LoRAMerge is"
            )
            log(WARNING, "%s", line)
        self._model.begin_with(arrays, part)

    def as_sent(self, state: State) -> ArrayRecord:
        """Return the arrays of a state that travel, under their names in messages."""
        return self._model.as_sent(state)

    def take(self, server_round: int, replies: Iterable[Message]) -> dict[str, float] | None:
        """Move to the next model by replies that the caller collected; None without a quorum: the model stays.

        Raises:
            OptionError: No round has been requested.
        """
        if self._trip is None:
            raise OptionError("replies came before any request: must be configure_train(), then aggregate_train()")
        answers = self._trip.of_one_form(self.base.strategy, self._trip.read(replies, self._model.check_answer))
        return self._move(server_round, answers) if len(answers) >= self._quorum(self._trip) else None

    def _one_round(
        self, number: int, trip: RoundTrip, config: Mapping[str, Any], evaluate_fn: EvaluateFn | None
    ) -> dict[str, float]:
        began = time.monotonic()
        contents = self.requests(number, trip, config)
        what = f"round {number} of {self._job.config.rounds}"
        given = trip.ask(contents, self._model.check_answer, what, self.message_type)
        answers = trip.of_one_form(self.base.strategy, given)
        self.account.spend("clients", began)
        began, values = time.monotonic(), {"answers": float(len(answers))}
        if len(answers) < (needed := self._quorum(trip)):
            line = f"round {number}: {len(answers)} usable answers, needs {needed}"
            self._lose(line, trip.causes)
            log_info(f"{line}: the model stays unchanged")
        elif (moved := self._move(number, answers)) is None:  # which the log has noted, with the reason
            self._lose(f"round {number}: no model of {len(answers)} answers")
        else:
            values, self._lost = values | in_row(moved), 0
        self.account.spend("server", began)
        if number % self._job.config.evaluate_every == 0 or number == self._job.config.rounds:
            values |= self._test(number, evaluate_fn)
        return values

    def _move(self, number: int, answers: Sequence[CheckedAnswer]) -> dict[str, float] | None:
        """Combine a round's models, and refine the result; return the round's numbers, None without a model."""
        answers = self._bounds.apply(number, self._model.state, answers)
        metrics = self._model.take(number, answers)
        if metrics is None:
            return None
        self.train_metrics[number] = metrics
        self._attendance.accept(number, (answer.client for answer in answers))
        if anew := [answer.client for answer in answers if answer.reply.metrics.get("restarted")]:
            log_info(f"round {number}: {', '.join(anew)} had lost its state of earlier rounds, and continues from zero")
        if self._refined is None:
            return dict(self.train_metrics[number])
        uploads = [_upload(answer, self._job.student) for answer in answers]
        self._model.state, losses = self._refined.run(number, uploads, self.state)
        return {**self.train_metrics[number], **losses}

    def _lose(self, line: str, causes: Sequence[str] = ()) -> None:
        self._lost += 1
        if self._lost >= LOST_MOST:
            why = f": {'; '.join(causes)}" if causes else ""
            raise QuorumError(f"{line}, for the {LOST_MOST}rd time without a break{why}. The run can be resumed")
        if any(cause in FOREIGN_APPS.values() for cause in causes) and not self.train_metrics:
            raise QuorumError(f"{line}: {'; '.join(causes)}")

    def _quorum(self, trip: RoundTrip) -> int:
        share: int = math.ceil(self._job.config.fraction * trip.most - 1e-9)
        return max(1, min(self._min_uploads, self._wanted if self.base.samples else share))

    def _test(self, number: int, evaluate_fn: EvaluateFn | None) -> dict[str, float]:
        began = time.monotonic()
        theirs = self.client_scores.ask(number, self._trip) if number and self._trip is not None else {}
        if evaluate_fn is not None and (scores := evaluate_fn(number, self.as_sent(self.state))) is not None:
            log_scores(f"round {number}: global evaluation", scores)
            self.scores[number] = scores
        self._module.load_state_dict(self._model.state)
        found = {**theirs, **(observe(self._job, number, self._module) if number else {})}
        self.account.spend("evaluation", began)
        return found

    def _restore(self, snapshot: Snapshot | None, trip: RoundTrip) -> int:
        if snapshot is None:
            self.base.begin_anew()
            return 0
        self._model.restore(snapshot.state)
        self._lost = snapshot.state["lost"]
        trip.restore(snapshot.state["most"])
        self._attendance.restore(snapshot.state["attendance"])
        train, clients, server = snapshot.state["history"]
        self.train_metrics.update(train)
        self.client_scores.found.update({number: MetricRecord(scores) for number, scores in clients.items()})
        self.scores.update({number: MetricRecord(scores) for number, scores in server.items()})
        if self._refined is not None:
            self._refined.memory = dict(snapshot.state["memory"])
        return snapshot.step

    def _state_of(self, trip: RoundTrip) -> dict[str, Any]:
        """Return the state that the next round builds on, as a tree for a checkpoint."""
        return {
            **self._model.snapshot(),
            "lost": self._lost,
            "most": trip.most,
            "attendance": self._attendance.snapshot(),
            "history": [self.train_metrics, _plain(self.client_scores.found), _plain(self.scores)],
            "memory": dict(self._refined.memory) if self._refined is not None else {},
        }


def _upload(answer: CheckedAnswer, architecture: str) -> Upload:
    reply = answer.reply
    return Upload(replace(reply.facts, client=answer.client, architecture=architecture), lambda: dict(reply.state))


def _with_generator(
    contents: Mapping[int, RecordDict], key: str, described: Mapping[str, str | int | float], weights: State
) -> dict[int, RecordDict]:
    """Return requests by node with a generator for the clients, and its description in the config under ``key``."""
    record, made = ArrayRecord(weights), dict[int, RecordDict]()
    for content in contents.values():  # most strategies ask all nodes by one and the same content
        if id(content) not in made:
            config = ConfigRecord({**content.config_records.get(key, ConfigRecord()), **described})
            made[id(content)] = RecordDict({**content, key: config, "generator": record})
    return {node: made[id(content)] for node, content in contents.items()}


def _plain(scores: Mapping[int, MetricRecord]) -> dict[int, dict[str, Any]]:
    return {number: dict(record) for number, record in scores.items()}


def _mib_per_client(traffic: Traffic) -> dict[str, float]:
    """Return the MiB per client so far: up, down, and both."""
    clients = max(1, len(traffic.clients)) * MIB
    ways = {"mib_up": traffic.up, "mib_down": traffic.down}
    found = {way: sum(moved.values()) / clients for way, moved in ways.items()}
    return {**found, "mib_per_client": traffic.mib_per_client}
