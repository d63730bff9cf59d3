"""Help, lists and errors of spelling appear at once: they load neither torch nor Flower nor Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own, where a heavy module cannot be imported.
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(["torch", "torchvision", "flwr", "ray", "sklearn", "matplotlib"]))
from server_app.cli import cli
cli(sys.argv[1:])
"""


def answer(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--help"], "Reuse uploads"),
        (["rn"], "Did you mean 'run'?"),
        (["run", "-h"], "--clients"),
        (["run", "--methd", "x"], "--method"),
        (["run", "--method", "taly"], "did you mean 'tally'?"),
        (["run", "--set", "data.nme=digits"], "did you mean 'data.name'?"),
        (["run", "--set", "data.name=digit"], "did you mean 'digits'?"),
        (["run", "--set", "data.alpha=-1"], "must be a number greater than 0.0"),
        (["run", "--set", "absent.toml"], "absent.toml cannot be read"),
        (["resume", "absent"], "absent: no run folder"),
        (["replay", "absent"], "absent: no run folder"),
        (["compare", "absent", "--methods", "taly"], "did you mean 'tally'?"),
        (["forget", "absent", "--client", "a"], "absent: no run folder"),
        (["methods"], "options of a method: oneshot methods NAME"),
        (["methods", "tally"], "tally.epochs = 12"),
        (["list", "conf"], "0 runs"),
    ],
)
def test_answer_needs_no_heavy_module(words: list[str], part: str) -> None:
    done = answer(*words)

    assert part in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
