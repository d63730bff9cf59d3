"""The arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from server_app.launch.console import Format, TableFormat
from server_app.launch.runs import run_named
from server_app.report.tables import output_console
from server_app.settings.catalogue import catalogue
from strategies.core import offline
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


# ``--offline``, the same option for every command that may use a network.


_OFFLINE_OPTION = Annotated[
    bool,
    typer.Option(
        "--offline",
        envvar=offline.VARIABLE,
        help="refuse connections beyond this machine and $RAY_ADDRESS, in every process that this starts",
    ),
]


def with_offline(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command of the command line the option ``--offline``, which takes effect before the command begins."""
    return with_flag(command, "offline", _OFFLINE_OPTION, lambda asked: _switch_on() if asked else None)


def with_flag(
    command: Callable[..., None], name: str, annotation: Any, act: Callable[[bool], None]
) -> Callable[..., None]:
    """Give a command a further flag.

    Args:
        command: The command.
        name: The flag's parameter, which the command itself does not get.
        annotation: The option.
        act: Called with the flag before the command begins.
    """

    @functools.wraps(command)
    def switched(*args: Any, **given: Any) -> None:
        act(bool(given.pop(name, False)))
        command(*args, **given)

    own = inspect.signature(command, eval_str=True)
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
    switched.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
    switched.__annotations__ = {each.name: each.annotation for each in (*own.parameters.values(), added)}
    return switched


def _switch_on() -> None:
    try:
        offline.switch_on()
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


# ``--dry-run``: the run is checked and told, and nothing starts.


_ASKED: ContextVar[bool] = ContextVar("dry-run", default=False)
_DRY_RUN_OPTION = Annotated[
    bool, typer.Option("--dry-run", help="print the settings, the bytes per client and the time; start nothing")
]


def with_dry_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option ``--dry-run``, which :func:`is_dry` tells."""
    return with_flag(command, "dry_run", _DRY_RUN_OPTION, _note)


def _note(asked: bool) -> None:
    _ASKED.set(asked)


def is_dry() -> bool:
    """Return whether the command under way was called with ``--dry-run``."""
    return _ASKED.get()


# The methods as the command line lists them: grouped by their assumptions, or one by one with their options.


def print_overview() -> None:
    """Print the methods' names under their assumptions, and there by what they give; a screen holds all."""
    console, methods = output_console(), catalogue().methods.values()
    for heading in catalogue().assumptions:
        table = Table.grid("kind", "names", padding=(0, 2, 0, 0))
        alike = [method for method in methods if method["assumption"] == heading]
        for kind in dict.fromkeys(method["kind"] for method in alike):
            names = [method["name"] for method in alike if method["kind"] == kind]
            table.add_row(f"  {kind:<8}", ", ".join(names))
        console.print(heading, style="bold")
        console.print(table)
    console.print("source, needs and options of a method: oneshot methods NAME")


def print_details(facts: Mapping[str, Any]) -> None:
    """Print a method's source, result and needs, and its options with this app's defaults in two columns."""
    console = output_console()
    console.print(f"{facts['name']}: {facts['title']} ({facts['source']})")
    console.print(f"  {facts['assumption']}; result: {facts['kind']}")
    for need in facts["needs"]:
        console.print(f"  needs: {need}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("option", no_wrap=True)
    table.add_column("meaning")
    for entry in facts["options"]:
        own = "" if entry["app_default"] == entry["default"] else f"; default of its paper: {entry['default']}"
        table.add_row(f"{entry['key']} = {entry['app_default']}", f"{entry['help']}; {entry['allowed']}{own}")
    console.print(table if facts["options"] else "  no options")
