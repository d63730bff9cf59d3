"""The ServerApp: reads the settings, runs one strategy, and writes its result and report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import RunNotRunningException

from fl_app.node_config import SUPERNODES_VARIABLE
from server_app.launch.run_command import how_to_go_on, leave_resume_file
from server_app.replay.forget import adopt_uploads
from server_app.replay.stored import read_stored
from server_app.report.client_scores import client_lines, evaluation_facts
from server_app.report.drawing import new_figure
from server_app.report.finish import describe_failure, finish, table_lines
from server_app.report.gatekeeping import attack_line
from server_app.report.tables import refusal_lines
from server_app.settings.build import build_job, build_strategy, folder_digests, held_out, where_scored
from server_app.settings.checks import check_adopted, check_needs_of_settings, check_same_run
from server_app.settings.read import Settings, read_settings, scaled_line
from strategies.core.clients import TEST_SHARE
from strategies.core.durable import store_errors
from strategies.core.errors import (
    ComputeError,
    OneShotError,
    OptionError,
    StoreError,
    describe,
    has_remedy,
    with_remedy,
)
from strategies.core.options import listed
from strategies.core.processor import flush_subnormals
from strategies.flower.one_shot import OneShot
from strategies.flower.run import log_info
from strategies.run.run_folder import RunFolder

if TYPE_CHECKING:
    from fl_app.data import Split
    from server_app.settings.server_data import Scorer
    from strategies.flower.rounds.iterative import Iterative

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method over the connected clients."""
    try:
        _run(grid, dict(context.run_config))
    except OneShotError as error:
        log(ERROR, "%s", ". ".join([str(error).rstrip("."), *getattr(error, "__notes__", ())]))
        raise


@flush_subnormals()
def _run(grid: Grid, given: dict[str, Any]) -> None:
    began = time.monotonic()
    settings = _read(given)
    images, split = held_out(settings)
    job = build_job(settings, split, images)
    strategy = build_strategy(settings, job)
    with closing(strategy):  # start() also closes the strategy's folder
        folder = strategy.folder
        check_same_run(folder.info, settings.flat)
        if settings.app.evaluate.results:
            _score_stored(grid, settings, strategy, images, split)
            return
        if (done := folder.result()) is not None and done["status"] == "finished":
            log(INFO, "the run is finished: its result is in %s", folder.path)
            return
        with _resumable(strategy, settings):
            adopt_uploads(folder, settings.app.uploads, settings.app.forget, min_uploads=settings.app.min_uploads)
            where = where_scored(settings, has_examples=images is not None or bool(len(split.labels)))
            threading.Thread(target=_load_for_the_report, daemon=True).start()
            asked: dict[str, Any] = {TEST_SHARE: settings.app.client.test_share} if where in ("clients", "both") else {}
            strategy.start(
                grid, timeout=settings.app.deadline_s, train_config=ConfigRecord({**asked, **folder_digests(settings)})
            )
            evaluation = None
            if asked and isinstance(strategy, OneShot):
                found = strategy.score_on_clients(
                    grid, timeout=settings.app.deadline_s, classes=split.classes, averaging=settings.averaging
                )
                evaluation = evaluation_facts(
                    found, where, settings.app.metric, split.classes, grouped=bool(settings.app.data.group)
                )
            with RunFolder.open(folder.path) as finished, store_errors(folder.path):
                seconds = {**strategy.account.seconds, "app": time.monotonic() - began}
                result = finish(
                    finished, settings, strategy.report, images, seconds=seconds, log=log_info, evaluation=evaluation
                )
    if SUPERNODES_VARIABLE not in os.environ:  # `oneshot run` prints the table itself
        for line in table_lines(result):
            log_info(line)


def _load_for_the_report() -> None:
    """Import what draws plots and finds intervals while the clients work: a second, which the result would wait for."""
    import scipy.optimize  # noqa: F401

    new_figure(1.0, 1.0)


