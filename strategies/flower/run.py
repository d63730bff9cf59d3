"""The rounds of a run: each collects uploads and runs the server stage on them; most methods have one."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import INFO
from pathlib import Path
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from ..combiners.outcomes import load_model
from ..compute import ServerCompute, choose
from ..compute.in_process import InProcess
from ..core import refusals
from ..core.clients import TEST_SHARE
from ..core.durable import MIB
from ..core.errors import OptionError
from ..core.facts import CLASSIFIER, EXPECTED, Agreed, UploadFacts, weights_alone
from ..core.fingerprint import weights_sha256
from ..core.names import is_adapter_state
from ..core.options import option
from ..core.stage_options import NONE, OFF, RIDGE, StageOptions
from ..method import Job, Method, Need, State
from ..run.quarantine import Gatekeeper, quarantined_clients
from ..run.run_folder import RoundFolder, RunFolder, default_run_dir, open_run
from ..run.stage import (
    TRAFFIC_FILE,
    Finish,
    StageReport,
    keep_outcome,
    last_finished_round,
    load_report,
    pin_clients,
    pinned_clients,
    run_stage,
    unpin_clients,
)
from ..run.traffic import Traffic
from ..teacher.last_layer import KIND, ask_sums, check_solvable, solve_layer
from ..teacher.student import start_model
from ..teacher.weight_space import common_start
from ..uploads.builders import accepted_builders, builders_of_kind, check_student
from ..uploads.checks import Signature, Signatures, check_outputs
from ..uploads.needs import check_needs
from ..uploads.parts import Part, find_part
from .arguments import Participation
from .asking import Exchange
from .clients import GridClients
from .collect import Collector
from .messages import Request, in_order, is_anonymous
from .names import ClientNames
from .nodes import MAX_BYTES, Nodes, Refusals, SentQuestion, has_engine

PROBE_S = 60.0  # that a client has to say whether its app answers a method's questions; then the run begins anyway


@dataclass(frozen=True)
class RunOptions(StageOptions):
    """Settings of a run that most users leave alone."""

    accepted: str = option("", "comma-separated architectures that uploads may have; empty: all of the models")

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        if self.teacher == "run":
            raise OptionError("option 'teacher' is 'run': must be 'method' or a teacher's name; 'run' needs a replay")

    @property
    def job_teacher(self) -> str | None:
        """The teacher of a job without uploads."""
        return None if self.teacher == "method" else self.teacher


@dataclass
class Account:
    """The cost of a run in this process: seconds per phase and the bytes of its messages."""

    seconds: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    def spend(self, phase: str, began: float) -> None:
        """Add the time since ``began`` (``time.monotonic``) to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


class OfOneRun(Protocol):
    """What a strategy's rounds have of their run: its report, None before its end, and its cost."""

    report: StageReport | None
    account: Account


