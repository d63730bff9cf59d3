"""OneShot: the adapter between Flower and a method. It asks once, waits, stores, runs, returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ..compute import choose
from ..errors import OptionError
from ..method import Job, Method, Normalization, check_needs
from ..options import check, flatten, option
from ..outcomes import load_model
from ..stage import (
    StageReport,
    all_cores,
    keep_outcome,
    kept_report,
    kept_round,
    pin_clients,
    pinned_clients,
    replay,
    run_stage,
)
from ..store.files import plain
from ..store.run_folder import RoundFolder, RunFolder, default_run_dir
from .collect import Collector, Traffic
from .evaluation import ClientEvaluation
from .exchange import is_simulation
from .messages import Request, Signature, Signatures

if TYPE_CHECKING:
    import torch

    from ..compute import ServerCompute
    from ..method import ModelBuilder, Observer, State

    Model = ModelBuilder | Mapping[str, ModelBuilder]
    EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

FLOWER_DEFAULT_ROUNDS = 3


@dataclass(frozen=True)
class RunOptions:
    """Settings of a run that most users leave alone."""

    threads: int = option(0, "torch threads of the server stage; 0 = all cores", low=0)
    device: str = option("auto", "device of the server stage: auto, cpu, cuda, cuda:1")
    max_upload_mib: float = option(2048.0, "largest accepted upload, MiB", above=0.0)
    checkpoint_s: float = option(20.0, "seconds between two checkpoints of the server stage, at least", low=0.0)

    def __post_init__(self) -> None:
        """Check every value."""
        check(self)


@dataclass
class Account:
    """What a run cost in this process: seconds per phase and the bytes of its messages."""

    seconds: dict[str, float] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    def spend(self, phase: str, began: float) -> None:
        """Add the time since ``began`` (``time.monotonic``) to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


