"""The arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from server_app.launch.console import Format, TableFormat
from server_app.launch.runs import run_named
from strategies.core.errors import OptionError
from strategies.core.options import Scalar
from strategies.core.places import expanded

# Settings whose value is a run, by path, by name, or latest.
RUNS = ("uploads", "teacher-run")

# A short name and Flower's own; every command with settings takes both.
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", "--run-config", help="settings: a TOML file, or key=value pairs; repeatable, later ones win"),
]
ChangesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "--run-config", help="settings that differ from the run's: a TOML file, or key=value; repeatable"
    ),
]
ClientsOption = Annotated[
    int | None,
    typer.Option(
        "--clients",
        "--num-supernodes",
        min=1,
        help="simulated clients; default: 5, those of client.nodes, or those of the stored run",
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="json prints one JSON object as the last line")]
RunsArgument = Annotated[
    Path | None, typer.Argument(exists=True, help="folder of the runs; default: $ONESHOT_RUNS, else runs")
]
StateArgument = Annotated[
    Path | None, typer.Argument(exists=True, help="clients' folder; default: $ONESHOT_CLIENT_STATE, else the cache")
]
TableOption = Annotated[TableFormat, typer.Option("--format", help="format of the output")]


def run_word(word: str) -> Path:
    """Return the folder that a word on the command line names.

    Raises:
        BadParameter: ``latest`` names no run.
    """
    try:
        return run_named(word)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


UploadsArgument = Annotated[
    Path,
    typer.Argument(
        parser=run_word, metavar="RUN", help="run folder that holds the uploads; by path, by name, or latest"
    ),
]


@dataclass(frozen=True)
class Foreign:
    """The code of another project, for its runs: its models' builder, and the function that scores a model."""

    model: str = ""
    evaluate: str = ""


_FOREIGN = {
    "model": "module:attribute that builds the models of a foreign run",
    "evaluate": "module:attribute that returns a model's accuracy in %, to score a foreign run",
}


def with_foreign(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes ``foreign`` the options ``--model`` and ``--evaluate`` in its place."""

    @functools.wraps(command)
    def joined(*args: Any, model: str = "", evaluate: str = "", **given: Any) -> None:
        command(*args, foreign=Foreign(model, evaluate), **given)

    own = [each for each in inspect.signature(command, eval_str=True).parameters.values() if each.name != "foreign"]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=Annotated[str, typer.Option(help=words)]
        )
        for name, words in _FOREIGN.items()
    ]
    joined.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    joined.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return joined


def settings_of(texts: list[str] | None, **more: Scalar | None) -> dict[str, Scalar]:
    """Return the settings of the command line, flat; paths are absolute, because other processes read them.

    A run is named as an argument names it: by path, by name, or latest.

    Args:
        texts: Files and pairs.
        more: Settings with options of their own, which win; None for one that is not given.

    Raises:
        OptionError: A key is unknown, a value is out of range, a file cannot be read, or latest names no run.
    """
    from server_app.settings.catalogue import catalogue

    given = catalogue().settings(texts or [], **more)
    runs = {key: run_named(str(given[key])) for key in RUNS if given.get(key)}
    return {**given, **{key: str(expanded(folder).absolute()) for key, folder in runs.items()}}
