"""Help, lists and errors of spelling load neither torch nor Flower nor Ray; commands may be kept off the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from commands import oneshot

from server_app.cli import cli

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


COMMANDS = typer.main.get_command(cli).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["run", "resume", "replay", "compare", "forget", "import"])
def test_offline_is_an_option_of_every_command_that_may_meet_a_network(name: str) -> None:
    options = {option: parameter for parameter in COMMANDS[name].params for option in parameter.opts}

    assert options["--offline"].envvar == "ONESHOT_OFFLINE"
    assert options["--format"].help  # the command's own options are what they were
    assert any(isinstance(parameter, click.Argument) for parameter in options.values())


def test_offline_run_whose_data_are_not_there_ends_with_the_line_that_says_where_to_put_them(tmp_path: Path) -> None:
    settings = f"data.name=cifar10 data.root={tmp_path} run-dir={tmp_path / 'run'}"

    done = oneshot("run", "--offline", "--run-config", settings)

    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: data set 'cifar10' is not in {tmp_path} (data.root) and downloading is switched off"
    )
    assert f"copy it to {tmp_path / 'cifar-10-batches-py'}" in line
