"""One run of the app from the command line: starting it, resuming it, and reading its result."""

from __future__ import annotations

import math
import shlex
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.data.proxy import clients_share
from fl_app.environment import variables
from fl_app.node_config import SUPERNODES_VARIABLE
from server_app.launch.console import echo_to, errors, oneshot, progress_bar
from server_app.launch.result import print_result
from server_app.settings.build import DEFAULT_SUPERNODES, build_job, check_before_start, number_of_clients
from server_app.settings.catalogue import toml_table
from server_app.settings.checks import check_adopted, check_same_run
from server_app.settings.commit import COMMIT_VARIABLE, commit_of
from server_app.settings.read import (
    Settings,
    default_settings,
    known_settings,
    listed_settings,
    overridden,
    read_settings,
)
from server_app.settings.server_data import open_half
from strategies.compute.threads import multiplications
from strategies.core.durable import atomic_write, store_errors
from strategies.core.errors import OneShotError, OptionError, StoreError
from strategies.core.facts import CLASSIFIER, is_head, kind_of
from strategies.core.options import Scalar
from strategies.core.processor import flush_subnormals
from strategies.run import FACTS_FILE, RESULT_FILE, is_run_folder, runs_folder
from strategies.run.run_folder import RunFolder, default_run_dir, info_of
from strategies.run.stage import pinned_clients

if TYPE_CHECKING:
    from server_app.launch.superlink import Launched, Runtime

# Resumes an interrupted deployed run: the file that the run leaves, and the command that reads it.
#
# ``flwr run`` cannot read a run's original settings: every setting that is not given has the app's default, for the
# clients too. So a deployed run writes all its settings into its folder, as a file for ``--run-config``.


RESUME_FILE = "resume.toml"
# Up to which one process trains all clients before a second has started: steps, and multiplications of forward passes.
FEW_STEPS, LITTLE_WORK = 2500, 40_000_000_000
Launcher = Callable[..., "Launched"]  # runs the app to its end, as server_app.launch.superlink.launch


def leave_resume_file(folder: Path, settings: Mapping[str, Scalar]) -> None:
    """Write all settings of a run, with ``resume`` naming its folder.

    Raises:
        StoreError: The file cannot be written.
    """
    text = toml_table({**settings, "run-dir": "", "resume": str(folder)})
    with store_errors(folder / RESUME_FILE):
        atomic_write(folder / RESUME_FILE, text.encode())


def how_to_go_on(folder: Path) -> str:
    """Return the command with which the operator of a deployment resumes a run."""
    return f"flwr run APP SUPERLINK --run-config {shlex.quote(str(folder / RESUME_FILE))}"


@dataclass(frozen=True)
class PlannedRun:
    """A run of the app, read and not yet begun."""

    given: Mapping[str, Scalar]
    settings: Settings
    num_supernodes: int

    def check(self) -> None:
        """Refuse the run before Flower starts.

        Raises:
            OneShotError: A setting does not fit the method, the data, the clients, or the run whose uploads it takes.
        """
        if not self.settings.app.resume:
            check_adopted(self.settings, self.num_supernodes)
        check_before_start(self.settings, self.num_supernodes)

    def clients_at_once(self) -> int | None:
        """Return 1 where one process trains all clients sooner than several start, else None.

        A process of clients imports torch, which takes 4 to 5 seconds of a core.
        """
        settings, config = self.settings, self.settings.app.client
        if trains_elsewhere(settings) or settings.choice.asks_again or settings.plan.rounds > 1:
            return None
        if self.num_supernodes * (config.steps or config.epochs) > FEW_STEPS:  # of one step per epoch: without the data
            return None
        split = open_half(settings, "train")
        held = len(clients_share(split, seed=0, limit=settings.app.data.limit, proxy=settings.app.data.proxy))
        each = config.steps or config.epochs * math.ceil(held / self.num_supernodes / config.batch_size)
        if (steps := self.num_supernodes * each) > FEW_STEPS:
            return None
        job, names = build_job(settings, split, None), settings.app.model.mix()
        per_example = max(multiplications(replace(job, student=name)) for name in names)
        return 1 if steps * config.batch_size * per_example <= LITTLE_WORK else None


