"""The command line: ``oneshot run``, ``resume``, ``replay``, ``compare``, ``rounds``, ``import``, ``doctor``, ...

A command imports what it works with when it is called: torch takes two seconds, and help and a wrong option need none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from server_app.doctor.command import doctor
from server_app.launch.console import Format, TableFormat, errors, say
from server_app.launch.offline_option import with_offline
from strategies.core.options import Scalar, options_of

# Flower's own option name and a short one; every command with settings takes both.
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--run-config", "--set", help="settings: a TOML file, or key=value pairs; repeatable, later ones win"),
]
ChangesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "--run-config", help="settings that differ from the run's: a TOML file, or key=value; repeatable"
    ),
]
FormatOption = Annotated[Format, typer.Option("--format", help="json prints one JSON object as the last line")]
cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
cli.add_typer(doctor, name="doctor")


@cli.callback()
def about() -> None:
    """One-shot federated learning: each client uploads a trained model once, and the server combines them."""


@cli.command()
@with_offline
def run(
    app: Annotated[Path | None, typer.Argument(help="the app's folder; default: here, else the installed one")] = None,
    *,
    settings: SettingsOption = None,
    num_supernodes: Annotated[
        int | None,
        typer.Option(min=1, help="simulated clients; default: 5, those of client.nodes, or those of the stored run"),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder of an interrupted run")] = None,
    format: FormatOption = "text",  # noqa: A002  the name of the flag
) -> None:
    """Run the app in simulation and print the result; exit status 0 only if the run succeeded."""
    from server_app.launch.run_command import app_folder, launch_run, stored_settings, stored_supernodes
    from server_app.settings.read import read_settings
    from server_app.settings.rehearsal import number_of_clients
    from server_app.settings.settled import check_same_run
    from strategies.run.run_folder import default_run_dir

    with errors(format) as failing:
        given = _read(settings)
        if resume is not None:
            given["resume"] = str(resume)
        if given.get("resume"):
            stored = stored_settings(Path(str(given["resume"])))
            given = {**stored, **given, "resume": str(Path(str(given["resume"])).absolute()), "run-dir": ""}
            num_supernodes = num_supernodes or stored_supernodes(Path(str(given["resume"])))
            check_same_run({"settings": stored}, read_settings(given).flat)
        if (source := given.get("uploads")) and not given.get("resume"):  # the clients are those of the stored run
            made = stored_settings(Path(str(source)))
            given = {**made, "resume": "", "run-dir": "", "uploads": "", "forget": "", **given}
            num_supernodes = num_supernodes or stored_supernodes(Path(str(source)))
        checked = read_settings(given)
        if not checked.app.resume:
            given["run-dir"] = str(default_run_dir(checked.app.run_dir, checked.method.name))
        launch_run(app_folder(app), given, num_supernodes or number_of_clients(checked.app), failing)


@cli.command(name="resume")
@with_offline
def resume_run(
    folder: Annotated[Path, typer.Argument(help="run folder of an interrupted run")],
    *,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Resume an interrupted run with its original settings; for a finished run, print its result."""
    from server_app.launch.run_command import app_folder, launch_run, stored_settings, stored_supernodes

    with errors(format) as failing:
        stored = stored_settings(folder)
        given = {**stored, "resume": str(folder.absolute()), "run-dir": ""}
        launch_run(app_folder(None), given, stored_supernodes(folder), failing)


