"""Replay: runs any server method on the stored uploads of a run, without its clients."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from fl_app.data import Split
from server_app.replay.foreign_models import foreign_models
from server_app.replay.request import Request
from server_app.report.finish import bare_result, finish
from server_app.settings.build import build_job, held_out
from server_app.settings.choices import CHOICES
from server_app.settings.commit import commit_facts
from server_app.settings.held_out import HeldOut
from server_app.settings.read import Settings, read_settings, scaled_line
from server_app.settings.server_data import open_half
from server_app.settings.settled import check_same_run, check_settled
from strategies.compute import ServerCompute, choose, named
from strategies.core.errors import OneShotError, OptionError, StoreError
from strategies.core.options import flatten, options_of, parse, reject_unknown
from strategies.gatekeeper.config import GatekeeperConfig
from strategies.method import METHODS, TEACHERS, EnsembleSpec, Job, Method, Normalization, Upload
from strategies.rounds.config import NEEDS_CLIENTS, FederatedRounds
from strategies.run.quarantine import Door, guarded_replay
from strategies.run.retired import without_retired
from strategies.run.run_folder import RunFolder, default_run_dir, load_ensemble
from strategies.run.stage import CHECKPOINT_S, all_cores, kept_round, usable_uploads
from strategies.uploads.needs import check_needs, fitting

LEAST_UPLOADS = 2  # the least number that a replay of another project's run needs after its gatekeeper


def replay_run(request: Request, *, log: Callable[[str], None], compute: ServerCompute | None = None) -> dict[str, Any]:
    """Run the method, keep its result in a run folder of its own, and return the result.

    Args:
        request: The options of the replay.
        log: Takes a line for the user.
        compute: A place to run that no option names; None for the place in the request.

    Raises:
        OptionError: A setting is wrong, or the run's models cannot be built.
        StoreError: A folder is not of the expected kind, or an upload is damaged.
    """
    began = time.monotonic()
    info = _begun(request) or _source(request)
    settings, images, job = _prepared(request, info)
    name = settings.method.name if settings is not None else request.method or info["method"]
    method = _method(name, request, job)
    door = _door(request, settings, info, log)
    with _target(request, {**info, **_facts(settings, name, job, door)}) as target:
        if (done := target.result()) is not None and done["status"] == "finished":
            return done
        log(f"replay of {request.run}; its folder is {target.path}")
        if settings is not None and settings.scaled:
            log(f"scaled: {scaled_line(settings.scaled)}")
        try:
            report = guarded_replay(
                door,
                method,
                job,
                request.run,
                compute=compute or choose(named(request.compute, 0 if settings is None else settings.app.shards)),
                target=target,
                checkpoint_s=settings.app.checkpoint_s if settings is not None else CHECKPOINT_S,
            )
        except KeyboardInterrupt:
            model = f" --model {request.model}" if request.model else ""
            log(f"interrupted. To resume: oneshot replay {request.run} --resume {target.path}{model}")
            raise
        except OneShotError:
            if request.resume is None:
                _remove_unbegun(target)
            raise
        seconds = {"server": report.seconds, "app": time.monotonic() - began}
        if settings is None or images is None:
            result = bare_result(target, name, report, seconds)
        else:
            result = finish(target, settings, report, images, seconds=seconds, log=log, kept=request.kept)
        # No Flower starts before a replay: the time of this process is the total.
        result["seconds"]["total"] = result["seconds"].pop("app")
        target.write_result(result)
        return result


def check_replay(request: Request) -> str:
    """Refuse a replay with invalid settings, or one resumed under other settings than it began with.

    Returns:
        What sets its result apart from others in tables, :attr:`strategies.method.Method.mark`.

    Raises:
        OptionError: A setting is wrong or differs, or the run's models cannot be built.
        StoreError: A folder is not of the expected kind.
    """
    info = _begun(request) or _source(request)
    if (settings := _settings(request, info)) is None:
        job = _foreign_job(request, info)
        return METHODS[request.method or info["method"]].mark(job.config)
    return settings.method.mark(settings.method_config) if isinstance(settings.method, Method) else ""


def unmet_need(request: Request) -> str:
    """Return the method's need that the run does not meet (label counts, real images), in one line, else "".

    Raises:
        OptionError: A setting is wrong.
        StoreError: The folder holds no uploads, or a damaged one.
    """
    info = _source(request)
    check_replay(request)
    uploads = _uploads(request)
    try:
        settings = _settings(request, info)
        job = (
            _foreign_job(request, info) if settings is None else _job(settings, open_half(settings, "test"), None, info)
        )
        check_needs(_method(request.method or info["method"], request, job), replace(job, uploads=uploads))
    except OptionError as error:
        return str(error)
    return ""


def _method(name: str, request: Request, job: Job) -> Method:
    """Return the method of a replay.

    Raises:
        OptionError: The method is federated learning in rounds.
    """
    method = CHOICES[name]
    if isinstance(method, FederatedRounds):
        raise OptionError(
            f"method {method.name!r} needs that {NEEDS_CLIENTS}: run it with 'oneshot run', or choose another "
            f"method: {fitting(replace(job, uploads=_uploads(request)))}"
        )
    return method


def _uploads(request: Request) -> tuple[Upload, ...]:
    with RunFolder.open(request.run, write=False) as run:
        return usable_uploads(run.round(max(1, kept_round(run))))


def _prepared(request: Request, info: Mapping[str, Any]) -> tuple[Settings | None, HeldOut | None, Job]:
    """Return settings, held-out images and job; for a run of another project, the first two are None."""
    settings = _settings(request, info)
    if settings is None:
        return None, None, _foreign_job(request, info)
    images, split = held_out(settings)
    return settings, images, _job(settings, split, images, info)


def _job(settings: Settings, split: Split, images: HeldOut | None, info: Mapping[str, Any]) -> Job:
    # A replay may have another seed, but the clients' images are those of the run.
    job = build_job(settings, split, images, data_seed=info.get("data-seed"))
    return _taught(job, settings.app, info)


def _taught(job: Job, app: AppConfig, info: Mapping[str, Any]) -> Job:
    if app.teacher == "run":
        return replace(job, teacher=_ensemble_of(Path(info["replay-of"]), job))
    return replace(job, teacher=app.teacher if app.teacher in TEACHERS else None)


def _ensemble_of(run: Path, job: Job) -> EnsembleSpec:
    """Return the ensemble that a run ended with."""
    try:
        return load_ensemble(run, job.builders)[0]
    except StoreError as error:
        raise OptionError(f"setting 'teacher' is 'run': needs a run that ended with an ensemble; {error}") from error


def _source(request: Request) -> dict[str, Any]:
    """Return the facts of the run of the uploads, for its replay."""
    with RunFolder.open(request.run, write=False) as run:
        info, held = run.info, run.round(max(1, kept_round(run))).held()
    if not held:
        other = f": it is a replay of {info['replay-of']}" if "replay-of" in info else ""
        raise StoreError(f"{request.run} holds no uploads{other}; must be a run folder with at least one")
    kept = {
        key: value
        for key, value in info.items()
        if key not in ("id", "created", "pid", "versions", "commit", "gatekeeper.policy", "teacher")
    }
    return {**kept, "replay-of": str(request.run.resolve()), "data-seed": info["seed"]}


def _begun(request: Request) -> dict[str, Any] | None:
    """Return the facts of the replay to resume, None for a new one."""
    if request.resume is None:
        return None
    with RunFolder.open(request.resume, write=False) as target:
        info = target.info
    source, method = info.get("replay-of"), info.get("method")
    if source != str(request.run.resolve()) or request.method not in ("", method):
        wanted = f" with method {request.method!r}" if request.method else ""
        raise StoreError(
            f"{request.resume} is no replay of {request.run}{wanted}: it is one of {source or 'no run'} with {method!r}"
        )
    return info


def _settings(request: Request, info: Mapping[str, Any]) -> Settings | None:
    """Return the settings of a run of this app, or of its resumed replay; None for a run of another project."""
    stored = info.get("settings")
    if not isinstance(stored, dict):
        return None
    wanted = {**({"method": request.method} if request.method else {}), **request.overrides}
    # The run's own method may have had a teacher that this method does not accept.
    if request.method in METHODS and stored.get("teacher") not in METHODS[request.method].teachers:
        wanted = {"teacher": "method", **wanted}
    settings = read_settings({**stored, "resume": "", "run-dir": "", **wanted})
    if request.resume is not None:
        check_same_run(info, settings.flat)
    else:
        check_settled(stored, settings)
    return settings


def _facts(settings: Settings | None, name: str, job: Job, door: Door) -> dict[str, Any]:
    facts = {"method": name, "seed": job.seed, "threads": job.threads, "student": job.student, **commit_facts()}
    if settings is None:
        taught = {"teacher": "run" if isinstance(job.teacher, EnsembleSpec) else job.teacher or "method"}
        return {**facts, "options": {**flatten(job.config, name), **flatten(door.config, "gatekeeper"), **taught}}
    return {**facts, "settings": dict(settings.flat)}


def _door(request: Request, settings: Settings | None, info: Mapping[str, Any], log: Callable[[str], None]) -> Door:
    if settings is not None:
        return Door(settings.gatekeeper, settings.app.min_uploads, log)
    chosen = {**_begun_options(request, info), **request.overrides}
    return Door(parse(GatekeeperConfig, chosen, "gatekeeper"), LEAST_UPLOADS, log)


def _begun_options(request: Request, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a replay of another project's run began with; empty for a new one."""
    return without_retired(info.get("options", {})) if request.resume is not None else {}


