"""Devices of the server stage: the GPUs that torch and Ray see, and whether Ray starts or answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.doctor.findings import Finding, Level
from server_app.launch.guard import TOKEN_KEY, guarded
from strategies.core.errors import ComputeError, OptionError
from strategies.core.gpu import resolve_device

RAY_S = 120.0


@dataclass(frozen=True)
class Torch:
    """torch's view of this machine.

    Attributes:
        version: torch's version.
        cuda: The CUDA version of torch's build; empty for a build without CUDA.
        gpus: Number of GPUs that torch sees.
        driver: Whether the machine has NVIDIA's driver.
        visible: ``CUDA_VISIBLE_DEVICES``; None if unset.
    """

    version: str
    cuda: str
    gpus: int
    driver: bool
    visible: str | None

    @classmethod
    def here(cls) -> Torch:
        """Read torch's view of this machine."""
        import torch

        driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        built = torch.version.cuda or torch.version.hip or ""
        return cls(torch.__version__, built, count, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))


def torch_gpus(found: Torch | None = None) -> Iterator[Finding]:
    """Check the GPUs that torch sees; a machine without one is fit unless the settings require a GPU.

    Args:
        found: torch's view; None to read it.
    """
    torch = found or Torch.here()
    build = f"torch {torch.version}, {f'built for CUDA {torch.cuda}' if torch.cuda else 'a build for CPUs'}"
    if torch.gpus:
        yield Finding("ok", "GPU by torch", f"{torch.gpus}; {build}")
    elif torch.visible is not None and torch.cuda and torch.driver:
        fix = "unset CUDA_VISIBLE_DEVICES where the server is started, or name the GPUs in it"
        yield Finding("warning", "GPU by torch", f"none: CUDA_VISIBLE_DEVICES is {torch.visible!r}; {build}", fix=fix)
    elif torch.driver and not torch.cuda:
        fix = "install a torch and torchvision built for CUDA, in the versions of constraints.txt"
        yield Finding("warning", "GPU by torch", f"none, though the machine has NVIDIA's driver; {build}", fix=fix)
    elif torch.cuda and not torch.driver:
        fix = "install NVIDIA's driver if the machine has a GPU; otherwise nothing: the CPU does the work"
        yield Finding("warning", "GPU by torch", f"none: NVIDIA's driver is missing; {build}", fix=fix)
    elif torch.cuda:
        fix = "compare nvidia-smi's CUDA version with torch's: an older driver cannot serve a newer build"
        yield Finding("warning", "GPU by torch", f"none, though the driver is installed; {build}", fix=fix)
    else:
        yield Finding("ok", "GPU by torch", f"none: the CPU does the work; {build}")


def device(name: str, setting: str = "device") -> Iterator[Finding]:
    """Check that this machine has the device of a setting, or of a key of a node's config."""
    try:
        yield Finding("ok", "device", f"{name!r} is {resolve_device(name, repr(setting))} here")
    except (ComputeError, OptionError) as error:
        fix = f"set {setting}=auto or {setting}=cpu, or correct the finding 'GPU by torch'"
        yield Finding("error", "device", str(error), fix=fix)


def ray(limit_s: float = RAY_S) -> Iterator[Finding]:
    """Start a local Ray as the server stage does and end it again, or join the cluster of ``RAY_ADDRESS``.

    Args:
        limit_s: Seconds for the whole check.
    """
    cluster = os.environ.get("RAY_ADDRESS", "")
    name = f"Ray at {cluster}" if cluster else "Ray starts"
    answer = _asked(limit_s)
    if isinstance(answer, str):
        # Without a local Ray, the server stage runs in the ServerApp's process.
        level: Level = "error" if cluster else "warning"
        own = "free memory and space in /dev/shm; or set compute=in-process, which needs no Ray"
        joined = "check that the cluster runs (ray status there) and its port is reachable; or unset RAY_ADDRESS"
        yield Finding(level, name, answer, fix=joined if cluster else own)
        return
    resources = answer["resources"]
    gpus = int(resources.get("GPU", 0))
    nodes = f" of {answer['nodes']} machines" if cluster else ""
    memory = resources.get("object_store_memory", 0) / 2**30
    yield Finding("ok", name, f"Ray {answer['version']}{nodes}, {memory:.1f} GiB of object store")
    here = Torch.here().gpus
    if gpus == here or (cluster and gpus):
        yield Finding("ok", "GPU by Ray", f"{gpus}")
    elif gpus > here:
        found = f"{gpus}, but torch sees {here} here: Ray would give actors GPUs that torch cannot use"
        yield Finding("warning", "GPU by Ray", found, "as many as torch sees", "correct the finding 'GPU by torch'")
    else:
        found = f"{gpus}, but torch sees {here}: a server stage in an actor would run on the CPU"
        fix = "start the cluster's machines with ray start --num-gpus, or unset CUDA_VISIBLE_DEVICES"
        yield Finding("warning", "GPU by Ray", found, "as many as torch sees", fix)


def _asked(limit_s: float) -> dict[str, Any] | str:
    """Probe Ray from a child process; return its answer, or the reason why it gave none. No process is left behind."""
    try:
        with guarded() as (folder, token), tempfile.TemporaryFile("w+") as output:
            environment = {**os.environ, TOKEN_KEY: token, "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
            code = Path(__file__).parents[__name__.count(".")]  # for a checkout that is not installed
            environment["PYTHONPATH"] = os.pathsep.join([str(code), environment.get("PYTHONPATH", "")])
            command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.ray_probe"]
            done = subprocess.run(  # noqa: S603  a module of ours, with this interpreter
                command, env=environment, stdout=output, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
                cwd=folder, timeout=limit_s, start_new_session=True, check=False,
            )  # fmt: skip
            output.seek(0)
            lines = output.read().strip().splitlines()
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:g} s"
    except OSError as error:
        return f"not checked: {error}"
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except (ValueError, IndexError):
        return f"the process that probes Ray ended with status {done.returncode} and printed nothing"
    return str(answer["error"]) if "error" in answer else answer