def launch_run(
    app: Path, run: PlannedRun, failing: errors, local: Launcher | None = None, runtime: Runtime | None = None
) -> None:
    """Run the app in simulation, or resume a run, and print its result.

    Args:
        local: Runs it in this process; None: Flower's simulation does.
        runtime: The processes of that simulation; None: they start here.

    Raises:
        OneShotError: The run failed; the message has the command that resumes it.
    """
    resumed = run.settings.app.resume
    folder = Path(resumed or run.settings.app.run_dir)
    if (done := _finished(folder)) is not None and resumed:
        print_result(done, failing.format)
        return
    if done is not None or (not resumed and is_run_folder(folder)):
        raise OptionError(f"setting 'run-dir' is {str(folder)!r}, which holds a run: must be a new folder")
    _refuse_replay(folder)
    _refuse_live(folder)
    to_go_on = partial(_how_to_go_on, folder, *(["--local"] if local else []))
    # In this process the threads that load data for the checks go on to compute.
    with flush_subnormals() if local else nullcontext():
        run.check()
        began, written = time.monotonic(), _result_time(folder)
        try:
            launched = _start(
                app,
                run,
                failing,
                local or _launcher(partial(_is_finished, folder, written), runtime, run.clients_at_once()),
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted.{to_go_on()}") from None
    # An unchanged result belongs to an earlier attempt.
    result = _read_result(folder) if _result_time(folder) != written else None
    if launched.exit_code != 0 or result is None or result["status"] != "finished":
        failing.facts = {"run_dir": str(folder)} if is_run_folder(folder) else {}
        reason = str((result or {}).get("error") or launched.reason or "it ended without a result")
        raise OneShotError(f"the run failed: {reason.rstrip('.')}.{to_go_on()}")
    total = time.monotonic() - began
    known = result["seconds"]
    result["seconds"] = {"start": round(total - known.pop("app", 0.0), 2), **known, "total": round(total, 2)}
    with RunFolder.open(folder) as run_folder:
        run_folder.write_result(result)
    print_result(result, failing.format)


def trains_elsewhere(settings: Settings) -> bool:
    """Return whether clients do something else than the app's training of a classifier on their share, on a CPU.

    A function of the user's own, of ``model.train``, takes as long as it takes.
    """
    app, names = settings.app, settings.app.model.mix()
    given = app.client.nodes or app.client.checkpoint or app.resume or app.uploads
    own = bool(given or app.model.train or app.privacy.on)
    on_gpu = app.client.device not in ("auto", "cpu")
    other = any(is_head(name) or kind_of(name) != CLASSIFIER for name in names)
    return own or on_gpu or other or settings.choice.uploads != CLASSIFIER


def _start(app: Path, run: PlannedRun, failing: errors, start: Launcher) -> Launched:
    # The ServerApp writes it to run.json, so that a resumed run has the same clients; the app runs from a copy.
    named = {SUPERNODES_VARIABLE: str(run.num_supernodes), COMMIT_VARIABLE: commit_of(app)}
    with variables(named), progress_bar(failing.format):
        return start(app, settings=run.given, num_supernodes=run.num_supernodes, echo=echo_to(failing.format))


def _launcher(is_finished: Callable[[], bool], runtime: Runtime | None, at_once: int | None) -> Launcher:
    from server_app.launch.superlink import launch

    return partial(launch, is_finished=is_finished, runtime=runtime, at_once=at_once)


def plan_run(given: Mapping[str, Scalar], num_supernodes: int | None = None) -> PlannedRun:
    """Read the settings of a run; those of a run that it resumes or reuses complete them.

    Args:
        num_supernodes: Simulated clients, as asked for; None for those of the other run, or the default.

    Raises:
        OptionError: A setting is unknown or out of range, or differs from that of the run that is resumed.
        StoreError: The run that is named does not exist.
    """
    settings = dict(given)
    if settings.get("resume"):
        folder = Path(str(settings["resume"]))
        stored = stored_settings(folder)
        settings = listed_settings({**stored, **settings, "resume": str(folder.absolute()), "run-dir": ""})
        check_same_run({"settings": stored}, settings)
        num_supernodes = num_supernodes or resumed_supernodes(folder)
    elif source := settings.get("uploads"):  # the clients are those of the stored run
        new = {"resume": "", "run-dir": "", "uploads": "", "forget": ""}
        settings = listed_settings(
            overridden(stored_settings(Path(str(source)), str(settings.get("method", ""))), {**new, **settings})
        )
        num_supernodes = num_supernodes or stored_supernodes(Path(str(source)))
    if not settings.get("resume"):
        name = str(settings.get("method", default_settings()["method"]))
        settings["run-dir"] = str(default_run_dir(str(settings.get("run-dir", "")), name, parent=runs_folder()))
    checked = read_settings(settings)
    return PlannedRun(settings, checked, num_supernodes or number_of_clients(checked.app))


EVALUATE_FILE = "evaluate.toml"


def plan_evaluation(folders: Sequence[Path], given: Mapping[str, Scalar]) -> PlannedRun | None:
    """Read the settings with which the clients of a run score stored results; None for a deployed run.

    The clients of a deployed run are elsewhere: its folder gets a file with these settings, for ``flwr run``.

    Raises:
        OptionError: The results are of different runs or not finished, or the run has no clients.
        StoreError: A folder is no run folder.
    """
    runs = {str(_source_of(folder)): folder for folder in folders}
    if len(runs) > 1:
        raise OptionError(f"{' and '.join(map(str, runs.values()))} are of different runs: must be results of one run")
    run = Path(*runs)
    for folder in (run, *folders):
        if _finished(folder) is None or "," in str(folder):
            raise OptionError(f"{folder} has no result to evaluate: must be a finished run whose path has no comma")
    _refuse_replay(run)
    named = ",".join(str(folder.resolve()) for folder in folders)
    asked = {"resume": str(run), "evaluate.results": named}
    if info_of(run).get("num-supernodes") != 0:  # 0: deployed
        return plan_run({**given, **asked})
    text = toml_table({**listed_settings(stored_settings(run)), "run-dir": "", **asked})
    with store_errors(run / EVALUATE_FILE):
        atomic_write(run / EVALUATE_FILE, text.encode())
    return None


def how_to_evaluate(folder: Path) -> str:
    """Return the command with which the operator of a deployment has clients score the results of a run's folder."""
    run = _source_of(folder)
    return f"flwr run APP SUPERLINK --run-config {shlex.quote(str(run / EVALUATE_FILE))}"


def launch_evaluation(
    app: Path,
    run: PlannedRun,
    folders: Sequence[Path],
    failing: errors,
    local: Launcher | None = None,
    runtime: Runtime | None = None,
) -> list[dict[str, Any]]:
    """Have the simulated clients of a run score stored results; the other arguments are those of :func:`launch_run`.

    Returns:
        The results, with the clients' scores, in the order of the folders.

    Raises:
        OneShotError: It failed; the results are as they were.
    """
    before = [_result_time(folder) for folder in folders]
    with flush_subnormals() if local else nullcontext():
        run.check()
        try:
            launched = _start(app, run, failing, local or _launcher(lambda: False, runtime, None))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the results are as they were.") from None
    results = [result for folder in folders if (result := _finished(folder)) is not None]
    same = any(_result_time(folder) == time_ for folder, time_ in zip(folders, before, strict=True))
    if launched.exit_code != 0 or same or len(results) < len(folders):
        raise OneShotError(f"the evaluation failed: {launched.reason or 'it ended without scores'}")
    return results


def _source_of(folder: Path) -> Path:
    """Return the run whose uploads a result was made of: the run itself, or that of a replay."""
    return Path(info_of(folder).get("replay-of", folder)).resolve()


def _finished(folder: Path) -> dict[str, Any] | None:
    result = _read_result(folder)
    return result if result is not None and result["status"] == "finished" else None


def _read_result(folder: Path) -> dict[str, Any] | None:
    if not is_run_folder(folder):
        return None
    with RunFolder.open(folder, write=False) as run_folder:
        return run_folder.result()


def _result_time(folder: Path) -> int:
    file = folder / RESULT_FILE
    return file.stat().st_mtime_ns if file.exists() else 0


def _is_finished(folder: Path, earlier: int) -> bool:
    """Return whether a run's result is new and whole, and its process has let go of the folder."""
    if _result_time(folder) == earlier or _finished(folder) is None:
        return False
    try:
        _refuse_live(folder)
    except StoreError:
        return False
    return True


def _refuse_live(folder: Path) -> None:
    """Refuse the folder of a run that another process works on, before anything starts."""
    if is_run_folder(folder):
        RunFolder.open(folder).close()


def _how_to_go_on(folder: Path, *flags: str) -> str:
    try:
        _refuse_live(folder)
    except StoreError:  # the run of another process, which is no run to resume
        return ""
    return f" To resume: {oneshot('resume', folder, *flags)}" if is_run_folder(folder) else ""


def stored_settings(folder: Path, method: str = "") -> dict[str, Scalar]:
    """Return the original settings of a run of this app, for a method, see :func:`.read.known_settings`.

    Raises:
        OptionError: The run is not of this app.
        StoreError: The folder is no run folder.
    """
    stored = info_of(folder).get("settings")
    if not isinstance(stored, dict):
        raise OptionError(
            f"{folder} is not a run of this app ({FACTS_FILE} has no settings): resume it with its own project"
        )
    return known_settings(stored, method)


def stored_supernodes(folder: Path) -> int:
    """Return the number of clients with which a run began."""
    return int(info_of(folder).get("num-supernodes") or DEFAULT_SUPERNODES)


def resumed_supernodes(folder: Path) -> int:
    """Return the number of clients of a run to resume; refuse one of ``flwr run`` that asks its clients again."""
    with RunFolder.open(folder, write=False) as run_folder:
        info, pinned = run_folder.info, pinned_clients(run_folder.round(1))
    elsewhere = info.get("num-supernodes") == 0 and "replay-of" not in info and _finished(folder) is None
    if elsewhere:
        settings = read_settings(stored_settings(folder))
        if pinned is None or settings.choice.asks_again or settings.plan.rounds > 1:
            raise OptionError(f"{folder} has clients on other machines: resume it by: {how_to_go_on(folder)}")
    return stored_supernodes(folder)


def _refuse_replay(folder: Path) -> None:
    if not is_run_folder(folder):
        return
    source, imported = (info_of(folder).get(key) for key in ("replay-of", "imported-from"))
    if source is None and imported is not None:
        raise OptionError(f"{folder} was imported, so it has no clients. To replay: {oneshot('replay', folder)}")
    if source is not None:
        again = oneshot("replay", source, "--resume", folder)
        raise OptionError(f"{folder} is a replay, which has no clients. To resume: {again}")


def app_folder(given: Path | None) -> Path:
    """Return the folder that Flower runs: ``given``, else the working directory, else this app's installation."""
    home = Path(__file__).resolve().parents[2]  # a clone is an app's folder, the installed package holds one
    candidates = [given] if given is not None else [Path.cwd(), home, home / "app"]
    for folder in candidates:
        try:
            tool = tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {})
        except (OSError, ValueError):  # of another encoding, or no TOML
            continue
        if "app" in tool.get("flwr", {}):
            return folder.resolve()
    raise OptionError(f"{candidates[0]} is not a Flower app: must be a folder whose pyproject.toml has [tool.flwr.app]")
