"""The command line. A command imports its modules when it is called: torch takes two seconds, and help needs none."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from server_app.doctor.command import doctor
from server_app.launch.arguments import (
    ChangesOption,
    ClientsOption,
    EvaluateOption,
    FormatOption,
    LocalOption,
    ModelOption,
    OfflineOption,
    RunArgument,
    RunsArgument,
    SettingsOption,
    SeveralRunsArgument,
    StateArgument,
    TableOption,
    print_details,
    print_overview,
    print_runs,
    settings_of,
)
from server_app.launch.console import Format, errors, progress_bar, say
from strategies.core.errors import OptionError
from strategies.core.options import Scalar
from strategies.core.processor import without_collections
from strategies.run import check_run_folder, runs_folder

if TYPE_CHECKING:
    from server_app.launch.run_command import Launcher, PlannedRun
    from server_app.launch.superlink import Launched, Runtime

RUN = "Run"  # the panels of help
REUSE = "Reuse uploads"
INSPECT = "Inspect"
DEPLOY = "Deploy"

cli = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests one itself
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli.add_typer(doctor, name="doctor", rich_help_panel=DEPLOY)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"oneshot {metadata.version('oneshot-fl')}")
        raise typer.Exit


@cli.callback()
def about(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """One-shot federated learning: each client uploads a trained model once, and the server combines them."""


@cli.command(rich_help_panel=RUN)
def run(
    app: Annotated[Path | None, typer.Argument(help="the app's folder; default: here, else the installed one")] = None,
    *,
    settings: SettingsOption = None,
    method: Annotated[str | None, typer.Option(help="server method, as the setting method")] = None,
    seed: Annotated[int | None, typer.Option(help="seed, as the setting seed")] = None,
    num_supernodes: ClientsOption = None,
    local: LocalOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the settings, the bytes per client and the time; start nothing")
    ] = False,
    offline: OfflineOption = False,
    format: FormatOption = "text",  # noqa: A002  the name of the flag
) -> None:
    """Run the app in simulation and print the result; exit status 0 only if the run succeeded."""
    with errors(format) as failing:
        given = settings_of(settings, method=method, seed=seed)
        if local and app is not None:
            raise OptionError("--local runs the installed app: must be given without APP")
        with _runtime(local or dry_run) as runtime:
            with without_collections():
                from server_app.launch.run_command import plan_run

            planned = plan_run(_in_process(given, local), num_supernodes)
            if dry_run:
                from server_app.launch.dry_run import print_plan

                print_plan(planned, format)
            else:
                _launch(app, planned, failing, runtime)


def _in_process(given: Mapping[str, Scalar], local: bool) -> Mapping[str, Scalar]:
    """Return settings with the server stage in this process if the run is local and they do not say where."""
    return {"compute": "in-process", **given} if local else given


def _runtime(local: bool) -> AbstractContextManager[Runtime | None]:
    """Return the processes of a simulation, which import Flower while this one imports torch and reads the settings.

    None for work in this process.
    """
    if local:
        return nullcontext()
    from server_app.launch.superlink import prepare_runtime

    return prepare_runtime()


def _in_this_process(runtime: Runtime | None) -> Launcher | None:
    """Return what runs the app where there is no simulation."""
    return _launch_local if runtime is None else None


def _launch_local(app: Path, **asked: Any) -> Launched:
    # Imported after the checks of a run: Flower's log would show their lines, and the run shows them again.
    with without_collections():
        from server_app.local import launch_local

    return launch_local(app, **asked)


def _launch(app: Path | None, planned: PlannedRun, failing: errors, runtime: Runtime | None) -> None:
    """Run the app in these processes; without them in this one."""
    from server_app.launch.run_command import app_folder, launch_run

    launch_run(app_folder(app), planned, failing, _in_this_process(runtime), runtime)


@cli.command(name="resume", rich_help_panel=RUN)
def resume_run(
    folder: RunArgument,
    *,
    local: LocalOption = False,
    offline: OfflineOption = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Resume an interrupted run with its original settings; for a finished run, print its result."""
    with errors(format) as failing:
        check_run_folder(folder)
        with _runtime(local) as runtime:
            with without_collections():
                from server_app.launch.run_command import plan_run

            _launch(None, plan_run(_in_process({"resume": str(folder)}, local)), failing, runtime)


