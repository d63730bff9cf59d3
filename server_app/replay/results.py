"""Results on the uploads of one run, read again: the run's own, and those of its replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.replay.request import stored_uploads
from server_app.settings.build import build_job
from server_app.settings.read import Settings, overridden, read_settings
from strategies.core.errors import OptionError
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport, load_report

if TYPE_CHECKING:
    from fl_app.data import Split
    from server_app.settings.server_data import HeldOut


@dataclass(frozen=True)
class StoredResult:
    """A finished result.

    Attributes:
        folder: Its run folder.
        settings: The settings that it was made with, without its tracker, which has had it already.
        report: Its outcome, and the job with its uploads.
        result: The content of its result.json.
    """

    folder: Path
    settings: Settings
    report: StageReport
    result: Mapping[str, Any]


def read_stored(folder: Path, run: Path, images: HeldOut | None, split: Split) -> StoredResult:
    """Read a result on the uploads of a run of this app.

    Args:
        folder: The folder of the run, or of its replay.
        run: The folder of the run.
        images: The server's held-out images; None for a server without any.
        split: The test half of the data set.

    Raises:
        OptionError: It is not finished, of another run, or of another project.
        StoreError: The folder is no run folder, or damaged.
    """
    with RunFolder.open(folder, write=False) as opened:
        info, result = opened.info, opened.result()
        source, stored = Path(info.get("replay-of", folder)).resolve(), info.get("settings")
        if source != run.resolve() or not isinstance(stored, dict):
            raise OptionError(f"setting 'evaluate.results' names {folder}: must be {run} or a replay of it")
        if result is None or result["status"] != "finished":
            raise OptionError(f"setting 'evaluate.results' names {folder}, which is not finished: must have a result")
        settings = read_settings(overridden(stored, {"tracker": "none"}))
        job = build_job(settings, split, images, data_seed=info.get("data-seed"))
        report = load_report(opened, replace(job, uploads=stored_uploads(run)))
    return StoredResult(folder, settings, report, result)