def _target(request: Request, info: Mapping[str, Any]) -> RunFolder:
    if request.resume is not None:
        return RunFolder.open(request.resume)
    beside = request.run.absolute().parent
    return RunFolder.create(request.folder or default_run_dir("", f"replay-{info['method']}", parent=beside), info)


def _remove_unbegun(target: RunFolder) -> None:
    """Remove the folder of a replay that was refused before its first epoch, and so cannot be resumed."""
    work = target.round(1)
    epochs = any("epoch" in row for row in work.metrics())
    if work.load_checkpoint() is None and not epochs and not kept_round(target):
        shutil.rmtree(target.path)


def _foreign_job(request: Request, info: Mapping[str, Any]) -> Job:
    """Return the job for a run of another project: its model comes from that project's own code."""
    name = request.method or (info["method"] if request.resume is not None else "")
    if not name or ":" not in request.model:
        raise OptionError(
            f"{request.run} is a run of another project: needs {'' if name else '--method and '}--model, as "
            "module:attribute that returns its nn.Module"
        )
    method = CHOICES[name]
    own, door = options_of(method.config, name), options_of(GatekeeperConfig, "gatekeeper")
    overrides = without_retired(request.overrides)
    reject_unknown(overrides, ["seed", "teacher", *(o.key for o in own + door)])
    begun = _begun_options(request, info)
    chosen = {**begun, **overrides}
    config: Any = parse(method.config, chosen, name)
    gatekeeper = flatten(parse(GatekeeperConfig, chosen, "gatekeeper"), "gatekeeper")
    said = {"seed": request.overrides.get("seed", info["seed"]), "teacher": chosen.get("teacher", "method")}
    app = AppConfig.from_settings(said)
    if request.resume is not None:
        now = {**flatten(config, name), **gatekeeper, "seed": app.seed, "teacher": app.teacher}
        check_same_run({"settings": {**begun, "seed": info["seed"]}}, now)
    shape = tuple(info["input-shape"])
    halves = (0.5,) * shape[0]
    mean, std = info.get("normalization", (halves, halves))
    job = Job(
        uploads=(),
        builders=foreign_models(request.model, info["student"]),
        student=info["student"],
        num_classes=info["num-classes"],
        input_shape=shape,
        normalization=Normalization(tuple(mean), tuple(std)),
        config=config,
        seed=app.seed,
        threads=all_cores(),
    )
    return _taught(job, app, info)