@cli.command(rich_help_panel=REUSE)
def replay(
    folder: RunArgument,
    *,
    method: Annotated[str, typer.Option(help="server method; default: the run's own")] = "",
    changes: ChangesOption = None,
    resume: Annotated[Path | None, typer.Option(help="folder of an interrupted replay")] = None,
    compute: Annotated[Literal["in-process", "ray"], typer.Option(help="where the server stage runs")] = "in-process",
    model: ModelOption = "",
    evaluate: EvaluateOption = "",
    offline: OfflineOption = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Run any server method on the stored uploads of a run, without Flower and without clients."""
    with errors(format):
        overrides = settings_of(changes, method=method or None)
        method = str(overrides.pop("method", ""))
        check_run_folder(folder)
        with without_collections():
            from server_app.launch.result import print_result
            from server_app.replay.request import ReplayRequest
            from server_app.replay.stored import replay_run

        request = ReplayRequest(
            folder, method, overrides, resume=resume, compute=compute, model=model, evaluate=evaluate
        )
        with progress_bar(format):
            result = replay_run(request, log=lambda line: say(line, format))
        print_result(result, format)


@cli.command(rich_help_panel=REUSE)
def compare(
    runs: SeveralRunsArgument,
    *,
    methods: Annotated[
        str, typer.Option(help="server methods, comma-separated; all: every one that the uploads permit")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="seeds per run: its own, the next one, ...")] = 1,
    changes: ChangesOption = None,
    out: Annotated[
        Path | None, typer.Option(help="the comparison's folder; an interrupted comparison resumes there")
    ] = None,
    model: ModelOption = "",
    evaluate: EvaluateOption = "",
    on: Annotated[
        Literal["clients"] | None, typer.Option(help="also let the clients of each run score all results")
    ] = None,
    local: LocalOption = False,
    offline: OfflineOption = False,
    format: TableOption = "text",  # noqa: A002
) -> None:
    """Run several server methods on the same stored uploads and print one table."""
    shown: Format = "text" if format == "text" else "json"  # every other format prints only the table
    with errors("json" if format == "json" else "text") as failing:
        if on and format not in ("text", "json"):
            raise OptionError(f"--format is {format!r}: must be 'text' or 'json' with --on clients")
        from server_app.settings.catalogue import catalogue

        overrides = settings_of(changes)
        catalogue().check_methods(methods)  # before torch is loaded
        for run in runs:
            check_run_folder(run)
        from server_app.compare.comparison import Comparison, compare_runs, with_evaluations
        from server_app.compare.report import print_comparison

        asked = Comparison(tuple(runs), methods, seeds, overrides, out=out, model=model, evaluate=evaluate)
        with progress_bar(shown):
            comparison = compare_runs(asked, log=lambda line: say(line, shown))
        results = []
        for run in comparison["runs"] if on else ():
            cells = [Path(cell["run_dir"]) for cell in comparison["cells"] if cell["run"] == run]
            results += _evaluated(cells, failing, local=local) if cells else []
        if on:
            comparison = with_evaluations(comparison, results)
        print_comparison(comparison, format)
        if results and format == "text":
            from server_app.launch.result import print_evaluations

            print_evaluations(results, "text")
    if "error" in comparison:
        sys.stderr.write(f"error: {comparison['error']}\n")
        raise typer.Exit(1)


@cli.command(rich_help_panel=REUSE)
def evaluate(
    runs: SeveralRunsArgument,
    *,
    on: Annotated[Literal["clients"], typer.Option(help="whose examples: those that each client kept from training")],
    local: LocalOption = False,
    offline: OfflineOption = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Have the clients of a run score its result and those of its replays, all in one exchange."""
    with errors(format) as failing:
        for run in runs:
            check_run_folder(run)
        results = _evaluated(runs, failing, local=local)
        if results:
            from server_app.launch.result import print_evaluations

            print_evaluations(results, format)


def _evaluated(runs: list[Path], failing: errors, *, local: bool) -> list[dict[str, Any]]:
    """Return the results of these folders with the clients' scores; for a deployed run print the command instead."""
    with _runtime(local) as runtime:
        from server_app.launch.run_command import app_folder, how_to_evaluate, launch_evaluation, plan_evaluation

        planned = plan_evaluation(runs, _in_process({}, local))
        if planned is None:
            say(f"its clients are not simulated here; to have them score: {how_to_evaluate(runs[0])}", failing.format)
            return []
        return launch_evaluation(app_folder(None), planned, runs, failing, _in_this_process(runtime), runtime)


@cli.command(rich_help_panel=INSPECT)
def rounds(
    runs: SeveralRunsArgument,
    *,
    targets: Annotated[
        str, typer.Option(help="scores in %, comma-separated; default: two multiples of 5 below the best")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="folder for rounds.json and the plot; default: none")] = None,
    format: TableOption = "text",  # noqa: A002
) -> None:
    """Report after how many rounds runs reach a score, and draw learning curves, one per setting."""
    shown: Format = "text" if format == "text" else "json"  # every other format prints only the table
    with errors("json" if format == "json" else "text"):
        for run in runs:
            check_run_folder(run)
        from server_app.compare.rounds import print_rounds, read_targets, report_rounds

        facts, lines = report_rounds(runs, read_targets(targets), out, lambda line: say(line, shown))
        print_rounds(facts, lines, format)


