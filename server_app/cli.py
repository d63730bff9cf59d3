"""The command line: ``oneshot run``, ``resume``, ``replay``, ``compare``, ``import`` and ``methods``."""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from server_app.build import (
    SUPERNODES_VARIABLE,
    check_before_start,
    check_same_run,
    default_settings,
    known_options,
    read_settings,
)
from server_app.compare_table import CompareFormat, print_comparison
from server_app.console import Format, echo_to, errors, print_result, say
from server_app.settings_text import merge_settings, with_absolute_paths
from strategies.errors import OneShotError, OptionError
from strategies.method import METHODS
from strategies.options import Scalar, options_of
from strategies.store.run_folder import RunFolder, default_run_dir

FormatOption = Annotated[Format, typer.Option("--format", help="json prints one JSON object as the last line")]
INTERRUPTED = 130
DEFAULT_SUPERNODES = 5

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@cli.callback()
def about() -> None:
    """One-shot federated learning: clients upload a trained model once, the server does the rest."""


@cli.command()
def run(
    app: Annotated[Path | None, typer.Argument(help="the app's folder; default: here, else the installed one")] = None,
    *,
    run_config: Annotated[
        list[str] | None, typer.Option(help="settings: a TOML file, or key=value pairs; repeatable, later ones win")
    ] = None,
    num_supernodes: Annotated[
        int | None, typer.Option(min=1, help="simulated clients; default: 5, or those of the run to resume")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="run folder of a run that was cut off")] = None,
    format: FormatOption = "text",  # noqa: A002  the name of the flag
) -> None:
    """Run the app in simulation and print the result; exit status 0 only if the run succeeded."""
    with errors(format) as failing:
        given = with_absolute_paths(merge_settings(run_config or [], {o.key: o.kind for o in known_options()}))
        if resume is not None:
            given["resume"] = str(resume)
        if given.get("resume"):
            stored = _stored_settings(Path(str(given["resume"])))
            given = {**stored, **given, "resume": str(Path(str(given["resume"])).absolute()), "run-dir": ""}
            num_supernodes = num_supernodes or _stored_supernodes(Path(str(given["resume"])))
            check_same_run({"settings": stored}, read_settings(given).flat)
        settings = read_settings(given)
        if not settings.app.resume:
            given["run-dir"] = str(default_run_dir(settings.app.run_dir, settings.method.name))
        _launch(_app_folder(app), given, num_supernodes or DEFAULT_SUPERNODES, failing)


@cli.command(name="resume")
def resume_run(
    folder: Annotated[Path, typer.Argument(help="run folder of a run that was cut off")],
    *,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Go on with a run that was cut off, with the settings it began with; prints the result of a finished one."""
    with errors(format) as failing:
        stored = _stored_settings(folder)
        given = {**stored, "resume": str(folder.absolute()), "run-dir": ""}
        _launch(_app_folder(None), given, _stored_supernodes(folder), failing)


@cli.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="run folder that holds the uploads")],
    *,
    method: Annotated[str, typer.Option(help="server method; default: the run's own")] = "",
    set: Annotated[  # noqa: A002  the name of the flag
        list[str] | None, typer.Option(help="settings that differ from the run's: key=value; repeatable")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="folder of a replay that was cut off")] = None,
    model: Annotated[str, typer.Option(help="module:attribute that builds the models of a foreign run")] = "",
    compute: Annotated[Literal["in-process", "ray"], typer.Option(help="where the server stage runs")] = "in-process",
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Run any server method on the stored uploads of a run: no Flower, no client."""
    with errors(format):
        from server_app.replay import Request, replay_run

        overrides = with_absolute_paths(merge_settings(set or [], {o.key: o.kind for o in known_options()}))
        request = Request(folder, method, overrides, resume=resume, model=model, compute=compute)
        try:
            result = replay_run(request, log=lambda line: say(line, format))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    print_result(result, format)


@cli.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders that hold uploads, of one data set")],
    *,
    methods: Annotated[str, typer.Option(help="server methods, comma-separated; all: those that the uploads permit")],
    seeds: Annotated[int, typer.Option(min=1, help="seeds per run: its own, the next one, ...")] = 1,
    set: Annotated[  # noqa: A002  the name of the flag
        list[str] | None, typer.Option(help="settings that differ from the runs': key=value; repeatable")
    ] = None,
    model: Annotated[str, typer.Option(help="module:attribute that builds the models of foreign runs")] = "",
    out: Annotated[Path | None, typer.Option(help="the comparison's folder, also of one that was cut off")] = None,
    format: Annotated[CompareFormat, typer.Option("--format", help="what is printed")] = "text",  # noqa: A002
) -> None:
    """Run several server methods on the same stored uploads and print one table."""
    shown: Format = "text" if format == "text" else "json"  # else standard output is the table's alone
    with errors("json" if format == "json" else "text"):
        from server_app.compare import Comparison, compare_runs

        overrides = with_absolute_paths(merge_settings(set or [], {o.key: o.kind for o in known_options()}))
        asked = Comparison(tuple(runs), methods, seeds, overrides, model, out)
        try:
            comparison = compare_runs(asked, log=lambda line: say(line, shown))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    print_comparison(comparison, format)
    if "error" in comparison:
        sys.stderr.write(f"error: {comparison['error']}\n")
        raise typer.Exit(1)