class OneShot(Strategy):
    """A Flower strategy that collects every client's model once and hands them to a server method.

    Args:
        method: The server method.
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable.
        num_classes: C, the number of outputs of every model.
        input_shape: (channels, height, width) of one image.
        student: The architecture of the result; needed if ``model`` is a dict of several.
        normalization: The models' input space; None for mean 0.5 and std 0.5 in every channel.
        config: The method's config; None for its defaults.
        compute: Where the server stage runs: ``"ray"`` (the default), ``"in-process"``, or a ServerCompute.
        run_dir: The run folder: made if it is new, resumed if it is a run folder; None for a new one under
            ``$ONESHOT_RUNS`` or ``./runs``.
        min_uploads: The quorum.
        evaluate_model: ``nn.Module -> scores``, called once on the result, student or ensemble.
        fraction_evaluate: Share of the nodes that evaluate the resulting student at the end.
        seed: Every random draw of the server follows from it.
        options: Settings that most users leave alone.
        observer: ``(epoch, module) -> scores``, recorded after every server epoch; the method never sees them.
        facts: Written to run.json beside what is known here.

    Raises:
        OptionError: An argument is out of its range.
    """

    def __init__(  # noqa: PLR0913  a strategy's constructor is where a user finds every setting
        self,
        method: Method,
        model: Model,
        *,
        num_classes: int,
        input_shape: tuple[int, int, int],
        student: str | None = None,
        normalization: Normalization | None = None,
        config: Any = None,
        compute: str | ServerCompute | None = None,
        run_dir: str | Path | None = None,
        min_uploads: int = 2,
        evaluate_model: Callable[[torch.nn.Module], Mapping[str, float]] | None = None,
        fraction_evaluate: float = 0.0,
        seed: int = 0,
        options: RunOptions | None = None,
        observer: Observer | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        options = options or RunOptions()
        builders = _builders(model)
        if config is not None and not isinstance(config, method.config):
            raise OptionError(f"config is {type(config).__name__}: allowed is {method.config.__name__}")
        if min_uploads < 1:
            raise OptionError(f"min_uploads is {min_uploads}: allowed is a whole number at least 1")
        if not 0.0 <= fraction_evaluate <= 1.0:
            raise OptionError(f"fraction_evaluate is {fraction_evaluate}: allowed is a number from 0 to 1")
        halves = (0.5,) * input_shape[0]
        self.method = method
        self.job = Job(
            uploads=(),
            builders=builders,
            student=_student(student, builders),
            num_classes=num_classes,
            input_shape=input_shape,
            normalization=normalization or Normalization(halves, halves),
            config=config if config is not None else method.config(),
            seed=seed,
            threads=options.threads or all_cores(),
            device=options.device,
            observer=observer,
        )
        self.compute = compute
        self.min_uploads = min_uploads
        self.evaluate_model = evaluate_model
        self.account = Account()
        self._run_dir = run_dir
        self._max_bytes = int(options.max_upload_mib * 2**20)
        self._checkpoint_s = options.checkpoint_s
        self._facts = dict(facts or {})
        self._signatures = Signatures(builders)
        self._fraction_evaluate = fraction_evaluate
        self._evaluation = ClientEvaluation(fraction_evaluate)
        self._asked_with = ArrayRecord()
        self._folder: RunFolder | None = None
        self._report: StageReport | None = None

    @property
    def folder(self) -> RunFolder:
        """The run folder; opened, and locked for this process, at its first use, until :meth:`close`.

        A strategy stands for one run: after :meth:`close` the same folder is opened again.
        """
        if self._folder is None:
            path = Path(self._run_dir) if self._run_dir else default_run_dir("", self.method.name)
            self._folder = self._open(path, {})
            self._run_dir = path
        return self._folder

    @property
    def report(self) -> StageReport:
        """What the last server stage ended with.

        Raises:
            OptionError: No stage has ended yet.
        """
        if self._report is None:
            raise OptionError("the strategy has no outcome yet: call start() or replay() first")
        return self._report

    @property
    def outcome(self) -> torch.nn.Module:
        """The result as a module: the student if the method makes one, else the ensemble."""
        return load_model(self.report.outcome, self.report.job)

    def close(self) -> None:
        """Close the run folder, so that another process may go on with it."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = FLOWER_DEFAULT_ROUNDS,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the method once over the clients of ``grid``; Flower's signature and result.

        Args:
            grid: Flower's grid.
            initial_arrays: Start weights for the clients whose architecture they fit, and for the student; empty or
                None: every model starts from the seed.
            num_rounds: Not a switch here: rounds that a method has are options of the method.
            timeout: The deadline for uploads, in seconds from each round's beginning.
            train_config: Sent to the clients with every request.
            evaluate_config: Sent to the clients that evaluate the student.
            evaluate_fn: Called for round 0, and for the last round if the result is one model.

        Returns:
            Flower's result; its arrays are empty if the outcome is an ensemble.

        Raises:
            QuorumError: Fewer than ``min_uploads`` uploads at the deadline; what came is kept.
            OptionError: The method's needs are not met.
            StoreError: The run folder cannot be used.
        """
        if num_rounds != FLOWER_DEFAULT_ROUNDS:
            log(INFO, "num_rounds=%d is ignored: rounds are an option of the method %s", num_rounds, self.method.name)
        arrays = start = initial_arrays if initial_arrays is not None else ArrayRecord()
        result = Result()
        if evaluate_fn and arrays and (scores := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = scores
        self.summary()
        try:
            arrays = self._run_rounds(grid, arrays, timeout, train_config or ConfigRecord())
            began = time.monotonic()
            self._evaluate_on_server(arrays, start, result, evaluate_fn)
            self._evaluate_on_clients(grid, arrays, result, evaluate_config or ConfigRecord(), timeout)
            self.account.spend("evaluation", began)
        finally:
            self.close()
        return result

    def replay(self, run_dir: str | Path, *, target: str | Path | None = None) -> torch.nn.Module:
        """Run the method on the stored uploads of ``run_dir``, with no client in reach.

        Args:
            run_dir: A run folder.
            target: The run folder of the replay; one that was cut off goes on. None for a new one beside ``run_dir``.

        Returns:
            The result as a module.
        """
        path = Path(target) if target else default_run_dir("", self.method.name, parent=Path(run_dir).parent)
        compute = self.compute if self.compute is not None else "in-process"
        compute = choose(compute) if isinstance(compute, str) else compute
        with self._open(path, {"replay-of": str(Path(run_dir).absolute())}) as folder:
            self._report = replay(
                self.method,
                self.job,
                Path(run_dir),
                compute=compute,
                target=folder,
                log=_log,
                checkpoint_s=self._checkpoint_s,
            )
        return self.outcome

    # Flower's abstract steps, for callers that own the loop.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return one request for every connected node."""
        self._asked_with = arrays
        held = tuple(self.folder.round(server_round).held())
        request = Request(arrays, config, server_round, self.folder.id, self.job.seed, held)
        return [request.message(node_id) for node_id in sorted(grid.get_node_ids())]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the replies and run the server stage on them."""
        collector = self._collector(self.folder.round(server_round))
        for reply in replies:
            collector.receive(reply)
        collector.check_quorum(self.min_uploads, self.min_uploads, 0.0)
        pin_clients(self.folder.round(server_round), collector.clients)
        # Whoever owns the loop owns Ray: it is used where it runs.
        self._run_stage(server_round, self._asked_with, owns_ray=None, tick=None)
        student = self.report.outcome.student
        return (None if student is None else ArrayRecord(student)), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a share of the nodes to evaluate the student, as Flower's FedAvg does."""
        return self._evaluation.configure(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' scores by their examples, as Flower's FedAvg does."""
        return self._evaluation.aggregate(server_round, replies)

    def summary(self) -> None:
        """Log what runs, and where its results go."""
        log(INFO, "%s (%s), student %s", self.method.title, self.method.source, self.job.student)
        log(INFO, "run folder: %s", self.folder.path)

    # One round: uploads, then the server stage.

    def _run_rounds(self, grid: Grid, arrays: ArrayRecord, timeout: float, train_config: ConfigRecord) -> ArrayRecord:
        done, rounds = kept_round(self.folder), rounds_of(self.job.config)
        if done:
            log(INFO, "round %d of %d is finished: its result is read from the run folder", done, rounds)
            job = replace(self.job, uploads=self.folder.round(done).uploads())
            self._report = kept_report(self.folder, job)
            arrays = self._student_arrays(arrays)
        for server_round in range(done + 1, rounds + 1):
            tick = self._collect(grid, arrays, server_round, timeout, train_config)
            self._run_stage(server_round, arrays, owns_ray=not is_simulation(grid), tick=tick)
            arrays = self._student_arrays(arrays)
        return arrays

    def _collect(
        self, grid: Grid, arrays: ArrayRecord, server_round: int, timeout: float, train_config: ConfigRecord
    ) -> Callable[[], None] | None:
        began, folder = time.monotonic(), self.folder.round(server_round)
        if pinned_clients(folder) is not None:
            return None
        request = Request(arrays, train_config, server_round, self.folder.id, self.job.seed)
        collector = self._collector(folder)
        try:
            exchange = collector.collect(grid, request, timeout=timeout, min_uploads=self.min_uploads)
        finally:
            self.account.spend("clients", began)
        pin_clients(folder, collector.clients)
        return exchange.poll

    def _collector(self, folder: RoundFolder) -> Collector:
        collector = Collector(folder, self._signatures, num_classes=self.job.num_classes, max_bytes=self._max_bytes)
        self.account.traffic = collector.traffic
        return collector

    def _run_stage(
        self, server_round: int, arrays: ArrayRecord, *, owns_ray: bool | None, tick: Callable[[], None] | None
    ) -> None:
        began, folder = time.monotonic(), self.folder.round(server_round)
        clients = pinned_clients(folder) or ()
        uploads = tuple(upload for upload in folder.uploads() if upload.client in clients)
        job = replace(self.job, uploads=uploads, start=self._student_start(arrays))
        check_needs(self.method, job)
        compute = self.compute if self.compute is not None else "ray"
        compute = choose(compute, owns_ray=owns_ray) if isinstance(compute, str) else compute
        self._report = run_stage(
            self.method, job, compute, folder, log=_log, tick=tick, checkpoint_s=self._checkpoint_s
        )
        keep_outcome(self.folder, self._report, server_round)
        self.account.spend("server", began)

    def _student_start(self, arrays: ArrayRecord) -> State | None:
        wanted = dict(self._signatures[self.job.student])
        return dict(arrays.to_torch_state_dict()) if _signature(arrays) == wanted else None

    def _student_arrays(self, otherwise: ArrayRecord) -> ArrayRecord:
        student = self.report.outcome.student
        return otherwise if student is None else ArrayRecord(student)

    # The result's scores.

    def _evaluate_on_server(
        self, arrays: ArrayRecord, start: ArrayRecord, result: Result, evaluate_fn: EvaluateFn | None
    ) -> None:
        server_round, scores = rounds_of(self.job.config), MetricRecord()
        if self.report.outcome.student is None:
            reason = "it is an ensemble, not one set of arrays"
        else:
            result.arrays = arrays
            reason = "" if not start or _signature(arrays) == _signature(start) else "initial_arrays have other shapes"
        if evaluate_fn and reason:
            log(INFO, "evaluate_fn is not called for the result: %s", reason)
        elif evaluate_fn:
            scores = MetricRecord(dict(evaluate_fn(server_round, arrays) or {}))
        if self.evaluate_model is not None:
            scores.update({key: float(value) for key, value in self.evaluate_model(self.outcome).items()})
        if scores:
            result.evaluate_metrics_serverapp[server_round] = scores

    def _evaluate_on_clients(
        self, grid: Grid, arrays: ArrayRecord, result: Result, config: ConfigRecord, timeout: float
    ) -> None:
        server_round = rounds_of(self.job.config)
        if self.report.outcome.student is None or self._fraction_evaluate == 0.0:
            return
        if (scores := self._evaluation.run(grid, server_round, arrays, config, timeout)) is not None:
            result.evaluate_metrics_clientapp[server_round] = scores

    def _open(self, path: Path, more: Mapping[str, Any]) -> RunFolder:
        job = self.job
        identity = {
            "method": self.method.name,
            "seed": job.seed,
            "student": job.student,
            "num-classes": job.num_classes,
            "input-shape": job.input_shape,
            "normalization": [job.normalization.mean, job.normalization.std],
            **more,
            "config": flatten(job.config),
        }
        folder = RunFolder.open_or_create(path, {**identity, "threads": job.threads, **self._facts})
        try:
            _check_same_run(folder, identity)
        except OptionError:
            folder.close()
            raise
        return folder


def rounds_of(config: Any) -> int:
    """Return how many times a method asks the clients: its option ``rounds``, else once."""
    return int(getattr(config, "rounds", 1))


def _builders(model: Model) -> dict[str, ModelBuilder]:
    if callable(model):
        return {"model": model}
    if not model:
        raise OptionError("model is an empty dict: allowed is a callable, or a dict of architecture name -> callable")
    return dict(model)


def _student(student: str | None, builders: Mapping[str, ModelBuilder]) -> str:
    if student is None and len(builders) == 1:
        return next(iter(builders))
    if student is None or student not in builders:
        raise OptionError(f"student is {student!r}: allowed is one of {', '.join(builders)}")
    return student


def _signature(arrays: ArrayRecord) -> Signature:
    return {key: (tuple(array.shape), array.dtype) for key, array in arrays.items()}


def _check_same_run(folder: RunFolder, asked: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that began as another one: its uploads, checkpoint and result would be mixed up."""
    begun, now = folder.info, plain(asked)
    then = {**begun, **begun.get("config", {})}
    for key, value in {**now, **now["config"]}.items():
        if key != "config" and then.get(key, value) != value:
            raise OptionError(
                f"{key} is {value!r}, but the run in {folder.path} began with {then[key]!r}: "
                "go on with the same settings, or name another run_dir"
            )


def _log(line: str) -> None:
    log(INFO, "%s", line)
