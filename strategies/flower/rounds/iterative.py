"""Iterative: federated learning in rounds, around any strategy of Flower's, with a run folder and resume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO
from pathlib import Path
from typing import Any, Never

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from ...compute import ServerCompute
from ...core.durable import MIB
from ...core.errors import OptionError
from ...core.facts import Agreement, choose_normalization
from ...core.options import flatten
from ...core.stage_options import OFF
from ...method import Job, Normalization, Observer
from ...run.stage import last_finished_round, load_report
from ...uploads.builders import Model, check_student, check_task, choose_student, named_builders
from ...uploads.forms import formed_builders
from ..arguments import (
    EvaluateFn,
    FlowerArguments,
    absolute,
    check_arguments,
    check_start,
    choose_task,
    keep_plain_scores,
    refuse_argument,
)
from ..evaluation import average_scores
from ..messages import in_order
from ..results import show_result
from ..run import RunOptions, RunStrategy
from ..surroundings import refuse_noise_around
from .base import Base, identify_strategy
from .config import NAME, IterativeConfig
from .loop import IterativeRounds
from .refinement import Refiner

DEADLINE_S = 3600.0


def _in_rounds(options: RunOptions | None, refiner: Refiner | None) -> RunOptions:
    """Return the options of a run in rounds: no gatekeeper, and a teacher only with a refiner."""
    options = options or RunOptions()
    if (policy := options.gatekeeper.policy) != OFF:
        raise OptionError(f"options.gatekeeper.policy is {policy!r}: must be {OFF!r} in rounds")
    if refiner is None and options.job_teacher is not None:
        raise OptionError(f"options.teacher is {options.teacher!r}: must be 'method' in rounds without a refiner")
    return options


class Iterative(RunStrategy):
    """A Flower strategy that runs rounds of federated learning around another one.

    Args:
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable.
        num_classes: C, the number of outputs of the model; needed, as ``input_shape``, with a refiner alone.
        input_shape: (channels, height, width) of one image, (F, 1, 1) of a row, or (1, 1, L) of a text of L tokens.
        student: The architecture, if ``model`` is a dict of several.
        normalization: The model's input space; None for mean 0.5 and std 0.5 of images; rows and texts stay as is.
        config: Rounds, strategy and its numbers; None for the defaults.
        base: The strategy that combines a round's models; None for the one in ``config``.
        refiner: The method that fine-tunes every round's model, and its config; None for none.
        compute: Where the refiner runs: ``"auto"`` (the default), ``"ray"``, ``"in-process"``, or a ServerCompute.
        run_dir: The run folder: made if it is new, resumed if it is a run folder; None for a new one under
            ``$ONESHOT_RUNS``, else in ``~/.local/state/oneshot-fl/runs``.
        min_uploads: The quorum of a round. With fewer usable answers, or where the strategy makes no model of them, the
            model stays unchanged; three such rounds in a row end the run, which can be resumed.
        seed: Every random draw of the server follows from it.
        options: Settings that most users leave alone.
        proxy: Real images without labels, uint8 [N, ch, H, W], for refiners that need them.
        observer: ``(round, module) -> scores``, recorded every ``config.evaluate_every`` rounds.
        facts: Entries of run.json, beside those that the strategy adds.
        classes: The names of the classes in the order of their numbers. An upload that names others, or another order,
            is refused; without them, uploads are compared with the first that names its classes.

    Raises:
        OptionError: An argument is out of its range.
    """

    rounds: IterativeRounds

    def __init__(  # noqa: PLR0913  a strategy's constructor is where a user finds every setting
        self,
        model: Model,
        *,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        student: str | None = None,
        normalization: Normalization | None = None,
        config: IterativeConfig | None = None,
        base: Base | None = None,
        refiner: Refiner | None = None,
        compute: str | ServerCompute | None = None,
        run_dir: str | Path | None = None,
        min_uploads: int = 2,
        seed: int = 0,
        options: RunOptions | None = None,
        proxy: torch.Tensor | None = None,
        observer: Observer | None = None,
        facts: Mapping[str, Any] | None = None,
        classes: Sequence[str] = (),
        **unknown: Never,
    ) -> None:
        for name in unknown:
            inside = f"it is an argument of the strategy inside, as in base=FedAvg({name}=...)"
            refuse_argument(type(self).__name__, name, inside if name in FlowerArguments.__annotations__ else "")
        options, builders = _in_rounds(options, refiner), named_builders(model, input_shape)
        strategy, refines = type(self).__name__, refiner is not None
        num_classes, input_shape = choose_task(strategy, num_classes, input_shape, needed=refines)
        shape = check_arguments(input_shape, seed=seed, min_uploads=min_uploads)
        job = Job(
            uploads=(),
            builders=builders,
            student=choose_student(student, builders),
            num_classes=num_classes,
            input_shape=shape,
            normalization=choose_normalization(normalization, shape),
            config=config or IterativeConfig(),
            seed=seed,
            threads=options.threads,
            device=options.device,
            proxy=proxy,
            teacher=options.job_teacher,
            observer=observer,
            agreement=check_task(num_classes, classes) if num_classes or refines else Agreement.of(classes),
        )
        if refiner is not None:
            job = replace(job, builders=formed_builders(job))
        self._set_up(job, base, refiner, compute, run_dir, min_uploads, options, facts)

    @classmethod
    def of_job(
        cls,
        job: Job,
        *,
        refiner: Refiner | None,
        compute: str | ServerCompute | None,
        run_dir: str | Path | None,
        min_uploads: int,
        options: RunOptions,
        facts: Mapping[str, Any],
    ) -> Iterative:
        """Return the strategy of a job that is built already; the arguments are those of the class."""
        strategy, options = cls.__new__(cls), _in_rounds(options, refiner)
        strategy._reports = False  # the app has a report of its own
        # The clients start every round from the model of the round before, which follows from no seed.
        job = replace(job, clients_seed=None, labelled=None, store_images=0)
        strategy._set_up(job, None, refiner, compute, run_dir, min_uploads, options, facts)
        return strategy

    def _set_up(  # noqa: PLR0913  the constructors' arguments
        self,
        job: Job,
        base: Base | None,
        refiner: Refiner | None,
        compute: str | ServerCompute | None,
        run_dir: str | Path | None,
        min_uploads: int,
        options: RunOptions,
        facts: Mapping[str, Any] | None,
    ) -> None:
        self.job = job
        check_student(job, trained=refiner is not None, classifies=refiner is not None, trained_by_clients=True)
        self._base, self._min_uploads, self._max_bytes = base, min_uploads, int(options.max_upload_mib * MIB)
        self._refiner, self._compute, self._run_dir = refiner, compute, absolute(run_dir)
        self.rounds, self._facts = self._new_rounds(), dict(facts or {})

    def _identity(self) -> tuple[str, Mapping[str, Any]]:
        identity = identify_strategy(self._base) if self._base is not None else {}
        refiner = {} if self._refiner is None else flatten(self._refiner.config, self._refiner.method.name)
        return NAME, identity | refiner

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 0,
        timeout: float = DEADLINE_S,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run the rounds that the run folder lacks; Flower's signature and result.

        Args:
            grid: Flower's grid.
            initial_arrays: Weights before the first round, all of the model's or the part that clients train and send;
                empty or None: derived from the seed.
            num_rounds: Rounds; 0 for those of the config.
            timeout: Seconds that the clients have for each round.
            train_config: Sent to the clients with every request.
            evaluate_config: Sent to the clients with every request for scores, if the strategy makes any.
            evaluate_fn: Called for round 0, and as often as the observer.

        Returns:
            Flower's result; its arrays are the last round's model.

        Raises:
            QuorumError: Too few clients are connected, or several rounds in a row gave no model.
            OptionError: The weights are not the model's, or the run began with other settings.
            StoreError: The run folder cannot be used.
        """
        check_start(self, Iterative, timeout, initial_arrays)
        if num_rounds:
            self.job = replace(self.job, config=replace(self.job.config, rounds=num_rounds))
        self.rounds, result = self._new_rounds(), Result()
        if initial_arrays:
            self.rounds.start_from(initial_arrays)
        self.summary()
        try:
            if last_finished_round(self.folder):
                log(INFO, "the rounds are finished: their result is read from the run folder")
                self.rounds.report = load_report(self.folder, self.job)
            else:
                self.rounds.report = self.rounds.run(
                    self.folder,
                    grid,
                    timeout=timeout,
                    config=train_config or {},
                    evaluate_fn=keep_plain_scores(evaluate_fn),
                    evaluate_config=evaluate_config,
                )
            for number, metrics in self.rounds.train_metrics.items():
                result.train_metrics_clientapp[number] = MetricRecord(dict(metrics))
            result.evaluate_metrics_clientapp.update(self.rounds.client_scores.found)
            result.evaluate_metrics_serverapp.update(self.rounds.scores)
            student = self.report.outcome.student or {}
            result.arrays = self.rounds.as_sent(in_order(student, self.rounds.state))
            if self._reports:
                show_result(self.folder, result)
        finally:
            self.close()
        return result

    # Flower's abstract steps, for callers that own the loop.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a request for each node of the round."""
        refuse_noise_around(self)
        if arrays:
            self.rounds.start_from(arrays)
        trip = self.rounds.begin(self.folder, grid, DEADLINE_S)
        contents = self.rounds.requests(server_round, trip, config)
        kind = self.rounds.message_type
        return [Message(content, dst_node_id=node, message_type=kind) for node, content in contents.items()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies and return the next model; (None, None) without a quorum."""
        metrics = self.rounds.take(server_round, replies)
        if metrics is None:
            return None, None
        return self.rounds.as_sent(self.rounds.state), MetricRecord(dict(metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as the wrapped strategy does."""
        return self.rounds.base.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average as the wrapped strategy does; None if the scores do not fit together."""
        return average_scores(self.rounds.base.strategy, server_round, replies)

    def summary(self) -> None:
        """Log the strategy, its place, and the run folder."""
        strategy = type(self.rounds.base.strategy).__name__
        log(INFO, "%s of %s, by Flower strategy %s", self.job.config.title, self.job.student, strategy)
        log(INFO, "run folder: %s", self.folder.path)

    def _new_rounds(self) -> IterativeRounds:
        return IterativeRounds(
            self.job,
            self._base,
            min_uploads=self._min_uploads,
            max_bytes=self._max_bytes,
            refiner=self._refiner,
            compute=self._compute,
        )