@cli.command()
@with_offline
def replay(
    folder: Annotated[Path, typer.Argument(help="run folder that holds the uploads")],
    *,
    method: Annotated[str, typer.Option(help="server method; default: the run's own")] = "",
    changes: ChangesOption = None,
    resume: Annotated[Path | None, typer.Option(help="folder of an interrupted replay")] = None,
    model: Annotated[str, typer.Option(help="module:attribute that builds the models of a foreign run")] = "",
    compute: Annotated[Literal["in-process", "ray"], typer.Option(help="where the server stage runs")] = "in-process",
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Run any server method on the stored uploads of a run, without Flower and without clients."""
    with errors(format):
        from server_app.launch.result import print_result
        from server_app.replay.request import Request
        from server_app.replay.stored import replay_run

        overrides = _read(changes)
        request = Request(folder, method, overrides, resume=resume, model=model, compute=compute)
        print_result(replay_run(request, log=lambda line: say(line, format)), format)


@cli.command()
@with_offline
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders that hold uploads, of one data set")],
    *,
    methods: Annotated[
        str, typer.Option(help="server methods, comma-separated; all: every one that the uploads permit")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="seeds per run: its own, the next one, ...")] = 1,
    changes: ChangesOption = None,
    model: Annotated[str, typer.Option(help="module:attribute that builds the models of foreign runs")] = "",
    out: Annotated[
        Path | None, typer.Option(help="the comparison's folder; an interrupted comparison resumes there")
    ] = None,
    format: Annotated[TableFormat, typer.Option("--format", help="format of the output")] = "text",  # noqa: A002
) -> None:
    """Run several server methods on the same stored uploads and print one table."""
    shown: Format = "text" if format == "text" else "json"  # every other format prints only the table
    with errors("json" if format == "json" else "text"):
        from server_app.compare.comparison import Comparison, compare_runs
        from server_app.compare.table import print_comparison

        overrides = _read(changes)
        asked = Comparison(tuple(runs), methods, seeds, overrides, model, out)
        comparison = compare_runs(asked, log=lambda line: say(line, shown))
        print_comparison(comparison, format)
    if "error" in comparison:
        sys.stderr.write(f"error: {comparison['error']}\n")
        raise typer.Exit(1)


@cli.command()
def rounds(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs in rounds, of one data set; finished or not")],
    *,
    targets: Annotated[
        str, typer.Option(help="accuracies in %, comma-separated; default: two multiples of 5 below the best")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="folder for rounds.json and the plot; default: none")] = None,
    format: Annotated[TableFormat, typer.Option("--format", help="format of the output")] = "text",  # noqa: A002
) -> None:
    """Report how soon runs in rounds reach an accuracy, and draw their learning curves, one per setting."""
    with errors("json" if format == "json" else "text"):
        from server_app.rounds.report import read_targets, report_rounds
        from server_app.rounds.table import print_rounds

        facts, lines = report_rounds(runs, read_targets(targets), out)
        print_rounds(facts, lines, format)


@cli.command()
@with_offline
def forget(
    folder: Annotated[Path, typer.Argument(help="run folder that holds the uploads")],
    *,
    client: Annotated[list[str], typer.Option(help="client whose upload is left out; repeatable")],
    changes: ChangesOption = None,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Unlearn a client: run the server's part again with the uploads of the other clients only."""
    with errors(format) as failing:
        from server_app.launch.run_command import app_folder, launch_run, stored_settings, stored_supernodes
        from server_app.replay.forget import forget_settings, what_is_left

        changed = _read(changes)
        run_dir = str(changed.pop("run-dir", ""))
        given = forget_settings(folder, client, {**stored_settings(folder), **changed}, run_dir=run_dir)
        launch_run(app_folder(None), given, stored_supernodes(folder), failing)
        say(what_is_left(folder, client), format)


@cli.command(name="import")
@with_offline
def import_folder(
    folder: Annotated[Path, typer.Argument(help="folder of checkpoints: .safetensors, .pt, .pth, .bin")],
    *,
    architecture: Annotated[str, typer.Option(help="architecture of the files for which --map names none")],
    map: Annotated[Path | None, typer.Option(help="TOML file with facts about the files")] = None,  # noqa: A002
    settings: SettingsOption = None,
    out: Annotated[Path | None, typer.Option(help="the new run folder; default: one in the usual place")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="skip refused files")] = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Store a folder of checkpoints from elsewhere as the uploads of a new run folder, for replay."""
    with errors(format):
        from server_app.replay.imports import Request, import_checkpoints, import_lines

        given = _read(settings)
        request = Request(folder, architecture, given, map, out, skip_bad)
        result = import_checkpoints(request, log=lambda line: say(line, format))
    typer.echo(json.dumps(result) if format == "json" else "\n".join(import_lines(result)))


def _read(texts: list[str] | None) -> dict[str, Scalar]:
    """Return the settings of the command line, flat; paths are absolute, because other processes read them."""
    from server_app.settings.read import known_options
    from server_app.settings.text import merge_settings, with_absolute_paths

    return with_absolute_paths(merge_settings(texts or [], {o.key: o.kind for o in known_options()}))


@cli.command()
def methods(
    names: Annotated[list[str] | None, typer.Argument(help="only these methods, in this order")] = None,
    *,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """List the server methods with their options, defaults and sources."""
    from rich.console import Console
    from rich.table import Table

    from server_app.settings.choices import CHOICES

    with errors(format):
        found = [_method_facts(name) for name in names or CHOICES]
    if format == "json":
        typer.echo(json.dumps(found))
        return
    console = Console(markup=False)
    for facts in found:
        table = Table(title=f"{facts['name']}: {facts['title']} ({facts['source']})", title_justify="left", expand=True)
        for column in ("option", "default", "in this app", "allowed", "meaning"):
            table.add_column(column, overflow="fold", no_wrap=column == "option")
        for entry in facts["options"]:
            shown = "" if entry["app_default"] == entry["default"] else str(entry["app_default"])
            table.add_row(entry["key"], str(entry["default"]), shown, entry["allowed"], entry["help"])
        console.print(table if facts["options"] else f"{table.title}\n  no options")
        for need in facts["needs"]:
            console.print(f"  needs: {need}")


def main() -> None:
    """Run the command line."""
    cli()


def _method_facts(name: str) -> dict[str, Any]:
    from server_app.settings.choices import CHOICES
    from server_app.settings.read import default_settings
    from strategies.rounds.config import NEEDS_CLIENTS, FederatedRounds

    method, app_defaults = CHOICES[name], default_settings()
    options = [
        {"key": o.key, "default": o.default, "app_default": app_defaults[o.key], "allowed": o.allowed, "help": o.help}
        for o in options_of(method.config, name)
    ]
    needs = [need.value for need in method.needs] + ([NEEDS_CLIENTS] if isinstance(method, FederatedRounds) else [])
    return {"name": name, "title": method.title, "source": method.source, "kind": method.kind, "needs": needs,
            "options": options}  # fmt: skip
