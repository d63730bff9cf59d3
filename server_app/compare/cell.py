"""One cell of a comparison: a replay in its own process, so that its time and memory are measured alone.

This file is also the program of that process (``python -m server_app.compare.cell``). It reads the cell as JSON from
standard input, and writes the log lines to standard output. Everything else stays in the cell's run folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from server_app.launch.guard import TOKEN_KEY
from server_app.replay.request import ReplayRequest
from server_app.replay.stored import replay_run
from server_app.report.communication import cost_of_uploads, ensemble_row, is_own_row
from server_app.settings.choices import CHOICES
from strategies.compute import InProcess, ServerCompute
from strategies.core.durable import MIB, read_json, store_errors
from strategies.core.errors import OneShotError, StoreError
from strategies.core.offline import QUIET
from strategies.core.options import Scalar
from strategies.method import Job, Method, Outcome, Progress, Snapshot
from strategies.run import is_run_folder
from strategies.run.files import JsonLines
from strategies.run.run_folder import RunFolder
from strategies.run.stage import OUTCOME_FILE

USAGE_FILE = "usage.jsonl"
_END = "end"  # the step of the last row, after the stage


@dataclass(frozen=True)
class Usage:
    """The cost of a stage so far.

    Attributes:
        cpu_s: CPU time, user and system, of all threads, in seconds.
        peak_mib: Peak memory of its process since its start, in MiB; Python, torch and the held-out images included.
        gpu_mib: Peak memory of torch on the GPU, in MiB; 0 without a GPU.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_mib: float = 0.0
    gpu_mib: float = 0.0

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Usage:
        """Return the usage of a row that :func:`dataclasses.asdict` made."""
        return cls(row["wall_s"], row["cpu_s"], row["peak_mib"], row["gpu_mib"])


class Metered:
    """A ServerCompute in this process that writes the cost of a job to the run folder.

    Times count from checkpoint to checkpoint. The next process repeats the work that a killed one did after its last
    checkpoint, and this work counts once.
    """

    def __init__(self, compute: ServerCompute, folder: Path) -> None:
        self._compute = compute
        self._folder = folder

    def run(self, method: Method, job: Job, progress: Progress) -> Outcome:
        """Run ``method`` on ``job``; see :class:`strategies.compute.ServerCompute`."""
        meter = _Meter(progress, self._folder)
        outcome = self._compute.run(method, job, meter)
        meter.note(_END)
        return outcome

    @contextmanager
    def kept(self) -> Iterator[Metered]:
        """Yield a metered compute for many runs."""
        with self._compute.kept() as compute:
            yield Metered(compute, self._folder)


class _Meter:
    """A Progress that records the usage at every checkpoint, and forwards everything else."""

    def __init__(self, progress: Progress, folder: Path) -> None:
        self._progress = progress
        self.report, self.record = progress.report, progress.record
        self._lines = JsonLines(folder / USAGE_FILE)
        self._before = Usage()
        self._wall, self._cpu = time.monotonic(), time.process_time()

    def resume(self) -> Snapshot | None:
        snapshot = self._progress.resume()
        if snapshot is not None:
            then = [row for row in self._lines.rows() if row["step"] == snapshot.step]
            self._before = Usage.of_row(then[-1]) if then else Usage()
        return snapshot

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        def noted() -> Snapshot:
            snapshot = take()
            # Written before the checkpoint, so every checkpoint has its row; a row without a checkpoint is harmless.
            self.note(snapshot.step)
            return snapshot

        self._progress.checkpoint(noted)

    def note(self, step: int | str) -> None:
        now = Usage(
            self._before.wall_s + time.monotonic() - self._wall,
            self._before.cpu_s + time.process_time() - self._cpu,
            max(self._before.peak_mib, peak_mib()),
            max(self._before.gpu_mib, torch.cuda.max_memory_allocated() / MIB),  # 0 before its first use
        )
        with store_errors(self._lines.path):
            self._lines.append({"step": step, **asdict(now)})


def usage_of(folder: Path) -> Usage:
    """Return the cost of the finished server stage of a run folder.

    Raises:
        StoreError: The stage was not metered, or has not finished.
    """
    lines = JsonLines(folder / USAGE_FILE)
    with store_errors(lines.path):
        ends = [row for row in lines.rows() if row["step"] == _END]
    if not ends:
        raise StoreError(f"{lines.path}: has no row of a finished server stage; remove {folder} to run it again")
    return Usage.of_row(ends[-1])


def peak_mib() -> float:
    """Return the peak memory of this process so far, in MiB."""
    if sys.platform == "linux":
        # Not getrusage, whose peak a new program inherits from the process that started it.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB  # macOS counts bytes


SCORES_FILE = "scores.json"  # shared by the cells on the uploads of one run
_ERROR = "error: "


@dataclass(frozen=True)
class Cell:
    """One method on the uploads of one run, with one seed.

    Attributes:
        folder: The cell's run folder, the same as a normal replay's.
        overrides: Settings that differ from the run's, without the seed.
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

    def request(self) -> ReplayRequest:
        """Return the replay, which resumes if it has begun."""
        overrides = {**self.overrides, "seed": self.seed}
        resume = self.folder if self.begun else None
        return ReplayRequest(
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
        **common_facts(cell.run, result, info),
        "method": cell.method,
        "seed": cell.seed,
        "run_dir": str(cell.folder),
        "outcomes": _outcomes(cell, result),
        "server_s": round(usage.wall_s, 2),
        "server_cpu_s": round(usage.cpu_s, 2),
        "peak_mib": round(usage.peak_mib, 1),
        "gpu_mib": round(usage.gpu_mib, 1),
        "mib_per_client": cost.traffic.mib_per_client if cost is not None else None,
        **result.get("work", {}),
    }


def common_facts(run: Path, result: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what compare.json says of a cell and of a run's own result alike.

    Args:
        run: Folder of the run whose uploads were used.
        result: The result's result.json.
        info: Its run.json.
    """
    return {
        "run": str(run.absolute()),
        "weights_sha256": result["weights_sha256"],
        "metric": result.get("metric", "accuracy"),
        "best_accuracy": result["best_accuracy"],
        "best_score": result.get("best_score"),
        "uploads": result["uploads"],
        "total_s": result["seconds"].get("total", result["seconds"].get("app", 0.0)),
        "threads": int(result.get("threads", {}).get("0", info["threads"])),  # those that the server stage began with
        "resumed_at": result["resumed_at"],
        **({"scaled": result["scaled"]} if "scaled" in result else {}),
    }


def _outcomes(cell: Cell, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the method's own rows of the result; without scores, the same rows with accuracy None."""
    method = CHOICES[cell.method]
    if result["table"]:
        return [dict(row) for row in result["table"] if row["kind"] != "client" and is_own_row(row["name"], method)]
    kept = read_json(cell.folder / OUTCOME_FILE)
    both = kept["student"] and kept["combiner"]
    names = [(ensemble_row(method) if both else method.title, "ensemble")] if kept["combiner"] else []
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
