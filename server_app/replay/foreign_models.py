"""Runs of another project: their models, built by that project's own code, and their job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fl_app.config import AppConfig
from fl_app.data import images_in
from fl_app.project import imported
from server_app.replay.request import Request
from server_app.settings.choices import CHOICES
from server_app.settings.read import Settings
from server_app.settings.settled import check_same_run
from strategies.core.errors import OptionError
from strategies.core.options import flatten, options_of, parse, reject_unknown
from strategies.gatekeeper.config import GatekeeperConfig
from strategies.method import Job
from strategies.run.identity import stored_normalization
from strategies.run.retired import without_retired
from strategies.run.stage import all_cores

# The settings of the app that a replay of another project's run takes, beside the seed.
OF_THE_APP = ("teacher", "teacher-run", "store-images", "data.proxy-file")


def of_the_app(app: AppConfig) -> dict[str, Any]:
    """Return the settings :data:`OF_THE_APP` of a replay."""
    return {key: value for key, value in flatten(app).items() if key in OF_THE_APP}


def foreign_models(text: str, student: str) -> dict[str, Callable[[], Any]]:
    """Import the models' builder: one callable for all, or a dict of architecture name -> callable.

    Args:
        text: ``module:attribute``; the module may lie in the current folder.
        student: The architecture of the result; a single callable builds this one.

    Raises:
        OptionError: The import fails, or the attribute is neither of the two.
    """
    found = imported(text, "--model")
    models = dict(found) if isinstance(found, Mapping) else {student: found}
    if student not in models or not all(map(callable, models.values())):
        raise OptionError(
            f"--model {text!r} is {type(found).__name__}: must be a callable that returns an nn.Module, "
            f"or a dict of architecture name -> callable with {student!r} among them"
        )
    return models


def foreign_job(request: Request, info: Mapping[str, Any]) -> tuple[Settings, Job]:
    """Return the settings of the method and the job, without uploads, of a run of another project.

    Args:
        request: Its model comes from that project's own code.
        info: The facts of the run, or of its resumed replay.

    Raises:
        DataError: The file of the server's images is missing or damaged.
        OptionError: The request names no method or no model, a setting is wrong, or the import fails.
    """
    name = request.method or (info["method"] if request.resume is not None else "")
    if not name or ":" not in request.model:
        raise OptionError(
            f"{request.run} is a run of another project: needs {'' if name else '--method and '}--model, as "
            "module:attribute that returns its nn.Module"
        )
    method = CHOICES[name]
    own, door = options_of(method.config, name), options_of(GatekeeperConfig, "gatekeeper")
    overrides = without_retired(request.overrides)
    reject_unknown(overrides, ["seed", *OF_THE_APP, *(o.key for o in own + door)])
    begun = begun_options(request, info)
    chosen = {**begun, **overrides}
    config: Any = parse(method.config, chosen, name)
    gatekeeper = flatten(parse(GatekeeperConfig, chosen, "gatekeeper"), "gatekeeper")
    said = {key: chosen[key] for key in OF_THE_APP if key in chosen}
    app = AppConfig.from_settings({"seed": request.overrides.get("seed", info["seed"]), **said})
    if request.resume is not None:
        now = {**flatten(config, name), **gatekeeper, "seed": app.seed, **of_the_app(app)}
        check_same_run({"settings": {**begun, "seed": info["seed"]}}, now)
    shape = tuple(info["input-shape"])
    job = Job(
        uploads=(),
        builders=foreign_models(request.model, info["student"]),
        student=info["student"],
        num_classes=info["num-classes"],
        input_shape=shape,
        normalization=stored_normalization(info),
        config=config,
        seed=app.seed,
        threads=all_cores(),
        proxy=images_in(app.data.proxy_file, shape) if app.data.proxy_file else None,
        store_images=app.store_images,
    )
    flat = {**flatten(app), **flatten(config, name), **gatekeeper}
    return Settings(app, method, config, None, flat, parse(GatekeeperConfig, chosen, "gatekeeper")), job


def begun_options(request: Request, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a replay of another project's run began with; empty for a new one."""
    return without_retired(info.get("options", {})) if request.resume is not None else {}
