"""The rounds of an iterative run: ask, combine, refine, test, checkpoint; and resume after the last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from ...compute.in_process import torch_as_usual
from ...core.errors import OptionError, QuorumError
from ...core.gpu import resolve_device
from ...method import Job, Outcome, Snapshot
from ...rounds.refinement import Refiner
from ...run.journal import Journal
from ...run.stage import TRAFFIC_FILE, StageReport, keep_outcome
from ...run.traffic import MIB, Traffic
from ...teacher.student import fresh_student, observe
from ...uploads.checks import Signatures
from ..nodes import Limits, Nodes, Refusals
from ..run import Account, say, signature_of
from .answers import Answered
from .attendance import Attendance
from .base import Base, base_of
from .bounding import RoundBounds
from .client_scores import ClientScores
from .global_model import GlobalModel
from .refined import RefinedRounds
from .round_records import in_row
from .round_trip import RoundTrip, Terms

if TYPE_CHECKING:
    from ...compute import ServerCompute
    from ...method import State
    from ...run.run_folder import RunFolder
    from ..arguments import EvaluateFn

# A round's numbers that go to the metrics only.
UNSAID = ("travel", "restarted", "arithmetic_s")
# A run ends after this many rounds without a model in a row, and can be resumed.
LOST_MOST = 3


class IterativeRounds:
    """Runs the rounds.

    Args:
        job: The job, without uploads.
        base: The strategy that combines a round's models; None for the one in the job's config.
        min_uploads: The quorum.
        max_bytes: Largest accepted answer.
        refiner: The method that fine-tunes the model of every round; None for none.
        compute: Where the refiner runs; None for a Ray actor, which stays for all rounds.

    Attributes:
        base: The strategy.
        account: The cost of the rounds in this process.
        train_metrics: Round -> the clients' metrics, averaged by the strategy.
        scores: Round -> the result of ``evaluate_fn``.
        client_scores: The clients' scores of a round's model.
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
        self.base = base or base_of(job.config)
        self.account = Account()
        self.train_metrics: dict[int, dict[str, float]] = {}
        self.scores: dict[int, MetricRecord] = {}
        self._job, self._min_uploads, self._max_bytes = job, min_uploads, max_bytes
        self._signatures = Signatures({job.student: job.builders[job.student]})
        self._module = fresh_student(replace(job, device="cpu"))
        self._model = GlobalModel(self.base, job, self._module.state_dict())
        self._trip: RoundTrip | None = None
        self.client_scores = ClientScores(self.base, self._model, {})
        self._lost = self._wanted = 0
        self._attendance = Attendance()
        self._bounds = RoundBounds.of(self._module, self.base.strategy)
        self._config_key: str = getattr(self.base.strategy, "configrecord_key", "config")
        self._refined = RefinedRounds(refiner, job, compute) if refiner is not None else None

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
            folder: The run folder.
            grid: Flower's grid.
            timeout: Seconds that the clients have for each round.
            config: Sent to the clients with every request.
            evaluate_fn: Called for round 0, and as often as the observer.
            evaluate_config: Sent to the clients with the requests for scores, as often as the observer runs.

        Raises:
            QuorumError: Too few clients are connected, or several rounds in a row, or all, gave no model.
            OneShotError: The strategy's model holds NaN or infinities.
        """
        began, kept, rounds = time.monotonic(), folder.round(1), self._job.config.rounds
        job = replace(self._job, device=resolve_device(self._job.device))
        self._module.to(job.device)
        self.client_scores = ClientScores(self.base, self._model, evaluate_config or {})
        with (
            torch_as_usual(job.threads),
            Journal(kept, say, label=job.config.label, unit="round") as journal,
            self._refined.held_open(grid, journal.tick) if self._refined is not None else nullcontext(),
        ):
            trip = self.begin(folder, grid, timeout)
            done = self._restore(journal.resume(), trip)
            if not done:
                self._test(0, evaluate_fn)
            for number in range(done + 1, rounds + 1):
                values = self._one_round(number, trip, config, evaluate_fn)
                journal.record({"epoch": number, **values, **_moved(self.account.traffic)})
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
            terms = Terms(self._min_uploads, Limits(timeout, self._max_bytes), self._job.num_classes)
            self._trip = RoundTrip(nodes, run_id=folder.id, signatures=self._signatures, terms=terms)
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
        }
        contents = self._model.requests(server_round, said, nodes)
        self._wanted, contents = len(contents), trip.free(contents)
        if self._refined is not None:
            contents = self._refined.lend(server_round, contents, self._config_key)
        return self._attendance.tell(contents, trip.name_of, self._config_key) if remember else contents

    def start_from(self, arrays: ArrayRecord) -> bool:
        """Replace the weights; False if the new ones are not of this architecture."""
        if signature_of(arrays) != dict(self._signatures[self._job.student]):
            return False
        self._model.state = dict(arrays.to_torch_state_dict())
        return True

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
            self._lose(line)
            say(f"{line}: the model stays unchanged")
        elif (moved := self._move(number, answers)) is None:  # which the log has noted, with the reason
            self._lose(f"round {number}: no model of {len(answers)} answers")
        else:
            values, self._lost = values | in_row(moved), 0
        self.account.spend("server", began)
        if number % self._job.config.evaluate_every == 0 or number == self._job.config.rounds:
            values |= self._test(number, evaluate_fn)
        return values

    def _move(self, number: int, answers: Sequence[Answered]) -> dict[str, float] | None:
        """Combine a round's models, and refine the result; return the round's numbers, None without a model."""
        answers = self._bounds.apply(number, self._model.state, answers)
        metrics = self._model.take(number, answers)
        if metrics is None:
            return None
        self.train_metrics[number] = metrics
        self._attendance.accept(number, (answer.client for answer in answers))
        if anew := [answer.client for answer in answers if answer.reply.metrics.get("restarted")]:
            say(f"round {number}: {', '.join(anew)} had lost its state of earlier rounds, and continues from zero")
        if self._refined is None:
            return dict(self.train_metrics[number])
        self._model.state, losses = self._refined.run(number, answers, self.state)
        return {**self.train_metrics[number], **losses}

    def _lose(self, line: str) -> None:
        self._lost += 1
        if self._lost >= LOST_MOST:
            raise QuorumError(f"{line}, for the {LOST_MOST}rd time without a break. The run can be resumed")

    def _quorum(self, trip: RoundTrip) -> int:
        share: int = math.ceil(self._job.config.fraction * trip.most - 1e-9)
        return max(1, min(self._min_uploads, self._wanted if self.base.samples else share))

    def _test(self, number: int, evaluate_fn: EvaluateFn | None) -> dict[str, float]:
        began = time.monotonic()
        told = self.client_scores.ask(number, self._trip) if number and self._trip is not None else {}
        if evaluate_fn is not None and (scores := evaluate_fn(number, ArrayRecord(self.state))) is not None:
            self.scores[number] = scores
        self._module.load_state_dict(self._model.state)
        found = {**told, **(observe(self._job, number, self._module) if number else {})}
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
            self._refined.go_on_from(snapshot.state["memory"])
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


def _plain(scores: Mapping[int, MetricRecord]) -> dict[int, dict[str, Any]]:
    return {number: dict(record) for number, record in scores.items()}


def _moved(traffic: Traffic) -> dict[str, float]:
    """Return the MiB per client so far: up, down, and both."""
    clients = max(1, len(traffic.clients)) * MIB
    ways = {"mib_up": traffic.up, "mib_down": traffic.down}
    found = {way: sum(moved.values()) / clients for way, moved in ways.items()}
    return {**found, "mib_per_client": traffic.mib_per_client}