@cli.command(name="import")
def import_folder(
    folder: Annotated[Path, typer.Argument(help="folder of checkpoints: .safetensors, .pt, .pth, .bin")],
    *,
    architecture: Annotated[str, typer.Option(help="architecture of the files for which --map names none")],
    map: Annotated[Path | None, typer.Option(help="TOML file with what is known of the files")] = None,  # noqa: A002
    run_config: Annotated[list[str] | None, typer.Option(help="settings, as for run: data.name=..., ...")] = None,
    out: Annotated[Path | None, typer.Option(help="the new run folder; default: one in the usual place")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave out files that are refused")] = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Store a folder of checkpoints that nobody trained here as uploads of a new run folder, for replay."""
    with errors(format):
        from server_app.market import Request, import_checkpoints, import_lines

        given = with_absolute_paths(merge_settings(run_config or [], {o.key: o.kind for o in known_options()}))
        request = Request(folder, architecture, given, map, out, skip_bad)
        try:
            result = import_checkpoints(request, log=lambda line: say(line, format))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    typer.echo(json.dumps(result) if format == "json" else "\n".join(import_lines(result)))


@cli.command()
def methods(*, format: FormatOption = "text") -> None:  # noqa: A002
    """List the server methods with their options, defaults and sources."""
    app_defaults = default_settings()
    if format == "json":
        typer.echo(json.dumps([_method_facts(name, app_defaults) for name in METHODS]))
        return
    console = Console(markup=False)
    for name in METHODS:
        facts = _method_facts(name, app_defaults)
        table = Table(title=f"{name}: {facts['title']} ({facts['source']})", title_justify="left", expand=True)
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


def _method_facts(name: str, app_defaults: Mapping[str, Scalar]) -> dict[str, Any]:
    method = METHODS[name]
    options = [
        {"key": o.key, "default": o.default, "app_default": app_defaults[o.key], "allowed": o.allowed, "help": o.help}
        for o in options_of(method.config, name)
    ]
    needs = [need.value for need in method.needs]
    return {"name": name, "title": method.title, "source": method.source, "kind": method.kind, "needs": needs,
            "options": options}  # fmt: skip


def _launch(app: Path, given: Mapping[str, Scalar], num_supernodes: int, failing: errors) -> None:
    from server_app.launch import launch

    folder = Path(str(given.get("resume") or given["run-dir"]))
    if (done := _finished(folder)) is not None and given.get("resume"):
        print_result(done, failing.format)
        return
    if done is not None or (not given.get("resume") and (folder / "run.json").exists()):
        raise OptionError(f"setting 'run-dir' is {str(folder)!r}, which holds a run: allowed is a new folder")
    _refuse_replay(folder)
    check_before_start(read_settings(given), num_supernodes)
    began, written = time.monotonic(), _result_time(folder)
    # The ServerApp notes it in run.json, so that a resumed run has the same clients.
    os.environ[SUPERNODES_VARIABLE] = str(num_supernodes)
    try:
        launched = launch(app, settings=given, num_supernodes=num_supernodes, echo=echo_to(failing.format))
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted.{_how_to_go_on(folder)}\n")
        raise typer.Exit(INTERRUPTED) from None
    # A result that was here before is that of an earlier try.
    result = _read_result(folder) if _result_time(folder) != written else None
    if launched.exit_code != 0 or result is None or result["status"] != "finished":
        failing.facts = {"run_dir": str(folder)} if (folder / "run.json").exists() else {}
        reason = str((result or {}).get("error") or launched.reason or "it ended without a result")
        raise OneShotError(f"the run failed: {reason.rstrip('.')}.{_how_to_go_on(folder)}")
    total = time.monotonic() - began
    known = result["seconds"]
    result["seconds"] = {"start": round(total - known.pop("app", 0.0), 2), **known, "total": round(total, 2)}
    with RunFolder.open(folder) as run_folder:
        run_folder.write_result(result)
    print_result(result, failing.format)


def _finished(folder: Path) -> dict[str, Any] | None:
    result = _read_result(folder)
    return result if result is not None and result["status"] == "finished" else None


def _read_result(folder: Path) -> dict[str, Any] | None:
    if not (folder / "run.json").exists():
        return None
    with RunFolder.open(folder, write=False) as run_folder:
        return run_folder.result()


def _result_time(folder: Path) -> int:
    file = folder / "result.json"
    return file.stat().st_mtime_ns if file.exists() else 0


def _how_to_go_on(folder: Path) -> str:
    return f" To go on: oneshot resume {folder}" if (folder / "run.json").exists() else ""


def _stored_settings(folder: Path) -> dict[str, Scalar]:
    with RunFolder.open(folder, write=False) as run_folder:
        stored = run_folder.info.get("settings")
    if not isinstance(stored, dict):
        raise OptionError(
            f"{folder} was not begun by this app (run.json has no settings): resume it by its own project"
        )
    return dict(stored)


def _stored_supernodes(folder: Path) -> int:
    with RunFolder.open(folder, write=False) as run_folder:
        return int(run_folder.info.get("num-supernodes") or DEFAULT_SUPERNODES)


def _refuse_replay(folder: Path) -> None:
    if not (folder / "run.json").exists():
        return
    with RunFolder.open(folder, write=False) as run_folder:
        source, imported = (run_folder.info.get(key) for key in ("replay-of", "imported-from"))
    if source is None and imported is not None:
        raise OptionError(f"{folder} was imported, so it has no clients. To go on: oneshot replay {folder}")
    if source is not None:
        raise OptionError(
            f"{folder} is a replay, which has no clients. To go on: oneshot replay {source} --resume {folder}"
        )


def _app_folder(given: Path | None) -> Path:
    """Return the folder that Flower runs: the one given, the working directory, or where this app is installed."""
    candidates = [given] if given is not None else [Path.cwd(), Path(__file__).resolve().parent.parent]
    for folder in candidates:
        try:
            tool = tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {})
        except (OSError, tomllib.TOMLDecodeError):
            continue
        if "app" in tool.get("flwr", {}):
            return folder.resolve()
    raise OptionError(f"{candidates[0]} is no Flower app: allowed is a folder whose pyproject.toml has [tool.flwr.app]")
