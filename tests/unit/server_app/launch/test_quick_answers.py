"""Help, lists and errors of spelling appear at once: they load neither torch nor Flower nor Ray."""

from __future__ import annotations

import json
import subprocess
import sys

# In a process of its own, where a heavy module cannot be imported.
PROGRAM = """
import json, sys
sys.modules.update(dict.fromkeys(["torch", "torchvision", "flwr", "ray", "sklearn", "matplotlib"]))
from typer.testing import CliRunner
from server_app.cli import cli
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli, words)
    print(json.dumps([done.output, repr(done.exception)]))
"""
ANSWERS: list[tuple[list[str], str]] = [
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
    (["methods"], "no classifier (setting model.train): fedavg, task-arithmetic, ties, dare, tsv"),
    (["methods", "tsv"], "takes a model that is no classifier too: setting model.train"),
    (["methods", "tally"], "server.epochs = 12"),
    (["list", "conf"], "0 runs"),
]


def test_answers_need_no_heavy_module() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps([words for words, _ in ANSWERS])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [(words, found) for (words, part), found in zip(ANSWERS, said, strict=True) if part not in found[0]]
    assert wrong == []
    assert {error for _, error in said} <= {"None", "SystemExit(1)", "SystemExit(2)"}