def _read(given: dict[str, Any]) -> Settings:
    """Read and check the settings; log those that a reader of the log must know."""
    settings = read_settings(given)
    if SUPERNODES_VARIABLE not in os.environ:  # `oneshot run` has checked them
        check_needs_of_settings(settings)
        if not settings.app.resume:  # a resumed run has its copies already
            check_adopted(settings, 0)
    if settings.scaled:
        log_info(f"scaled: {scaled_line(settings.scaled)}")
    if warning := attack_line(settings.app.attack):
        log(WARNING, "%s", warning)
    return settings


def _score_stored(
    grid: Grid, settings: Settings, strategy: OneShot | Iterative, images: Scorer | None, split: Split
) -> None:
    """Have the clients of a finished run score results on its uploads, and write these results anew."""
    run, app = strategy.folder.path, settings.app
    where = where_scored(settings, has_examples=images is not None or bool(len(split.labels)))
    if where not in ("clients", "both") or not isinstance(strategy, OneShot):
        raise OptionError(
            f"the clients of {run} kept no examples for an evaluation: must be a run with 'evaluate.on' 'clients' or "
            "'both'"
        )
    # Sorted, so that the same results are the same question: clients answer two of them.
    paths = map(Path, sorted(listed(app.evaluate.results)))
    stored = {path: read_stored(path, run, images, split) for path in paths}
    found = strategy.score_stored(
        grid,
        [report for _, report, _ in stored.values()],
        timeout=app.deadline_s,
        classes=split.classes,
        averaging=settings.averaging,
        train_config=ConfigRecord({TEST_SHARE: app.client.test_share}),
    )
    if not found[0].clients:
        reasons = refusal_lines([{"client": name, "reason": reason} for name, reason in found[0].refused.items()])
        raise OneShotError(f"no client of {run} has scored the results: {'; '.join(reasons)}")
    for (path, (own, report, seconds)), evaluation in zip(stored.items(), found, strict=True):
        facts = evaluation_facts(evaluation, where, app.metric, split.classes, grouped=bool(app.data.group))
        with RunFolder.open(path) as folder, store_errors(path):
            result = finish(folder, own, report, images, seconds=seconds, log=log_info, evaluation=facts)
            result["seconds"] = seconds
            folder.write_result(result)
        if SUPERNODES_VARIABLE not in os.environ:  # `oneshot evaluate` prints them itself
            for line in (f"{own.choice.name}, {path}:", *client_lines(facts)):
                log_info(line)


@contextmanager
def _resumable(strategy: OneShot | Iterative, settings: Settings) -> Iterator[None]:
    """Write and log how an interrupted or failed run is resumed."""
    folder = strategy.folder.path
    deployed = SUPERNODES_VARIABLE not in os.environ  # `oneshot run` prints the command itself
    if deployed:
        leave_resume_file(folder, settings.flat)
        log_info(f"if this run is interrupted, resume it with: {how_to_go_on(folder)}")
    try:
        with _translated():
            yield
    except OneShotError as error:
        strategy.close()
        _note_failure(folder, settings, error)
        if deployed:
            error.add_note(f"To resume: {how_to_go_on(folder)}")
        raise
    except (SystemExit, KeyboardInterrupt, RunNotRunningException) as error:
        strategy.close()
        if not deployed:  # Ctrl-C in the process of the command, which says how to go on
            raise
        # Flower ends the ServerApp when its SuperLink ends and when a user stops the run.
        reason = "the run was stopped, or its SuperLink is gone; the received uploads are kept"
        _note_failure(folder, settings, ComputeError(f"{reason}. To resume: {how_to_go_on(folder)}"))
        if isinstance(error, RunNotRunningException):
            raise ComputeError(reason) from error
        raise


@contextmanager
def _translated() -> Iterator[None]:
    """Raise what the machine or a library lacks, such as memory, as an error with its remedy."""
    try:
        yield
    except OneShotError:
        raise
    except Exception as error:
        if not has_remedy(error):
            raise
        raise ComputeError(with_remedy(f"in the ServerApp: {describe(error)}")) from error


def _note_failure(folder: Path, settings: Settings, error: Exception) -> None:
    try:
        with RunFolder.open(folder) as failed:
            failed.write_result(describe_failure(failed, settings, error))
    except StoreError as refused:  # a full disk, or the error that ended this run
        log(WARNING, "%s", refused)
