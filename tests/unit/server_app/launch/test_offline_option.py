"""The option --offline: which commands have it, and what it does to one that would download."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import typer
from commands import oneshot

from server_app.cli import cli

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
