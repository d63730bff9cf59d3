"""The options of a replay, as the command line gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strategies.core.options import Scalar


@dataclass(frozen=True)
class Request:
    """The options of a replay.

    Attributes:
        run: The run folder of the uploads.
        method: The server method; empty for the run's own.
        overrides: Settings that differ from the run's.
        resume: The folder of an interrupted replay.
        model: ``module:attribute`` that builds the models of another project's run.
        evaluate: ``module:attribute`` that returns a model's accuracy, for another project's run; empty for no scores.
        compute: Where the server stage runs.
        folder: The run folder of a new replay; None for one beside the run.
        kept: The file of the scores that replays of the same uploads share; None for no file.
    """

    run: Path
    method: str
    overrides: Mapping[str, Scalar]
    resume: Path | None = None
    model: str = ""
    evaluate: str = ""
    compute: str = "in-process"
    folder: Path | None = None
    kept: Path | None = None