class RunStrategy(Strategy):
    """A Flower strategy with a run folder.

    Attributes:
        job: What the server works on, without uploads.
        rounds: The rounds of the run.
    """

    job: Job
    rounds: OfOneRun
    _run_dir: Path | None
    _facts: Mapping[str, Any]  # entries of run.json, beside those that the strategy adds
    _folder: RunFolder | None = None
    _reports = True  # the app has a report of its own
    _makes = "start()"  # what makes an outcome

    @abstractmethod
    def _identity(self) -> tuple[str, Mapping[str, Any]]:
        """Return the method's name, and the facts beside the job that a resumed run must have again."""

    @property
    def folder(self) -> RunFolder:
        """The run folder; opened, and locked for this process, at its first use, until :meth:`close`.

        A strategy stands for one run: after :meth:`close` the same folder is opened again.
        """
        if self._folder is None:
            name, identity = self._identity()
            path = self._run_dir or default_run_dir("", name)
            self._folder = open_run(path, name, self.job, identity=identity, facts=self._facts)
            self._run_dir = self._folder.path
        return self._folder

    @property
    def report(self) -> StageReport:
        """The report of the last server stage, or of all rounds.

        Raises:
            OptionError: None has ended yet.
        """
        if self.rounds.report is None:
            raise OptionError(f"the strategy has no outcome yet: call {self._makes} first")
        return self.rounds.report

    @property
    def account(self) -> Account:
        """The cost of the run in this process."""
        return self.rounds.account

    @property
    def outcome(self) -> torch.nn.Module:
        """The result as a module: the student, or the last round's model; without one the ensemble."""
        return load_model(self.report.outcome, self.report.job)

    def close(self) -> None:
        """Close the run folder, so that another process may resume it."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None


class Rounds:
    """Collects uploads and runs the server stage, round by round.

    Args:
        compute: Where the server stage runs; None for Ray.

    Attributes:
        report: The report of the last server stage; None before the first.
        train_metrics: Round -> the metrics of the clients that uploaded in this process, averaged by their examples.

    Raises:
        OptionError: The job or ``compute`` is invalid.
    """

    def __init__(
        self,
        method: Method,
        job: Job,
        *,
        compute: str | ServerCompute | None,
        min_uploads: int,
        options: RunOptions,
        participation: Participation = Participation(),  # noqa: B008  it is frozen
    ) -> None:
        # All checks that are possible before a client has worked; an upload is checked when it arrives.
        check_needs(method, job)
        if job.num_classes and (method.uploads == CLASSIFIER or method.kind == "student"):
            check_student(
                job, trained=method.kind == "student", classifies=not method.any_model, trained_by_clients=True
            )
        if not job.num_classes and options.gatekeeper.policy != OFF:
            raise OptionError("the gatekeeper runs the models: needs num_classes and input_shape")
        _check_last_layer(method, job, options)
        choose(compute)
        self.report: StageReport | None = None
        self.account = Account()
        self.train_metrics: dict[int, dict[str, Any]] = {}
        self.compute = compute
        self._start: str | None = None
        self._sent: State = {}
        self._names = ClientNames()
        self._test_share: dict[str, Any] = {}  # of the clients' examples, as the uploads were asked for
        self._method = method
        self._job = job
        self.min_uploads = min_uploads
        self.gatekeeper = Gatekeeper(options.gatekeeper, min_uploads, log_info)
        self._options, self.participation = options, participation
        self._signatures = Signatures(job.builders)
        self._part: Part | None = None
        self._sendable = Signatures(accepted_builders(builders_of_kind(job.builders, method.uploads), options.accepted))

    def run(
        self, folder: RunFolder, grid: Grid, arrays: ArrayRecord, *, timeout: float, train_config: ConfigRecord
    ) -> ArrayRecord:
        """Run all rounds whose outcome the run folder lacks.

        Args:
            timeout: The deadline for uploads, in seconds from each round's beginning.

        Returns:
            The last student's weights, or ``arrays`` if the outcome is an ensemble.

        Raises:
            QuorumError: Too few uploads.
            OptionError: The method's needs are not met.
        """
        self.remember(train_config)
        done, rounds = last_finished_round(folder), self._method.plan(self._job.config).rounds
        if done:
            log(INFO, "round %d of %d is finished: its result is read from the run folder", done, rounds)
            self.report = load_report(folder, replace(self._job, uploads=folder.round(done).uploads()))
            arrays = self.student_arrays() or arrays
        for server_round in range(done + 1, rounds + 1):
            if server_round == 1:
                arrays = self._solved_start(folder, grid, arrays, timeout)
                self._fix_start(folder, arrays)
            said = {"config": train_config, "run_id": folder.id, **self.keys}
            request = Request.of(self._method, self._job, arrays, server_round, **said)
            tick = self._collect(folder.round(server_round), grid, request, timeout)
            place = self._place(folder, server_round, grid, timeout)
            finish = self._finish(folder, server_round, grid, timeout)
            self._run_stage(folder, server_round, arrays, place=place, tick=tick, finish=finish)
            arrays = self.student_arrays() or arrays
        return arrays

    def remember(self, train_config: ConfigRecord) -> None:
        """Remember what the clients were asked to keep from training: later questions are about these examples."""
        self._test_share = {key: value for key, value in train_config.items() if key == TEST_SHARE}

    def start_from(self, arrays: ArrayRecord) -> None:
        """Compare initial arrays with the model that clients upload: uploads have the same names.

        Raises:
            OptionError: They are neither the model's nor a part of them.
        """
        self._part = None
        if not arrays or self._method.uploads != CLASSIFIER or len(self._sendable) != 1:
            return
        ((name, whole),) = self._sendable.items()
        self._part = find_part(signature_of(arrays), whole, self._job.builders[name], name)
        if self._part is not None and self._part.rest and self._method.any_model and is_adapter_state(arrays):
            raise OptionError(
                "initial_arrays are LoRA factors, and the means of A and of B apart are another matrix than the mean "
                "of the updates: the model must be SharedBase(get_model()), or the strategy LoRAMerge()"
            )
        if self._part is not None and self._part.rest:
            line = "uploads have the %d of %d arrays of %s that initial_arrays have; the model loads the others itself"
            log(INFO, line, len(self._part.names), len(whole), name)
        if self._part is not None and self._part.dtypes:
            sent, own = next(iter(self._part.dtypes.values()))
            log(INFO, "%d arrays are %s in messages, and %s in %s", len(self._part.dtypes), sent, own, name)

    def check_handler(self, folder: RunFolder, grid: Grid) -> None:
        """Refuse ClientApps that answer no questions after the upload, if the method has any, before a client trains.

        One client is asked; the others only if it has no function for such questions.

        Raises:
            OptionError: No client has one.
        """
        kept = folder.round(1)
        if pinned_clients(kept) is not None:
            return
        if self._method.client_phase is not None:
            name = self._method.name
            self._check_handler(
                kept,
                grid,
                name,
                f"method {name!r} asks clients again after their upload",
                f"the line oneshot_fl.client.{name}.serve(app, ...), see help(oneshot_fl.client.{name})",
            )
        for setting in ("start", "finish"):
            if getattr(self._options, setting) == RIDGE:
                self._check_handler(
                    kept,
                    grid,
                    KIND,
                    f"{setting}={RIDGE!r} asks clients for sums of the last layer's inputs",
                    f"a function @app.train({KIND!r}) that returns oneshot_fl.client.answer_question(msg, "
                    "{'client': name}, ArrayRecord(oneshot_fl.client.measures.sum_inputs(...))), or no such option",
                )

    def _check_handler(self, kept: RoundFolder, grid: Grid, name: str, why: str, needed: str) -> None:
        nodes, fine, lacking = self.nodes(kept, grid), set[int](), set[int]()
        question = RecordDict({"config": ConfigRecord({"probe": True})})

        def ask(node: int) -> Message | None:
            asked = exchange.asked > len(lacking) or fine
            return None if asked else Message(question, dst_node_id=node, message_type=f"train.{name}")

        def receive(reply: Message, sent: SentQuestion) -> bool:
            lacks = reply.has_error() and f"registered with name '{name}'" in str(reply.error.reason)
            (lacking if lacks else fine).add(sent.node)
            return True

        exchange = Exchange(nodes, "probe", question=ask, receive=receive)
        exchange.wait(
            PROBE_S, lambda: bool(fine) or lacking >= nodes.present() != set(), lambda: "the first client's app"
        )
        if lacking and not fine:
            raise OptionError(f"{why}, and this ClientApp has no function for it: must have {needed}")

    @property
    def keys(self) -> dict[str, str]:
        """The names of the records of a request."""
        return {"arrays_key": self.participation.arrayrecord_key, "config_key": self.participation.configrecord_key}

    def take(self, folder: RunFolder, server_round: int, replies: Iterable[Message], arrays: ArrayRecord) -> None:
        """Store replies that the caller collected, and run the server stage on them."""
        if RIDGE in (self._options.start, self._options.finish):
            raise OptionError("options 'start' and 'finish' ask the clients: 'ridge' needs strategy.start()")
        round_folder = folder.round(server_round)
        if server_round == 1:
            self._fix_start(folder, arrays)
        collector = self._collector(round_folder)
        for reply in replies:
            collector.take(reply)
        collector.check_quorum(self.min_uploads, self.min_uploads, 0.0)
        self.train_metrics[server_round] = collector.mean_metrics()
        self._pin(round_folder, collector.clients, tick=None)
        # The owner of the loop owns Ray: it is used where it runs.
        self._run_stage(
            folder,
            server_round,
            arrays,
            place=choose(self.compute),
            tick=None,
            finish=self._finish(folder, server_round),
        )

    def student_arrays(self) -> ArrayRecord | None:
        """Return the last student's weights; None without a student."""
        student = self.report.outcome.student if self.report is not None else None
        return None if student is None else self.as_sent(student)

    def as_sent(self, state: State) -> ArrayRecord:
        """Return the arrays of a model in the order and under the names of a client's upload."""
        part = None if self._part is None else self._part.of(dict(state))
        if part is not None:
            return ArrayRecord(part)
        if self._part is not None:
            log(INFO, "the result has all arrays of its model: those that initial_arrays lack were trained too")
        # A stored student has its names in the order of a hash, and projects zip the arrays with those of a model.
        return ArrayRecord(in_order(state, self._signatures[self._job.student]))

    def nodes(self, folder: RoundFolder, grid: Grid) -> Nodes:
        """Return the nodes as a round knows them after its uploads: by their names, and in its account of bytes."""
        # Late uploads are booked in the collector's account: one file has one account.
        if self.account.traffic.path != folder.path / TRAFFIC_FILE:
            self.account.traffic = Traffic.read(folder.path / TRAFFIC_FILE)
        most = min(self._max_bytes, MAX_BYTES)
        return Nodes(grid, Refusals(folder), self.account.traffic, self._names, max_bytes=most)

    def _collect(self, folder: RoundFolder, grid: Grid, request: Request, timeout: float) -> Callable[[], None] | None:
        if (pinned := pinned_clients(folder)) is not None:
            if set(pinned) <= set(folder.held()):
                return None
            log(INFO, "uploads that the server stage began with were removed: it begins anew")
            unpin_clients(folder)
        began, collector = time.monotonic(), self._collector(folder)
        try:
            exchange = collector.collect(grid, request, timeout=timeout, min_uploads=self.min_uploads)
        finally:
            self.account.spend("clients", began)
        exchange.poll(everybody=True)
        collector.close()
        self._pin(folder, collector.clients, tick=exchange.poll)
        self.train_metrics[request.server_round] = collector.mean_metrics()
        return exchange.poll

    def _pin(self, folder: RoundFolder, present: Iterable[str], *, tick: Callable[[], None] | None) -> None:
        """Fix the clients of a server stage: those with an upload that the gatekeeper admits."""
        began, names, out, held = time.monotonic(), set(present), set[str](), folder.held()
        if self.gatekeeper.judges and pinned_clients(folder) is None:
            uploads = [upload for upload in folder.uploads() if upload.client in names]
            out = replace(self.gatekeeper, tick=tick).admit(folder, self._job, uploads, folder.records())
            self.account.spend("gatekeeper", began)
        pin_clients(folder, names, out, held=held)

    @property
    def _max_bytes(self) -> int:
        return int(self._options.max_upload_mib * MIB)

    def _collector(self, folder: RoundFolder) -> Collector:
        num_classes, names = self._job.num_classes, self._names
        collector = Collector(
            folder,
            self._sendable,
            num_classes=num_classes,
            max_bytes=self._max_bytes,
            names=names,
            agreement=self._job.agreement,
            probe=self._probe,
            participation=self.participation,
            part=self._part,
        )
        self.account.traffic = collector.traffic
        return collector

    def _fix_start(self, folder: RunFolder, arrays: ArrayRecord) -> None:
        """Keep the weights that the clients start from for replays, and their digest for a method of one start."""
        start = self._student_start(arrays)
        if start is not None:
            folder.save_start(start)
            self._sent = start
        if Need.COMMON_START in self._method.needs:
            self._start = weights_sha256(common_start(replace(self._job, start=start)))

    def _solved_start(self, folder: RunFolder, grid: Grid, arrays: ArrayRecord, timeout: float) -> ArrayRecord:
        """Return the arrays that the clients start from: those given, or with a last layer that their sums give."""
        if self._options.start == NONE:
            return arrays
        if (stored := folder.start()) is None:
            log(INFO, "the clients send sums of the last layer's inputs, of which their start is solved")
            began, job = time.monotonic(), replace(self._job, start=self._student_start(arrays))
            state = start_model(job).state_dict()
            clients = self.clients(folder, 1, grid, timeout)
            stored = solve_layer(job, state, ask_sums(clients, job, state, phase="start", quorum=self.min_uploads))
            self.account.spend("clients", began)
        return ArrayRecord(in_order(stored, self._signatures[self._job.student]))

    def _finish(self, folder: RunFolder, server_round: int, grid: Grid | None = None, timeout: float = 0.0) -> Finish:
        def ask(job: Job, state: State) -> dict[str, State]:
            assert grid is not None  # noqa: S101  `take` refuses to ask
            log(
                INFO,
                "the clients send sums of the last layer's inputs in the result, of which its last layer is solved",
            )
            clients = self.clients(folder, server_round, grid, timeout)
            return ask_sums(clients, job, state, phase="finish", quorum=self.min_uploads)

        return Finish(self._options.finish, folder.round(server_round).path, None if grid is None else ask)

    def _probe(self, facts: UploadFacts, state: State) -> str:
        if self._start is not None and facts.start not in (None, self._start):
            raise refusals.other_start(facts.start, self._start)
        if self._sent and _equal(self._sent, weights_alone(state)):
            return "its weights are those that it was sent: must be what its training ended with"
        if not self._job.num_classes:
            return ""
        build, shape = self._job.builders[facts.architecture], self._job.input_shape
        return check_outputs(facts.architecture, weights_alone(state), build, shape, num_examples=facts.num_examples)

    def _place(self, folder: RunFolder, server_round: int, grid: Grid, timeout: float) -> ServerCompute:
        """Return the place of the server stage: this process, if the method sends the clients questions."""
        if self._method.client_phase is None:
            return choose(self.compute, owns_ray=not has_engine(grid))
        return InProcess(self.clients(folder, server_round, grid, timeout))

    def clients(
        self, folder: RunFolder, server_round: int, grid: Grid, timeout: float, *, keep_refusals: bool = True
    ) -> GridClients:
        """Return the clients of a round's server stage, for questions after their upload.

        Args:
            keep_refusals: Whether answers that do not count are recorded in the run folder.
        """
        round_folder = folder.round(server_round)
        agreed = Agreed(self._job.agreement)
        for record in round_folder.records():
            agreed.add(record.client, record.facts.agreement)
        # The files on the clients' own disks bear the id of the run that they uploaded to.
        forgotten = tuple(folder.info.get("forgotten", ()))
        common = {
            "run-id": str(folder.info.get("uploads-id", folder.id)),
            "seed": self._job.seed,
            "forget-others": bool(forgotten),
            **agreed.known.to_record(EXPECTED),
            **self._test_share,
        }
        uploaded, nodes = pinned_clients(round_folder) or (), self.nodes(round_folder, grid)
        nodes.refusals = nodes.refusals if keep_refusals else Refusals(None)
        return GridClients(
            nodes,
            common=common,
            timeout=timeout,
            left_out=(*forgotten, *quarantined_clients(round_folder)),
            members=None if not uploaded or any(map(is_anonymous, uploaded)) else uploaded,
        )

    def _run_stage(
        self,
        folder: RunFolder,
        server_round: int,
        arrays: ArrayRecord,
        *,
        place: ServerCompute,
        tick: Callable[[], None] | None,
        finish: Finish,
    ) -> None:
        began, round_folder = time.monotonic(), folder.round(server_round)
        clients = pinned_clients(round_folder) or ()
        uploads = tuple(upload for upload in round_folder.uploads() if upload.client in clients)
        job = replace(self._job, uploads=uploads, start=self._student_start(arrays))
        check_needs(self._method, job)
        checkpoint_s = self._options.checkpoint_s
        self.report = run_stage(
            self._method, job, place, round_folder, log=log_info, tick=tick, checkpoint_s=checkpoint_s, finish=finish
        )
        self.account.traffic.save()
        keep_outcome(folder, self.report, server_round)
        self.account.spend("server", began)

    def _student_start(self, arrays: ArrayRecord) -> State | None:
        wanted = dict(self._signatures[self._job.student])
        if self._part is not None and arrays.keys() == self._part.names.keys():
            return self._part.complete(dict(arrays.to_torch_state_dict()))
        return dict(arrays.to_torch_state_dict()) if signature_of(arrays) == wanted else None


