"""Whole commands: wall time, CPU time, processes and memory of `oneshot run`, alone and beside busy neighbours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from measure import row, say

from strategies.core.processor import all_cores

MIB = 2**20
EVERY_S = 0.1
PLAIN = ("--set", "threads=1")
RUNS = {
    "simulation": PLAIN,
    "--local": ("--local", *PLAIN),
    "simulation, fedavg": ("--method", "fedavg", *PLAIN),
    "--local, fedavg": ("--local", "--method", "fedavg", *PLAIN),
}
BUSY = {"busy, threads=0": ("--local",), "busy, threads=1": ("--local", *PLAIN)}
WIDTHS = (22, 9, 8, 11, 10)


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        wall_s: Seconds until the prompt returns.
        cpu_s: Of all processes, those included that end later.
        processes: The largest number at once.
        mib: The largest sum of their memory, shared pages counted once per process that has them.
    """

    wall_s: float
    cpu_s: float
    processes: int
    mib: float


def cost_of(words: Sequence[str]) -> Cost:
    """Run ``oneshot run`` with these words, and return what it and all that it starts took."""
    with tempfile.TemporaryDirectory() as folder:
        marked = {**os.environ, "ONESHOT_RUNS": folder}
        marked.pop("OMP_NUM_THREADS", None)  # users have none
        command = [str(Path(sys.executable).with_name("oneshot")), "run", *words]
        begin, cpu, most, peak, wall = time.perf_counter(), dict[tuple[int, float], float](), 0, 0, 0.0
        with (Path(folder) / "log").open("wb") as log:
            started = subprocess.Popen(command, env=marked, stdout=log, stderr=log, cwd=folder)
            while (found := list(marked_processes(folder))) or started.poll() is None:
                memory = 0
                for process in found:
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        cpu[process.pid, process.create_time()] = times.user + times.system
                        memory += process.memory_info().rss
                most, peak = max(most, len(found)), max(peak, memory)
                if not wall and started.poll() is not None:
                    wall = time.perf_counter() - begin
                time.sleep(EVERY_S)
        if started.returncode:
            raise RuntimeError((Path(folder) / "log").read_text()[-2000:])
        return Cost(wall or time.perf_counter() - begin, sum(cpu.values()), most, peak / MIB)


def marked_processes(folder: str) -> Iterator[psutil.Process]:
    """Yield the living processes that a command started with this folder of runs in their environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("ONESHOT_RUNS") == folder and process.status() != psutil.STATUS_ZOMBIE:
                yield process


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep cores busy with processes that compute."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.send_signal(signal.SIGKILL)
            process.wait()


def main() -> dict[str, float]:
    """Print the table, and return the ratios of its wall times."""
    say("Whole commands on the digits that the package brings; a run each")
    row(["oneshot run", "wall s", "CPU s", "processes", "MiB"], WIDTHS)
    found = {name: shown(name, words) for name, words in RUNS.items()}
    with neighbours(2 * all_cores()):
        found |= {name: shown(name, words) for name, words in BUSY.items()}
    wall = {name: cost.wall_s for name, cost in found.items()}
    return {
        "simulation / --local": wall["simulation"] / wall["--local"],
        "simulation / --local, fedavg": wall["simulation, fedavg"] / wall["--local, fedavg"],
        "busy, threads=1 / threads=0": wall["busy, threads=1"] / wall["busy, threads=0"],
    }


def shown(name: str, words: Sequence[str]) -> Cost:
    """Measure a command, and print its row."""
    cost = cost_of(words)
    row([name, f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}", cost.processes, f"{cost.mib:.0f}"], WIDTHS)
    return cost
