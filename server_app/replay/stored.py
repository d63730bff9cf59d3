"""Replay: runs any server method on the stored uploads of a run, without its clients; and reads such results again."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_app.data import Split
from fl_app.project import FAILURES
from server_app.launch.console import oneshot
from server_app.launch.guard import sigterm_as_interrupt
from server_app.replay.request import ReplayRequest, foreign_job, is_foreign, of_the_app, stored_uploads, taught
from server_app.report.finish import bare_result, finish
from server_app.settings.build import build_job, held_out
from server_app.settings.checks import check_same_run, check_settled
from server_app.settings.choices import CHOICES
from server_app.settings.commit import commit_facts
from server_app.settings.read import Settings, overridden, read_settings, scaled_line
from server_app.settings.server_data import OwnScores, Scorer, open_half
from strategies.compute import ServerCompute, choose, place_name
from strategies.core.errors import OneShotError, OptionError, StoreError
from strategies.core.options import flatten
from strategies.core.processor import flush_subnormals
from strategies.core.seeds import seeded_torch
from strategies.core.stage_options import NONE, RIDGE
from strategies.flower.rounds.config import NEEDS_CLIENTS
from strategies.merging.adapters import describe_merge
from strategies.method import METHODS, Job, Method
from strategies.run.quarantine import Gatekeeper, guarded_replay
from strategies.run.run_folder import RunFolder, default_run_dir, info_of
from strategies.run.stage import StageReport, join_sums, last_finished_round, last_round, load_report, with_start
from strategies.uploads.needs import check_alone, list_fitting_methods

ADAPTER_FOLDER = "adapter"  # of a replay's result that is a LoRA adapter, as PEFT reads it
LEAST_UPLOADS = 2  # the least number that a replay of another project's run needs after its gatekeeper


@flush_subnormals()
def replay_run(
    request: ReplayRequest, *, log: Callable[[str], None], compute: ServerCompute | None = None
) -> dict[str, Any]:
    """Run the method, keep its result in a run folder of its own, and return the result.

    Raises:
        OptionError: A setting is wrong, or the run's models cannot be built.
        StoreError: A folder is not of the expected kind, or an upload is damaged.
    """
    began = time.monotonic()
    info = _begun(request) or _source(request)
    (settings, job, scorer), foreign = _prepared(request, info), is_foreign(info)
    method = _method(settings.choice.name, request, job)
    least = LEAST_UPLOADS if foreign else settings.app.min_uploads
    gatekeeper = Gatekeeper(settings.app.gatekeeper, least, log)
    with (
        sigterm_as_interrupt(),
        _target(request, {**info, **_facts(settings, job, request, foreign=foreign)}) as target,
    ):
        if (done := target.result()) is not None and done["status"] == "finished":
            return done
        log(f"replay of {request.run}; its folder is {target.path}")
        if settings.scaled:
            log(f"scaled: {scaled_line(settings.scaled)}")
        try:
            report = guarded_replay(
                gatekeeper,
                method,
                job,
                request.run,
                compute=compute or choose(place_name(request.compute, settings.app.shards)),
                target=target,
                checkpoint_s=settings.app.checkpoint_s,
                finish=settings.app.finish,
            )
        except KeyboardInterrupt:
            own = ["--model", request.model] if request.model else []
            own += ["--evaluate", request.evaluate] if request.evaluate else []
            command = oneshot("replay", request.run, "--resume", target.path, *own)
            raise KeyboardInterrupt(f"interrupted. To resume: {command}") from None
        except (OneShotError, *FAILURES):
            if request.resume is None:
                _remove_unbegun(target)
            raise
        adapter = describe_merge(settings.choice.name, report.job, report.outcome)
        if adapter is not None and adapter.adapter.config is not None:
            adapter.save(target.path / ADAPTER_FOLDER)
            log(f"the merged adapter: PeftModel.from_pretrained(base, {str(target.path / ADAPTER_FOLDER)!r})")
        seconds = {"server": report.seconds, "app": time.monotonic() - began}
        if scorer is None and foreign:
            result = bare_result(target, settings.choice.name, report, seconds)
        else:
            result = finish(target, settings, report, scorer, seconds=seconds, log=log, kept=request.kept)
        # No Flower starts before a replay: the time of this process is the total.
        result["seconds"]["total"] = result["seconds"].pop("app")
        target.write_result(result)
        return result


def check_replay(request: ReplayRequest) -> str:
    """Refuse a replay with invalid settings, or one resumed under other settings than it began with.

    Returns:
        What sets its result apart from others in tables, :attr:`strategies.method.Plan.mark`.

    Raises:
        OptionError: A setting is wrong or differs, or the run's models cannot be built.
        StoreError: A folder is not of the expected kind.
    """
    info = _begun(request) or _source(request)
    settings = _settings(request, info)
    if settings is None:
        settings, _ = foreign_job(request, info)
    else:
        _check_own(request)
    return settings.plan.mark


def unmet_need(request: ReplayRequest) -> str:
    """Return the method's need that the run does not meet (label counts, real images), in one line, else "".

    Raises:
        OptionError: A setting is wrong.
        StoreError: The folder holds no uploads, or a damaged one.
    """
    info = _source(request)
    check_replay(request)
    uploads = stored_uploads(request.run)
    try:
        settings = _settings(request, info)
        job = (
            _foreign(request, info)[1] if settings is None else _job(settings, open_half(settings, "test"), None, info)
        )
        method = _method(request.method or info["method"], request, job)
        with RunFolder.open(request.run, write=False) as run:
            job = with_start(method, job, run)
        check_alone(method, join_sums(method, replace(job, uploads=uploads)))
    except OptionError as error:
        return str(error)
    return ""


def _method(name: str, request: ReplayRequest, job: Job) -> Method:
    """Return the method of a replay."""
    method = CHOICES[name].method
    if method is None:
        raise OptionError(
            f"method {name!r} needs that {NEEDS_CLIENTS}: run it with 'oneshot run', or choose another "
            f"method: {list_fitting_methods(replace(job, uploads=stored_uploads(request.run)))}"
        )
    return method


def _prepared(request: ReplayRequest, info: Mapping[str, Any]) -> tuple[Settings, Job, Scorer | None]:
    """Return what a replay works with.

    Returns:
        The settings, of another project's run only those of the method and of the gatekeeper; the job; the held-out
        images, or the function of the user's own, None for another project's run without one.
    """
    settings = _settings(request, info)
    if settings is not None:
        _check_own(request)
        images, split = held_out(settings)
        return settings, _job(settings, split, images, info), images
    settings, job = _foreign(request, info)
    name = request.evaluate or str(info.get("evaluate", ""))
    scorer = OwnScores.of(name) if name else None
    if scorer is not None:
        with seeded_torch(0, "check"):  # a function that fails is refused before the server stage, not after it
            scorer.asked(job.builders[job.student]())
    return settings, replace(job, observer=scorer), scorer


def _check_own(request: ReplayRequest) -> None:
    if request.model:
        raise OptionError(
            f"--model is {request.model!r}: must be '' for {request.run}, a run of this app, whose settings "
            "name its models"
        )
    if request.evaluate:
        raise OptionError(
            f"--evaluate is {request.evaluate!r}: must be '' for {request.run}, a run of this app, which is tested on "
            "its own held-out examples"
        )


def _foreign(request: ReplayRequest, info: Mapping[str, Any]) -> tuple[Settings, Job]:
    settings, job = foreign_job(request, info)
    return settings, taught(job, settings.app, info)


def _job(settings: Settings, split: Split, images: Scorer | None, info: Mapping[str, Any]) -> Job:
    # A replay may have another seed, but the clients' images are those of the run.
    job = build_job(settings, split, images, data_seed=info.get("data-seed"))
    return taught(job, settings.app, info)


def _source(request: ReplayRequest) -> dict[str, Any]:
    """Return the facts of the run of the uploads, for its replay."""
    with RunFolder.open(request.run, write=False) as run:
        info, held = run.info, last_round(run).held()
    if not held:
        other = f": it is a replay of {info['replay-of']}" if "replay-of" in info else ""
        raise StoreError(f"{request.run} holds no uploads{other}; must be a run folder with at least one")
    kept = {
        key: value
        for key, value in info.items()
        if key not in ("id", "created", "pid", "versions", "commit", "gatekeeper.policy", "teacher")
    }
    return {**kept, "replay-of": str(request.run.resolve()), "data-seed": info["seed"]}


def _begun(request: ReplayRequest) -> dict[str, Any] | None:
    """Return the facts of the replay to resume, None for a new one."""
    if request.resume is None:
        return None
    info = info_of(request.resume)
    source, method, run = info.get("replay-of"), info.get("method"), request.run.resolve()
    if source != str(run) or request.method not in ("", method):
        wanted = f" with method {request.method!r}" if request.method else ""
        raise StoreError(
            f"{request.resume} is not a replay of {run}{wanted}: it is one of {source or 'no run'} with {method!r}"
        )
    return info


def _settings(request: ReplayRequest, info: Mapping[str, Any]) -> Settings | None:
    """Return the settings of a run of this app, or of its resumed replay; None for a run of another project."""
    if is_foreign(info):
        return None
    stored = info["settings"]
    wanted = {**({"method": request.method} if request.method else {}), **request.overrides}
    # The run's own method may have had a teacher that this method does not accept.
    if request.method in METHODS and stored.get("teacher") not in METHODS[request.method].teachers:
        wanted = {"teacher": "method", **wanted}
    # The clients' sums are those of the run's own result.
    if request.method not in ("", stored["method"]) and stored.get("finish") == RIDGE:
        wanted = {"finish": NONE, **wanted}
    settings = read_settings(overridden(stored, {"resume": "", "run-dir": "", **wanted}))
    if request.resume is not None:
        check_same_run(info, settings.flat)
    else:
        check_settled(stored, settings)
    return settings


def _facts(settings: Settings, job: Job, request: ReplayRequest, *, foreign: bool) -> dict[str, Any]:
    facts = {
        "method": settings.choice.name,
        "seed": job.seed,
        "threads": job.threads,
        "student": job.student,
        "config": flatten(job.config),
        **commit_facts(),
    }
    if not foreign:
        return {**facts, "settings": dict(settings.flat)}
    scored = {"evaluate": request.evaluate} if request.evaluate else {}
    options = {**flatten(job.config, settings.choice.name), **of_the_app(settings.app)}
    return {**facts, "options": options, **scored}


def _target(request: ReplayRequest, info: Mapping[str, Any]) -> RunFolder:
    if request.resume is not None:
        return RunFolder.open(request.resume)
    beside = request.run.absolute().parent
    return RunFolder.create(request.folder or default_run_dir("", f"replay-{info['method']}", parent=beside), info)


def _remove_unbegun(target: RunFolder) -> None:
    """Remove the folder of a replay that failed before its first epoch, and so cannot be resumed."""
    work = target.round(1)
    epochs = any("epoch" in row for row in work.metrics())
    if work.load_checkpoint() is None and not epochs and not last_finished_round(target):
        shutil.rmtree(target.path)


def read_stored(
    folder: Path, run: Path, images: Scorer | None, split: Split
) -> tuple[Settings, StageReport, dict[str, float]]:
    """Read a result on the uploads of a run of this app.

    Returns:
        The settings that it was made with, without its tracker, which has had it already; what the server stage made;
        its seconds per phase.

    Raises:
        OptionError: It is not finished, of another run, or of another project.
        StoreError: The folder is no run folder, or damaged.
    """
    with RunFolder.open(folder, write=False) as opened:
        info, result = opened.info, opened.result()
        if Path(info.get("replay-of", folder)).resolve() != run.resolve() or is_foreign(info):
            raise OptionError(f"setting 'evaluate.results' names {folder}: must be {run} or a replay of it")
        if result is None or result["status"] != "finished":
            raise OptionError(f"setting 'evaluate.results' names {folder}, which is not finished: must have a result")
        settings = read_settings(overridden(info["settings"], {"tracker": "none"}))
        job = build_job(settings, split, images, data_seed=info.get("data-seed"))
        report = load_report(opened, replace(job, uploads=stored_uploads(run)))
    return settings, report, result["seconds"]