def _check_last_layer(method: Method, job: Job, options: RunOptions) -> None:
    """Refuse a last layer made anew where it has no meaning, before a client has worked."""
    for setting, how in (("start", options.start), ("finish", options.finish)):
        if how == NONE:
            continue
        if method.uploads != CLASSIFIER or (setting == "finish" and method.kind == "ensemble"):
            ends = "trains no classifiers" if method.uploads != CLASSIFIER else "ends with an ensemble"
            raise OptionError(
                f"setting {setting!r} is {how!r}: must be {NONE!r} with method {method.name!r}, which {ends}"
            )
        if (rounds := method.plan(job.config).rounds) > 1:
            raise OptionError(f"setting {setting!r} is {how!r}: must be {NONE!r} in {rounds} rounds of uploads")
        check_solvable(job, setting, how)


def _equal(one: State, other: State) -> bool:
    same_names = one.keys() == other.keys()
    return same_names and all(one[n].dtype == v.dtype and torch.equal(one[n], v) for n, v in other.items())


def signature_of(arrays: ArrayRecord) -> Signature:
    """Return the shapes and dtypes of a set of arrays."""
    return {key: (tuple(array.shape), array.dtype) for key, array in arrays.items()}


def log_info(line: str) -> None:
    """Log a line for the user."""
    log(INFO, "%s", line)
