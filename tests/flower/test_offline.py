"""A whole run of own code where no other machine answers: it ends, and sends nothing out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from server_app.launch.superlink import FOLDER_VARIABLE
from strategies.core import offline

pytestmark = pytest.mark.slow

SETTINGS = (
    "model.name=own_task:Net data.name=own_task:load data.partition=domains client.epochs=2 server.epochs=1 "
    "tally.images=64 threads=1 compute=ray"
)
CODE = """
import numpy as np
from torch import nn

from own_layers import layers  # beside this file


def load(split):
    rng = np.random.default_rng(0 if split == "train" else 1)
    labels = rng.integers(0, 3, 90)
    images = (80 * labels[:, None, None, None] + rng.integers(0, 60, (90, 1, 8, 8))).astype("uint8")
    return (images, labels, np.arange(90) % 2) if split == "train" else (images, labels)


class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = layers(input_shape)
        self.head = nn.Linear(16, num_classes)

    def forward(self, images):
        return self.head(self.features(images))
"""
LAYERS = """
from torch import nn


def layers(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 16), nn.ReLU())
"""

# A network with an address that others would reach, and nobody there.
OUTSIDE = "ip link set lo up && ip link add out type veth peer name in && ip addr add 198.51.100.9/24 dev out"
OUTSIDE += " && ip link set out up && ip link set in up && ip route add default via 198.51.100.1"
IN_A_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]


def refused_networks() -> str:
    """Say why this machine does not lend us networks of our own; nothing if it does."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return "unshare and ip are needed"
    tried = subprocess.run([*IN_A_NETWORK, OUTSIDE], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


def oneshot_run(folder: Path, *wrapped: str) -> tuple[dict[str, Any], set[str]]:
    """Run the app in a folder; return its result, and whom anybody sent to.

    Args:
        folder: Where the command is typed.
        wrapped: The beginning of a command that runs another one in a network of its own; empty for this one.
    """
    program = Path(sys.executable).with_name("oneshot")
    command = [str(program), "run", "--clients", "2", "--offline", "--format", "json", "--set", SETTINGS]
    unset = (offline.VARIABLE, "RAY_ADDRESS", FOLDER_VARIABLE)
    environ = {key: value for key, value in os.environ.items() if key not in unset}
    environ |= {"ONESHOT_RUNS": str(folder / "runs"), "ONESHOT_CLIENT_STATE": str(folder / "clients")}
    with (folder / "log").open("w") as log, (folder / "result").open("w") as output:
        process = subprocess.Popen([*wrapped, *command], cwd=folder, env=environ, stdout=output, stderr=log)
        sought = set[str]()
        try:
            while process.poll() is None:
                if has_own_network(process.pid):
                    sought |= neighbours(process.pid)
                time.sleep(0.3)
        finally:
            process.terminate()
            process.wait()
    assert process.returncode == 0, (folder / "log").read_text()
    return json.loads((folder / "result").read_text().splitlines()[-1]), sought


def has_own_network(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    except OSError:  # it has just ended
        return False


def neighbours(pid: int) -> set[str]:
    """Return the machines that anybody in a process's network sought to send to: the gateway, for all beyond it."""
    try:
        lines = Path(f"/proc/{pid}/net/arp").read_text().splitlines()[1:]
    except OSError:  # it has just ended
        return set()
    return {line.split()[0] for line in lines}


@pytest.mark.ray
def test_run_of_own_code_ends_where_no_other_machine_answers_and_sends_nothing(tmp_path: Path) -> None:
    """Clients, server and Ray actor find the code of the folder of the command, too.

    That all of them listen on this machine alone is asked in test_launch.py.
    """
    (tmp_path / "own_task.py").write_text(CODE)
    (tmp_path / "own_layers.py").write_text(LAYERS)
    lent = not refused_networks()  # or this machine lends no network of our own
    wrapped = [*IN_A_NETWORK, f'{OUTSIDE} && exec "$@"', "sh"] if lent else []

    result, sought = oneshot_run(tmp_path, *wrapped)

    assert (result["status"], result["uploads"], result["refused"]) == ("finished", 2, 0)
    assert "own_task:Net" in (Path(result["run_dir"]) / "uploads.jsonl").read_text()
    assert Path(result["run_dir"]).stat().st_mode & 0o077 == 0
    if lent:
        assert sought == set()
