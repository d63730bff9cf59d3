"""One cell of a comparison: a replay in its own process, so that its time and memory are measured alone.

This file is also the program of that process (``python -m server_app.compare.cell``). It reads the cell as JSON from
standard input, and writes the log lines to standard output. Everything else stays in the cell's run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from server_app.compare.metered import Metered, usage_of
from server_app.launch.guard import TOKEN_KEY
from server_app.replay.request import Request
from server_app.replay.stored import replay_run
from server_app.report.communication import cost_of_uploads, own_names
from server_app.settings.choices import CHOICES
from strategies.compute import InProcess
from strategies.core.errors import OneShotError
from strategies.core.offline import QUIET
from strategies.core.options import Scalar
from strategies.run import is_run_folder
from strategies.run.files import read_json
from strategies.run.run_folder import RunFolder
from strategies.run.stage import OUTCOME_FILE

SCORES_FILE = "scores.json"  # shared by the cells on the uploads of one run
_ERROR = "error: "


@dataclass(frozen=True)
class Cell:
    """One method on the uploads of one run, with one seed.

    Attributes:
        run: The run that holds the uploads.
        method: The server method.
        seed: The seed of the server stage.
        folder: The cell's run folder, the same as a normal replay's.
        overrides: Settings that differ from the run's, without the seed.
        model: ``module:attribute`` that builds the models of a run of another project.
        evaluate: ``module:attribute`` that returns a model's accuracy, for such a run; empty for no scores.
        shown: The run's name in the log; empty for that of its folder.
    """

    run: Path
    method: str
    seed: int
    folder: Path
    overrides: Mapping[str, Scalar]
    model: str = ""
    evaluate: str = ""
    shown: str = ""

    @property
    def run_name(self) -> str:
        """The run's name in the log."""
        return self.shown or self.run.name

    @property
    def title(self) -> str:
        """The cell's name in the log."""
        return f"{self.method}, seed {self.seed}, {self.run_name}"

    @property
    def begun(self) -> bool:
        """Whether an earlier process has begun it."""
        return is_run_folder(self.folder)

    def request(self) -> Request:
        """Return the replay, which resumes if it has begun."""
        overrides = {**self.overrides, "seed": self.seed}
        resume = self.folder if self.begun else None
        return Request(
            self.run,
            self.method,
            overrides,
            resume=resume,
            model=self.model,
            evaluate=self.evaluate,
            folder=self.folder,
            kept=self.folder.parent / SCORES_FILE,
        )


def work(cell: Cell, log: Callable[[str], None]) -> None:
    """Run a cell in this process.

    Raises:
        OneShotError: See :func:`server_app.replay.stored.replay_run`.
    """
    replay_run(cell.request(), log=log, compute=Metered(InProcess(), cell.folder))


def run_cell(cell: Cell, token: str, log: Callable[[str], None]) -> str:
    """Run a cell in a new process and wait for its end.

    Args:
        cell: The cell.
        token: See :func:`server_app.launch.guard.guarded`, which ends the process with this one.
        log: Takes a line for the user.

    Returns:
        Why the cell failed, in one line; empty for success.
    """
    fields = {**asdict(cell), "run": str(cell.run), "folder": str(cell.folder)}
    process = subprocess.Popen(  # noqa: S603  a module of ours, with this interpreter
        [sys.executable, "-P", "-m", f"{__package__}.cell"],
        env={**os.environ, **QUIET, "PYTHONIOENCODING": "utf-8", TOKEN_KEY: token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C reaches this process only
    )
    try:
        last = _follow(process, json.dumps(fields), log)
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
    if process.returncode < 0:
        return f"it was killed (signal {-process.returncode}), by hand or for lack of memory"
    if process.returncode > 0:
        return last.removeprefix(_ERROR) or f"it ended with status {process.returncode}; see above"
    if last:  # no failure, but a line of the user's own code
        log(last)
    return ""


def _follow(process: subprocess.Popen[str], text: str, log: Callable[[str], None]) -> str:
    """Write the text to the process and log its lines but the last that looks like an error; return that one."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process was started without pipes")
    last = ""
    with contextlib.suppress(BrokenPipeError), process.stdin as given:  # the process may have ended already
        given.write(text)
    with process.stdout as lines:
        for line in lines:
            if not line.startswith(_ERROR):
                log(line.rstrip("\n"))
                continue
            if last:
                log(last)
            last = line.rstrip("\n")
    return last


def expected_seconds(todo: Sequence[Cell], took: Sequence[tuple[str, float]]) -> float:
    """Estimate the seconds of cells from finished ones of the same method, else of the same kind, else from all."""

    def one(cell: Cell) -> float:
        kind = CHOICES[cell.method].kind
        same = [seconds for method, seconds in took if method == cell.method]
        alike = [seconds for method, seconds in took if CHOICES[method].kind == kind]
        return fmean(same or alike or [seconds for _, seconds in took])

    return sum(map(one, todo))


def facts_of(cell: Cell) -> dict[str, Any] | None:
    """Return the result of a finished cell as JSON values; None for an unfinished one.

    Raises:
        StoreError: A file of its run folder is damaged.
    """
    if not cell.begun:
        return None
    with RunFolder.open(cell.folder, write=False) as folder:
        result, info = folder.result(), folder.info
    if result is None or result["status"] != "finished":
        return None
    usage, cost = usage_of(cell.folder), cost_of_uploads(cell.run)
    return {
        "run": str(cell.run),
        "method": cell.method,
        "seed": cell.seed,
        "run_dir": str(cell.folder),
        "weights_sha256": result["weights_sha256"],
        "outcomes": _outcomes(cell, result),
        "best_accuracy": result["best_accuracy"],
        "uploads": result["uploads"],
        "server_s": round(usage.wall_s, 2),
        "server_cpu_s": round(usage.cpu_s, 2),
        "peak_mib": round(usage.peak_mib, 1),
        "gpu_mib": round(usage.gpu_mib, 1),
        "mib_per_client": cost.traffic.mib_per_client if cost is not None else None,
        "total_s": result["seconds"]["total"],
        "threads": info["threads"],
        "resumed_at": result["resumed_at"],
        **result.get("work", {}),
        **({"scaled": result["scaled"]} if "scaled" in result else {}),
    }


def _outcomes(cell: Cell, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the method's own rows of the result; without scores, the same rows with accuracy None."""
    method = CHOICES[cell.method]
    if result["table"]:
        return [dict(row) for row in result["table"] if row["kind"] != "client" and row["name"] in own_names(method)]
    kept = read_json(cell.folder / OUTCOME_FILE)
    both = kept["student"] and kept["combiner"]
    names = [(own_names(method)[1] if both else method.title, "ensemble")] if kept["combiner"] else []
    names += [(method.title, method.kind if method.kind != "ensemble" else "student")] if kept["student"] else []
    return [{"name": name, "kind": kind, "accuracy": None} for name, kind in names]


def main() -> int:
    """Run the cell that standard input describes; return the exit status."""
    fields = json.load(sys.stdin)
    cell = Cell(**{**fields, "run": Path(fields["run"]), "folder": Path(fields["folder"])})

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        work(cell, say)
    except OneShotError as error:
        say(f"{_ERROR}{error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
