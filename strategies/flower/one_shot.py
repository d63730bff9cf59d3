"""OneShot: the adapter between Flower and a method. It asks once, waits, stores, runs, returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Unpack

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from ..compute import ServerCompute, choose
from ..core.facts import CLASSIFIER, UNKNOWN_SHAPE, choose_normalization, holds_images
from ..core.options import QUICK
from ..core.places import expand_user
from ..method import ASSUMED, Job, Method, Normalization, Observer
from ..run.quarantine import guarded_replay
from ..run.run_folder import default_run_dir, open_run
from ..run.stage import StageReport, pinned_clients
from ..run.trial import describe_cost
from ..scores.exchange import Evaluation, ask, models_to_score, question_of, result_name
from ..uploads.builders import Model, check_described, check_task, choose_config, choose_student, named_builders
from ..uploads.forms import FormedBuilder, formed_builders
from ..uploads.needs import check_needs, list_demands
from .arguments import (
    EvaluateFn,
    FlowerArguments,
    Participation,
    absolute,
    check_arguments,
    check_start,
    keep_plain_scores,
    scores_by_name,
)
from .evaluation import ClientEvaluation
from .messages import Request, is_anonymous
from .results import log_ensemble, log_scores, show_result, single_model, write_run_card
from .run import Rounds, RunOptions, RunStrategy, signature_of
from .surroundings import refuse_noise_around

FLOWER_DEFAULT_ROUNDS = 3


class OneShot(RunStrategy):
    """A Flower strategy that collects every client's model once and hands them to a server method.

    Args:
        method: The server method.
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable.
        num_classes: C, the number of outputs of every model; None for a method that works on any model's weights.
        input_shape: (channels, height, width) of one image; None as for the number of classes.
        student: The architecture of the result; needed if ``model`` is a dict of several.
        normalization: The models' input space; None for mean 0.5 and std 0.5 of images; rows and texts stay as is.
        config: The method's config; None for that of the preset.
        preset: The values of the method's options: ``"quick"``, minutes on a CPU; ``"published"``; ``"paper"`` or
            ``"published-code"`` where these differ. A method without the preset has its published values.
        compute: Where the server stage runs: ``"auto"`` (the default), ``"ray"``, ``"in-process"``, or a ServerCompute.
        run_dir: The run folder: made if it is new, resumed if it is a run folder; None for a new one under
            ``$ONESHOT_RUNS``, else in ``~/.local/state/oneshot-fl/runs``.
        min_uploads: The quorum.
        evaluate_model: ``nn.Module -> scores``, called once on the result, student or ensemble.
        fraction_evaluate: Share of the nodes that evaluate the resulting student at the end.
        seed: Every random draw of the server follows from it.
        options: Settings that most users leave alone.
        proxy: Images without labels [N, ch, H, W], uint8 or float32 in [0, 1], for methods that need them.
        observer: ``(epoch, module) -> scores``, recorded after every server epoch; the method never sees them.
        facts: Entries of run.json, beside those that the strategy adds.
        classes: The names of the classes in the order of their numbers. An upload that names others, or another order,
            is refused; without them, uploads are compared with the first that names its classes.

        flower: Arguments of Flower's FedAvg, see :class:`.arguments.FlowerArguments`.

    Raises:
        OptionError: An argument is out of its range.
    """

    rounds: Rounds
    _makes = "start() or replay()"

    def __init__(  # noqa: PLR0913  a strategy's constructor is where a user finds every setting
        self,
        method: Method,
        model: Model,
        *,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        student: str | None = None,
        normalization: Normalization | None = None,
        config: Any = None,
        preset: str = QUICK,
        compute: str | ServerCompute | None = None,
        run_dir: str | Path | None = None,
        min_uploads: int = 2,
        evaluate_model: Callable[[torch.nn.Module], Mapping[str, float]] | None = None,
        fraction_evaluate: float = 0.0,
        seed: int = 0,
        options: RunOptions | None = None,
        proxy: torch.Tensor | None = None,
        observer: Observer | None = None,
        facts: Mapping[str, Any] | None = None,
        classes: Sequence[str] = (),
        **flower: Unpack[FlowerArguments],
    ) -> None:
        participation = Participation.read(type(self).__name__, flower)
        options, builders = options or RunOptions(), named_builders(model, input_shape)
        check_described(method, num_classes, input_shape)
        shape = check_arguments(
            UNKNOWN_SHAPE if input_shape is None else input_shape,
            seed=seed,
            min_uploads=min_uploads,
            fraction_evaluate=fraction_evaluate,
        )
        job = Job(
            uploads=(),
            builders=builders,
            student=choose_student(student, builders),
            num_classes=num_classes or 0,
            input_shape=shape,
            normalization=choose_normalization(normalization, shape),
            config=choose_config(config, method, preset),
            seed=seed,
            clients_seed=seed,
            threads=options.threads,
            device=options.device,
            proxy=proxy,
            teacher=options.job_teacher,
            observer=observer,
            store_images=options.store_images,
            agreement=check_task(num_classes, classes),
        )
        check_needs(method, job)
        if method.uploads == CLASSIFIER and not method.any_model:
            job = replace(job, builders=formed_builders(job))
        self._set_up(method, job, compute, run_dir, min_uploads, options, facts, participation)
        self.evaluate_model, self._evaluation = evaluate_model, ClientEvaluation(fraction_evaluate, seed, participation)
        self._assumed = normalization is None and holds_images(shape)

    @classmethod
    def of_job(
        cls,
        method: Method,
        job: Job,
        *,
        compute: str | ServerCompute | None,
        run_dir: str | Path | None,
        min_uploads: int,
        options: RunOptions,
        facts: Mapping[str, Any],
    ) -> OneShot:
        """Return the strategy of a job that is built already, with the threads, device and teacher of the options."""
        strategy = cls.__new__(cls)
        strategy._set_up(method, job, compute, run_dir, min_uploads, options, facts)
        strategy.evaluate_model, strategy._evaluation, strategy._assumed = None, ClientEvaluation(0.0, job.seed), False
        strategy._reports = False  # the app has a report of its own
        return strategy

    def _set_up(  # noqa: PLR0913  the constructors' arguments
        self,
        method: Method,
        job: Job,
        compute: str | ServerCompute | None,
        run_dir: str | Path | None,
        min_uploads: int,
        options: RunOptions,
        facts: Mapping[str, Any] | None,
        participation: Participation = Participation(),  # noqa: B008  it is frozen
    ) -> None:
        self.method, self.job = method, job
        self._run_dir, self._options, self._facts = absolute(run_dir), options, dict(facts or {})
        self.rounds = Rounds(
            method, job, compute=compute, min_uploads=min_uploads, options=options, participation=participation
        )
        self._asked_with = ArrayRecord()

    def _identity(self) -> tuple[str, Mapping[str, Any]]:
        return self.method.name, {"gatekeeper.policy": self._options.gatekeeper.policy}

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
            num_rounds: Ignored: the number of rounds is an option of the method.
            timeout: The deadline for uploads, in seconds from each round's beginning.
            train_config: Sent to the clients with every request.
            evaluate_config: Sent to the clients that evaluate the student.
            evaluate_fn: Called for round 0, and for the last round with the result's arrays.

        Returns:
            Flower's result. Its arrays are the student; without one the average of the ensemble's members; and where
            these have several architectures there are none, and reading them is an error.

        Raises:
            QuorumError: Fewer than ``min_uploads`` uploads at the deadline; those that arrived are kept.
            OptionError: The method's needs are not met.
            StoreError: The run folder cannot be used.
        """
        check_start(self, OneShot, timeout, initial_arrays)
        evaluate_fn = keep_plain_scores(evaluate_fn)
        arrays = start = initial_arrays if initial_arrays is not None else ArrayRecord()
        self.rounds.start_from(start)
        self._log_assumptions(num_rounds)
        result = Result()
        if evaluate_fn and arrays:
            scores = evaluate_fn(0, arrays)
            log_scores("Initial global evaluation results", scores)
            if scores is not None:
                result.evaluate_metrics_serverapp[0] = scores
        self.summary()
        try:
            self._log_cost(grid)
            config = train_config or ConfigRecord()
            if self._reports:
                self.rounds.check_handler(self.folder, grid)
            arrays = self.rounds.run(self.folder, grid, arrays, timeout=timeout, train_config=config)
            result.train_metrics_clientapp |= {n: MetricRecord(dict(m)) for n, m in self.rounds.train_metrics.items()}
            for number, metrics in result.train_metrics_clientapp.items():
                if metrics:  # a training that returns None has none
                    log_scores(f"Metrics of the clients' training, round {number}", metrics)
            began, outcome = time.monotonic(), self.report.outcome
            if outcome.student is not None:
                result.arrays = arrays
            if self._reports and outcome.ensemble is not None:
                log_ensemble(self.folder, self.report, outcome.ensemble)
                if outcome.student is None:
                    result.arrays = single_model(self.folder, self.report, outcome.ensemble, self.rounds.as_sent)
            self._evaluate_on_server(start, result, evaluate_fn)
            self._evaluate_on_clients(grid, result, evaluate_config or ConfigRecord(), timeout)
            self.rounds.account.spend("evaluation", began)
            if self._reports:
                show_result(self.folder, result)
                write_run_card(self.folder, result, self.report)
        finally:
            self.close()
        return result

    def replay(self, run_dir: str | Path, *, target: str | Path | None = None) -> torch.nn.Module:
        """Run the method on the stored uploads of ``run_dir``, without its clients.

        Args:
            run_dir: A run folder.
            target: The run folder of the replay, resumed if it was interrupted. None for a new one beside ``run_dir``.

        Returns:
            The result as a module.
        """
        run = expand_user(run_dir).absolute()
        path = Path(target) if target else default_run_dir("", self.method.name, parent=run.parent)
        compute = "in-process" if self.rounds.compute is None else self.rounds.compute
        source = {"replay-of": str(run), "gatekeeper.policy": self._options.gatekeeper.policy}
        with open_run(path, self.method.name, self.job, identity=source, facts=self._facts) as folder:
            self.rounds.report = guarded_replay(
                self.rounds.gatekeeper,
                self.method,
                self.job,
                run,
                compute=choose(compute),
                target=folder,
                checkpoint_s=self._options.checkpoint_s,
                finish=self._options.finish,
            )
        return self.outcome

    # Flower's abstract steps, for callers that own the loop.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests of a round to the nodes that it asks; none after the method's last round.

        As Flower's strategies do, it waits for ``min_available_nodes``.
        """
        refuse_noise_around(self)
        if server_round > self._last_round:
            line = "round %d asks no client: %s has its uploads and keeps its result"
            log(INFO, line, server_round, type(self).__name__)
            return []
        if server_round == 1:
            self.rounds.start_from(arrays)
        self._asked_with = arrays
        said = {
            **self.rounds.keys,
            "config": config,
            "run_id": self.folder.id,
            "held": tuple(self.folder.round(server_round).held()),
        }
        request = Request.of(self.method, self.job, arrays, server_round, **said)
        nodes = self.rounds.participation.choose(grid, self.job.seed, server_round)
        return [request.message(node_id) for node_id in nodes]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Store the replies and run the server stage on them; the arrays are those of the result of :meth:`start`."""
        if server_round > self._last_round:
            return None, None
        self.rounds.take(self.folder, server_round, replies, self._asked_with)
        metrics, outcome = self.rounds.train_metrics[server_round], self.report.outcome
        arrays = self.rounds.student_arrays()
        if arrays is None and outcome.ensemble is not None:
            arrays = single_model(self.folder, self.report, outcome.ensemble, self.rounds.as_sent)
        return arrays, MetricRecord(dict(metrics)) if metrics else None

    @property
    def _last_round(self) -> int:
        return self.method.plan(self.job.config).rounds

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a share of the nodes to evaluate the student, as Flower's FedAvg does."""
        return self._evaluation.configure(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' scores by their examples, as Flower's FedAvg does."""
        return self._evaluation.aggregate(server_round, replies)

    def summary(self) -> None:
        """Log the method, its place, and the run folder."""
        result = f", student {self.job.student}" if self.method.kind == "student" else ""
        log(INFO, "%s (%s)%s", self.method.titled(self.job.config), self.method.source, result)
        log(INFO, "run folder: %s", self.folder.path)

    def _log_assumptions(self, num_rounds: int) -> None:
        """Log what was assumed about the models, and a number of rounds that has no effect."""
        if self._assumed:
            log(INFO, "%s", ASSUMED)
        if num_rounds not in (self.method.plan(self.job.config).rounds, FLOWER_DEFAULT_ROUNDS):
            own = "config.rounds is the number of its own" if hasattr(self.job.config, "rounds") else "it has no rounds"
            line = "num_rounds=%s is ignored: %s asks every client for one model, and %s"
            log(INFO, line, num_rounds, type(self).__name__, own)
        for name, build in self.job.builders.items():
            if isinstance(build, FormedBuilder):
                log(INFO, "model %s %s", name, build.form)
        if self._reports and (demands := list_demands(self.method, self.job)):
            log(INFO, "beyond a stock reply, every client must send %s", "; and ".join(demands))

    def _log_cost(self, grid: Grid) -> None:
        """Log what the server stage will take, before a client trains; the app of this library has a dry run for it."""
        if not self._reports or pinned_clients(self.folder.round(1)) is not None:
            return
        clients = max(self.rounds.min_uploads, self.rounds.participation.sample_size(len(list(grid.get_node_ids()))))
        try:
            line = describe_cost(self.method, self.job, clients)
        except Exception as error:  # noqa: BLE001  a project's own code; the run matters more than its estimate
            line = f"the cost of the server stage is not known: {type(error).__name__}: {error}"
        if line:
            log(INFO, "%s", line)

    # The result's scores.

    def score_on_clients(
        self, grid: Grid, *, timeout: float, classes: Sequence[str] = (), averaging: Any = None
    ) -> Evaluation:
        """Have the clients score the result on their own test examples, after :meth:`start`.

        Each client that kept such examples (``test-share`` in the ``train_config`` of :meth:`start`) gets the result,
        and one-shot FedAvg if the uploads have one architecture, and answers with integer sums.

        Args:
            grid: Flower's grid.
            timeout: Seconds to wait for answers.
            classes: The classes' names.
            averaging: The config of that FedAvg; None: its defaults.

        Returns:
            The sums of the clients that answered, and why others did not.
        """
        return self.score_stored(grid, [self.report], timeout=timeout, classes=classes, averaging=averaging)[0]

    def score_stored(
        self,
        grid: Grid,
        reports: Sequence[StageReport],
        *,
        timeout: float,
        classes: Sequence[str] = (),
        averaging: Any = None,
        train_config: ConfigRecord | None = None,
    ) -> list[Evaluation]:
        """Have the clients score several results on this run's uploads, its own and those of replays, in one exchange.

        Args:
            grid: Flower's grid.
            reports: The results.
            timeout: Seconds to wait for answers.
            classes: The classes' names.
            averaging: The config of the FedAvg beside them; None: its defaults.
            train_config: What :meth:`start` got, for a strategy that has not been started.

        Returns:
            For each result the sums of the clients that answered, and why others did not.
        """
        began, server_round = time.monotonic(), self.method.plan(self.job.config).rounds
        if train_config is not None:
            self.rounds.remember(train_config)
        job = reports[0].job
        models = models_to_score(self.method, job, [report.outcome for report in reports], averaging)
        jobs = {result_name(number): report.job for number, report in enumerate(reports)}
        try:
            folder = self.folder.round(server_round)
            # Who is not evaluated stands in the evaluation, and is none of the uploads that were refused.
            clients = self.rounds.clients(self.folder, server_round, grid, timeout, keep_refusals=False)
            asked = self.method.plan(self.job.config).asks  # what the clients kept from training beside the test share
            held = {"holdout": asked.holdout, "per-class": asked.holdout_per_class}
            question = question_of(models, job, classes, jobs)
            question = replace(question, facts={**question.facts, **held})
            pinned = pinned_clients(folder) or ()
            wanted = [name for name in pinned if not is_anonymous(name)]  # answers have names
            found = ask(clients, question, wanted=wanted, why=lambda name: clients.refused.get(name, "no answer"))
            evaluations = [found[result_name(number)] for number in range(len(reports))]
            if len(wanted) == len(pinned):
                return evaluations
            here = {client.client for client in evaluations[0].clients}
            nodes = {name: reason for name, reason in clients.refused.items() if name not in here}
            return [replace(each, refused={**nodes, **each.refused}) for each in evaluations]
        finally:
            self.rounds.account.spend("evaluation", began)
            self.close()

    def _evaluate_on_server(self, start: ArrayRecord, result: Result, evaluate_fn: EvaluateFn | None) -> None:
        server_round, scores = self.method.plan(self.job.config).rounds, MetricRecord()
        if evaluate_fn and (reason := self._not_evaluated(result.arrays, start)):
            log(INFO, "evaluate_fn is not called for the result: %s", reason)
        elif evaluate_fn:
            scores = evaluate_fn(server_round, result.arrays) or scores
        if self.evaluate_model is not None:
            scores.update(scores_by_name("evaluate_model", self.evaluate_model(self.outcome)))
        if scores:
            log_scores("Global evaluation", scores)
            result.evaluate_metrics_serverapp[server_round] = scores

    def _not_evaluated(self, arrays: ArrayRecord, start: ArrayRecord) -> str:
        """Return why a result's arrays cannot be scored; empty if they can."""
        if not arrays:
            return "it is an ensemble and no single set of arrays; evaluate_model scores it"
        return "initial_arrays have other shapes" if start and signature_of(arrays) != signature_of(start) else ""

    def _evaluate_on_clients(self, grid: Grid, result: Result, config: ConfigRecord, timeout: float) -> None:
        server_round = self.method.plan(self.job.config).rounds
        if self._evaluation.fraction == 0.0:
            return
        if not result.arrays:
            log(WARNING, "fraction_evaluate is ignored: the result is an ensemble of several architectures")
            return
        nodes = self.rounds.nodes(self.folder.round(server_round), grid)
        if (scores := self._evaluation.run(nodes, server_round, result.arrays, config, timeout)) is not None:
            log_scores("Evaluation by the clients", scores)
            result.evaluate_metrics_clientapp[server_round] = scores
