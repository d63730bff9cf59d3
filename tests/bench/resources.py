"""What the shipped teacher pass makes of the machine, and how much memory the server stage takes.

Run as a program, ``python resources.py METHOD CLIENTS BATCH``, it is the child that goes through a short server stage
and prints its peak memory in MiB, before the stage and after it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import cpu_seconds, interleaved, row, say
from server_stage import MODELS, Scale, both_sides, case_of
from side_by_side import shipped_job, shipped_server
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

MIB = 2**20


def flops(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Return the floating-point operations of a forward pass."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(shape))
    return float(counter.get_total_flops())


def ceiling() -> float:
    """Return the best GFLOP/s of forward 3x3 convolutions, channels last, over some shapes that suit the machine."""
    best = 0.0
    with torch.no_grad():
        for batch, channels, side in [(32, 128, 16), (64, 128, 13), (16, 256, 16), (32, 64, 32)]:
            images = torch.randn(batch, channels, side, side).to(memory_format=torch.channels_last)
            kernel = torch.randn(channels, channels, 3, 3).to(memory_format=torch.channels_last)
            work = 2 * batch * channels * channels * 9 * (side - 2) ** 2
            F.conv2d(images, kernel)
            best = max(best, *(work / cpu_seconds(lambda i=images, k=kernel: F.conv2d(i, k)) for _ in range(10)))
    return best / 1e9


def teacher_speed(scale: Scale) -> None:
    """Print GFLOP/s of the shipped ensemble, forward and backward to the images, against the ceiling."""
    top = ceiling()
    say(f"Shipped teachers, forward and backward to the images; the machine's convolution ceiling: {top:.0f} GFLOP/s")
    row(["model", "GFLOP/s", "of the ceiling"], (8, 9, 15))
    for model in MODELS:
        case = case_of("dense", model, scale)
        server, state, _ = both_sides(case, batches=1)
        inputs = torch.randn(scale.batch, *case.shape)
        # The input's gradient of a layer costs what its forward pass costs.
        work = 2 * sum(flops(teacher, tuple(inputs.shape)) for teacher in state.teachers)
        seconds = interleaved({"pass": lambda s=server, x=inputs: teacher_pass(s, x)}, scale.repetitions)["pass"]
        row([model, f"{work / seconds / 1e9:.0f}", f"{work / seconds / 1e9 / top:.0%}"], (8, 9, 15))


def teacher_pass(server: Any, inputs: torch.Tensor) -> None:
    """Send images through the shipped ensemble and a gradient back to them."""
    inputs = inputs.clone().requires_grad_()
    logits = server.teacher(inputs)
    torch.autograd.grad(logits.square().sum(), inputs)


def memory(counts: tuple[int, ...], batch: int, method: str = "co-boosting") -> None:
    """Print the peak memory of a short server stage for some numbers of clients, and its growth per client."""
    say(f"Peak memory of a short {method} stage, cnn5, batch {batch}, a process per row")
    case = case_of(method, "cnn5", Scale(clients=1))
    weights = sum(tensor.nbytes for tensor in case.shipped().state_dict().values()) / MIB
    peaks, widths = [], (10, 12, 17, 17)
    row(["teachers", "MiB loaded", "MiB at its peak", "MiB of the stage"], widths)
    for count in counts:
        before, peak = child(method, count, batch)
        peaks.append(peak)
        row([count, f"{before:.0f}", f"{peak:.0f}", f"{peak - before:.0f}"], widths)
    growth = (peaks[-1] - peaks[0]) / (counts[-1] - counts[0])
    say(f"growth per teacher: {growth:.2f} MiB; a teacher's weights: {weights:.2f} MiB ({growth / weights:.1f}x)")


def child(method: str, clients: int, batch: int) -> tuple[float, float]:
    """Return the peak MiB of a process before and after its short server stage."""
    command = [sys.executable, str(Path(__file__)), method, str(clients), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, peak = map(float, done.stdout.split())
    return before, peak


def peak_mib() -> float:
    """Return the largest memory that this program ever had, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux, getrusage counts what the parent had before it became this program
        return float(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024 / MIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def short_stage(method: str, clients: int, batch: int) -> None:
    """Run two epochs of one generator step each, and print the peak memory before and after.

    The clients share their weights' storage until the server reads them, as uploads on a disk take none.
    """
    torch.set_num_threads(1)
    case = case_of(method, "cnn5", Scale(clients=clients, batch=batch, timed_steps=1))
    state = case.shipped().state_dict()
    server = shipped_server(case, shipped_job(case, [state] * clients))
    before = peak_mib()
    for epoch in range(2):
        server.epoch(epoch)
    say(f"{before} {peak_mib()}")


if __name__ == "__main__":
    short_stage(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
