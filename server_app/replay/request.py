"""A replay as the command asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strategies.core.options import Scalar


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        run: The folder that holds the uploads.
        method: The server method; empty for the run's own.
        overrides: Settings that differ from the run's.
        resume: The folder of a replay that was cut off.
        model: ``module:attribute`` that builds the models of a run of another project.
        compute: Where the server stage runs.
        folder: The run folder of a new replay; None for one beside the run.
        kept: The file of the scores that replays of the same uploads have in common; None if there is none.
    """

    run: Path
    method: str
    overrides: Mapping[str, Scalar]
    resume: Path | None = None
    model: str = ""
    compute: str = "in-process"
    folder: Path | None = None
    kept: Path | None = None
