"""The arguments and options that several commands share, and how a run is named and listed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from server_app.launch.console import Format, TableFormat
from server_app.report.tables import output_console
from server_app.settings.catalogue import catalogue
from strategies.core import offline
from strategies.core.errors import OptionError
from strategies.core.options import PUBLISHED, QUICK, Scalar
from strategies.core.places import expand_user
from strategies.run import is_run_folder, runs_folder
from strategies.run.results import list_runs

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


def _switch_off_network(asked: bool) -> None:
    if asked:
        offline.switch_on()


# It acts when it is read, before a command imports anything that looks for a network.
OfflineOption = Annotated[
    bool,
    typer.Option(
        "--offline",
        envvar=offline.VARIABLE,
        callback=_switch_off_network,
        help="download nothing, and make no HTTP requests beyond this machine and $NO_PROXY",
    ),
]
LocalOption = Annotated[
    bool,
    typer.Option("--local", help="run in this process, one client after another, without Flower's simulation and Ray"),
]
ModelOption = Annotated[
    str, typer.Option(help="module:attribute that builds the models, for a run of your own project")
]
EvaluateOption = Annotated[
    str, typer.Option(help="module:attribute that returns a model's accuracy in %, for a run of your own project")
]


def run_word(word: str) -> Path:
    """Return the folder that a word on the command line names.

    Raises:
        BadParameter: ``latest`` names no run.
    """
    try:
        return run_named(word)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error


RunArgument = Annotated[
    Path, typer.Argument(parser=run_word, metavar="RUN", help="run folder, by path, by name, or latest")
]
SeveralRunsArgument = Annotated[
    list[Path],
    typer.Argument(parser=run_word, metavar="RUN...", help="run folders of one data set, by path, by name, or latest"),
]


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
    return {**given, **{key: str(expand_user(folder).absolute()) for key, folder in runs.items()}}


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
    others = ", ".join(method["name"] for method in methods if method["merges_weights_alone"])
    console.print(f"for a model that is no classifier (setting model.train): {others}")
    console.print("source, needs and options of a method: oneshot methods NAME")


def print_details(facts: Mapping[str, Any]) -> None:
    """Print a method's source, result and needs, and its options: those that matter first, then the rest."""
    console = output_console()
    console.print(f"{facts['name']}: {facts['title']} ({facts['source']})")
    console.print(f"  {facts['assumption']}; result: {facts['kind']}")
    for need in facts["needs"]:
        console.print(f"  needs: {need}")
    if facts["merges_weights_alone"]:
        console.print("  takes a model that is no classifier too: setting model.train")
    if not facts["options"]:
        console.print("  no options")
    main = [entry for entry in facts["options"] if entry["main"]]
    others = [entry for entry in facts["options"] if not entry["main"]]
    for heading, entries in (("options that matter first", main), ("further options" if main else "options", others)):
        if entries:
            console.print(_options(heading, entries))


def _options(heading: str, entries: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(heading, no_wrap=True)
    table.add_column("meaning")
    for entry in entries:
        quick = entry["presets"].get(QUICK, entry["presets"][PUBLISHED])
        differing = [f"{name} {value}" for name, value in entry["presets"].items() if value != quick]
        others = f"; preset {', '.join(differing)}" if differing else ""
        table.add_row(f"{entry['key']} = {quick}", f"{entry['help']}; {entry['allowed']}{others}")
    return table


LATEST = "latest"
COLUMNS = ("run", "created", "method", "data", "clients", "seed", "status", "accuracy")


def run_named(word: str) -> Path:
    """Return a run's folder.

    Args:
        word: A path; a run's name in the folder of the runs; or ``latest``, the newest run there that is no replay.

    Raises:
        OptionError: There is no run yet.
    """
    if word != LATEST:
        named = runs_folder() / word
        return named if is_run_folder(named) and not is_run_folder(Path(word)) else Path(word)
    found = [row for row in list_runs(runs_folder()) if row["kind"] != "replay"]
    if not found:
        raise OptionError(f"'{LATEST}' names no run: {runs_folder()} holds none")
    return runs_folder() / str(found[-1]["run"])


def print_runs(folder: Path, format: TableFormat) -> None:  # noqa: A002
    """Print the runs of a folder as a table, or as rows for a program."""
    from server_app.report.tables import Table, write_out

    rows = list_runs(folder)

    def table() -> Table:
        heading = f"{len(rows)} run{'s' * (len(rows) != 1)} in {folder}"
        return Table(heading, COLUMNS, [[_shown(row, column) for column in COLUMNS] for row in rows], texts=4)

    if format == "text":
        table().print(whole=1)  # a run's name is copied into the next command
    else:
        write_out(table, format, facts=rows, rows=lambda: rows)


def _shown(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "method" and row["kind"] != "run":
        return f"{value} ({row['kind']})"
    if value is None:
        return ""
    if column == "created":
        return str(value)[5:16].replace("T", " ")  # without the year, for the names of runs are long
    return f"{value:.2f}" if column == "accuracy" else str(value)
