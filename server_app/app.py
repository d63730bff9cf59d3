"""The ServerApp: settings in, one strategy, result and report out."""

from __future__ import annotations

import os
import time
from contextlib import closing
from logging import ERROR, INFO
from typing import Any

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from server_app.build import (
    SUPERNODES_VARIABLE,
    build_job,
    build_strategy,
    check_needs_of_settings,
    held_out,
    read_settings,
)
from server_app.finish import describe_failure, finish, scaled_line, table_lines
from server_app.forget import adopt_uploads
from server_app.settled import check_adopted, check_same_run
from strategies.errors import OneShotError
from strategies.store.run_folder import RunFolder

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configured method over the connected clients."""
    try:
        _run(grid, dict(context.run_config))
    except OneShotError as error:
        log(ERROR, "%s", error)
        raise


def _say(line: str) -> None:
    log(INFO, "%s", line)


def _run(grid: Grid, given: dict[str, Any]) -> None:
    began = time.monotonic()
    settings = read_settings(given)
    check_needs_of_settings(settings)
    if not settings.app.resume:  # a run that goes on has its copies
        check_adopted(settings, int(os.environ.get(SUPERNODES_VARIABLE, 0)))
    if settings.scaled:
        _say(f"scaled: {scaled_line(settings.scaled)}")
    images, split = held_out(settings)
    job = build_job(settings, split, images)
    strategy = build_strategy(settings, job)
    with closing(strategy):  # start() closes its folder too
        folder = strategy.folder
        check_same_run(folder.info, settings.flat)
        if (done := folder.result()) is not None and done["status"] == "finished":
            log(INFO, "the run is finished: its result is in %s", folder.path)
            return
        try:
            adopt_uploads(folder, settings.app.uploads, settings.app.forget, min_uploads=settings.app.min_uploads)
            strategy.start(grid, timeout=settings.app.deadline_s)
        except OneShotError as error:
            strategy.close()
            with RunFolder.open(folder.path) as failed:
                failed.write_result(describe_failure(failed, settings, error))
            raise
    with RunFolder.open(folder.path) as finished:
        seconds = {**strategy.account.seconds, "app": time.monotonic() - began}
        result = finish(finished, settings, strategy.report, images, seconds=seconds, log=_say)
    if SUPERNODES_VARIABLE not in os.environ:  # `oneshot run` prints the table itself
        for line in table_lines(result):
            _say(line)