@cli.command(rich_help_panel=REUSE)
def forget(
    folder: RunArgument,
    *,
    client: Annotated[list[str], typer.Option(help="client whose upload is left out; repeatable")],
    changes: ChangesOption = None,
    local: LocalOption = False,
    offline: OfflineOption = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Unlearn a client: run the server's part again with the uploads of the other clients only."""
    with errors(format) as failing:
        changed = settings_of(changes)
        check_run_folder(folder)
        with _runtime(local) as runtime:
            from server_app.launch.run_command import plan_run, stored_settings
            from server_app.replay.forget import forget_settings, what_is_left
            from server_app.settings.read import overridden

            run_dir = str(changed.pop("run-dir", ""))
            stored = stored_settings(folder, str(changed.get("method", "")))
            given = forget_settings(folder, client, overridden(stored, changed), run_dir=run_dir)
            _launch(None, plan_run(_in_process(given, local)), failing, runtime)
        say(what_is_left(folder, client), format)


@cli.command(name="import", rich_help_panel=REUSE)
def import_folder(
    folder: Annotated[
        Path,
        typer.Argument(help="folder of checkpoints (.safetensors, .pt, .pth, .bin) or of folders of LoRA adapters"),
    ],
    *,
    architecture: Annotated[
        str, typer.Option(help="architecture of the files, unless --map names it; not needed for PEFT's folders")
    ] = "",
    map: Annotated[Path | None, typer.Option(help="TOML file with facts about the files")] = None,  # noqa: A002
    settings: SettingsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="the new run folder; default: a new one in $ONESHOT_RUNS, else runs")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="import the other files if some are refused")] = False,
    offline: OfflineOption = False,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Store a folder of checkpoints from elsewhere as the uploads of a new run folder, for replay."""
    with errors(format):
        given = settings_of(settings)
        from server_app.replay.imports import ImportRequest, import_checkpoints, import_lines

        request = ImportRequest(folder, architecture, given, map, out, skip_bad)
        result = import_checkpoints(request, log=lambda line: say(line, format))
    typer.echo(json.dumps(result) if format == "json" else "\n".join(import_lines(result)))


@cli.command(rich_help_panel=REUSE)
def export(
    folder: RunArgument,
    *,
    only: Annotated[Literal["torch", "onnx"] | None, typer.Option(help="one of the two forms; default: both")] = None,
    model: ModelOption = "",
    out: Annotated[Path | None, typer.Option(help="folder of the files; default: export in the run folder")] = None,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Write a run's student and ensemble as files of torch.export and ONNX, which load without this package."""
    with errors(format):
        check_run_folder(folder)
        from server_app.export.exporting import export_lines, export_run

        facts = export_run(folder, only=only or "", model=model, out=out, log=lambda line: say(line, format))
    typer.echo(json.dumps(facts) if format == "json" else "\n".join(export_lines(facts)))


@cli.command(name="list", rich_help_panel=INSPECT)
def list_of_runs(folder: RunsArgument = None, *, format: TableOption = "text") -> None:  # noqa: A002
    """List the runs: method, data, clients, seed, status and accuracy, the newest last."""
    print_runs(folder or runs_folder(), format)


@cli.command(rich_help_panel=DEPLOY)
def clean(
    folder: StateArgument = None,
    *,
    keep: Annotated[int, typer.Option(min=0, help="number of newest runs to keep")] = 0,
) -> None:
    """Remove the trained models that the clients on this machine keep for a resumed run."""
    from strategies.core.places import forget_old_runs, state_root

    removed, refused = forget_old_runs(place := state_root(str(folder or "")).absolute(), keep)
    typer.echo(f"removed the clients' models of {len(removed)} runs from {place}")
    sys.exit(f"{len(refused)} could not be removed, such as {place / refused[0]}" if refused else 0)


@cli.command(rich_help_panel=INSPECT)
def methods(
    names: Annotated[list[str] | None, typer.Argument(help="only these methods, in this order")] = None,
    *,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """List the server methods by what they ask of the clients; with names, the options of these methods."""
    from server_app.settings.catalogue import catalogue

    with errors(format):
        found = [catalogue().method_facts(name) for name in names or catalogue().methods]
    if format == "json":
        typer.echo(json.dumps(found))
    elif not names:
        print_overview()
    else:
        for facts in found:
            print_details(facts)
