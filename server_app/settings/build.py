"""From flat settings to what the server works with. Only here and in the two ``app.py`` do settings meet pieces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.config import AppConfig, shortened
from fl_app.data import Split
from fl_app.models import builders
from fl_app.models.uploaded import uploaded_builders
from fl_app.node_config import SUPERNODES_VARIABLE, refused_in_deployment
from server_app.iterating import check_iterative
from server_app.replay.forget import facts_of
from server_app.report.attack_success import check_attack, check_attackers
from server_app.report.evaluation import HeldOut
from server_app.report.gatekeeping import check_gatekeeper
from server_app.report.privacy import check_privacy, check_private_models
from server_app.settings.rehearsal import check_checkpoints, check_division
from server_app.settings.server_data import labelled_images, open_half, proxy_images
from strategies.compute import named
from strategies.compute.in_process import resolve_device
from strategies.core.errors import OptionError
from strategies.core.options import Option, Scalar, flatten, options_of, parse, reject_unknown
from strategies.gatekeeper.config import GatekeeperConfig
from strategies.method import METHODS, TALLY, Job, Method, Need, Normalization
from strategies.rounds.config import IterativeConfig
from strategies.rounds.refinement import Refiner
from strategies.run.stage import all_cores
from strategies.uploads.needs import check_needs, wants_label_counts

if TYPE_CHECKING:
    from strategies.flower.one_shot import OneShot
    from strategies.flower.rounds.iterative import Iterative

# For small data: there these values, tried out on digits, take seconds where DENSE's own take an hour, and FENS's a
# minute. FLBoost's, tried out on Fashion-MNIST, are for models as small as the main job's.
APP_DEFAULTS: Mapping[str, Scalar] = {
    "dense.epochs": 24,
    "dense.generator-steps": 10,
    "dense.generator-lr": 0.003,
    "dense.synthesis-batch-size": 64,
    "dense.batch-size": 32,
    "dense.kd-temperature": 4.0,
    "fens.rounds": 100,
    "fens.server-lr": 0.003,
    "flboost.adversarial-weight": 0.1,
    "flboost.generator-step": "joint",
    "flboost.generator-steps": 3,
    "flboost.student-lr": 0.05,
}


@dataclass(frozen=True)
class Settings:
    """Settings, read and checked.

    Attributes:
        app: The app's own, with the local epochs that ``scale`` leaves.
        method: The server method.
        method_config: The method's config, with the server epochs that ``scale`` leaves.
        refiner: What fine-tunes the model of every round, of a run in rounds that has one; with such epochs, too.
        flat: All of them as they were given, completed by the defaults.
        gatekeeper: What is done with uploads that look harmful.
    """

    app: AppConfig
    method: Method
    method_config: Any
    refiner: Refiner | None
    flat: Mapping[str, Scalar]
    gatekeeper: GatekeeperConfig

    @property
    def learner(self) -> Method:
        """The method that learns on the server: what refines the rounds, if there is such, else the method itself."""
        return self.method if self.refiner is None else self.refiner.method

    @property
    def options(self) -> dict[str, Scalar]:
        """The options of the method, and of what refines its rounds, by key."""
        refiner = {} if self.refiner is None else flatten(self.refiner.config, self.refiner.method.name)
        return {**flatten(self.method_config, self.method.name), **refiner}

    @property
    def scaled(self) -> dict[str, list[Scalar]]:
        """What ``scale`` shortens: key -> the number of epochs that was set, and the one that is run."""
        run = {**flatten(self.app), **self.options}
        return {key: [self.flat[key], value] for key, value in run.items() if value != self.flat[key]}


def default_settings() -> dict[str, Scalar]:
    """Return every key with its default: what pyproject.toml holds and bare ``flwr run .`` runs."""
    found = {**flatten(AppConfig()), **flatten(GatekeeperConfig(), "gatekeeper")}
    for name in METHODS:
        found.update(flatten(METHODS[name].config(), name))
    return {**found, **APP_DEFAULTS}


def known_options() -> list[Option]:
    """Return every option of the app, of its gatekeeper and of the methods."""
    own = options_of(AppConfig) + options_of(GatekeeperConfig, "gatekeeper")
    return own + [o for name in METHODS for o in options_of(METHODS[name].config, name)]


def read_settings(given: Mapping[str, Scalar]) -> Settings:
    """Check settings and read them.

    Args:
        given: Flat settings; absent keys have their default.

    Raises:
        OptionError: Names the key, the value and what is allowed.
    """
    reject_unknown(given, [o.key for o in known_options()])
    flat = {**default_settings(), **given}
    app = AppConfig.from_settings(flat)
    try:
        method = METHODS[app.method]
    except OptionError as error:
        raise OptionError(f"setting 'method': {error}") from error
    config = shortened(parse(method.config, flat, method.name), app.scale)
    gatekeeper = parse(GatekeeperConfig, flat, "gatekeeper")
    return Settings(app, method, config, _refiner(config, flat, app.scale), flat, gatekeeper)


def _refiner(config: Any, flat: Mapping[str, Scalar], scale: float) -> Refiner | None:
    name = config.refiner if isinstance(config, IterativeConfig) else "none"
    if name == "none":
        return None
    return Refiner(METHODS[name], shortened(parse(METHODS[name].config, flat, name), scale))


def held_out(settings: Settings) -> tuple[HeldOut, Split]:
    """Open the images that are kept from every client, and the facts of their data set.

    Raises:
        DataError: The data set is not there; says how to get it.
    """
    split = open_half(settings, "test")
    normalization = Normalization(*split.normalization)
    return HeldOut(split.take(), normalization), split


def build_job(settings: Settings, split: Split, observer: HeldOut | None, *, data_seed: int | None = None) -> Job:
    """Return the server's job, without uploads.

    Args:
        settings: The settings.
        split: The test half of the data set.
        observer: The held-out images.
        data_seed: The seed by which the training set was divided; None for that of the settings.

    Raises:
        OptionError: A setting does not fit the data set, or the method needs images that no setting names.
        DataError: These images are not there; says how to get them.
    """
    app = settings.app
    models = builders(split.num_classes, split.input_shape)
    for key, name in app.model.named():
        if name not in models:
            raise OptionError(
                f"setting {key!r} is {name!r}, which does not take images of shape {split.input_shape}: "
                f"must be {', '.join(models)}"
            )
    if app.data.law.startswith("classes") and app.data.classes_per_client > split.num_classes:
        raise OptionError(
            f"setting 'data.classes-per-client' is {app.data.classes_per_client}: must be at most "
            f"{split.num_classes}, the number of classes"
        )
    app.attack.check_classes(split.num_classes)
    check_private_models(settings, split)
    sent = uploaded_builders(settings.method.uploads, split.num_classes, split.input_shape, latent=app.client.latent)
    seed = app.seed if data_seed is None else data_seed
    return Job(
        uploads=(),
        builders={**models, **sent},
        student=app.model.of_student(),
        num_classes=split.num_classes,
        input_shape=split.input_shape,
        normalization=Normalization(*split.normalization),
        config=settings.method_config,
        seed=app.seed,
        threads=app.threads or all_cores(),
        device=app.device,
        proxy=proxy_images(settings, split.input_shape, seed),
        labelled=labelled_images(settings, seed),
        teacher=TALLY if app.teacher == TALLY else None,
        observer=observer,
    )


def check_needs_of_settings(settings: Settings) -> None:
    """Refuse, before any client is asked, settings whose uploads the method could do nothing with.

    Raises:
        OptionError: Names the setting, its value and what the method needs.
    """
    method, app = settings.method, settings.app
    if Need.SAME_ARCHITECTURE in method.needs and set(app.model.mix()) != {app.model.of_student()}:
        key, value = (
            ("model.per-client", app.model.per_client) if app.model.per_client else ("model.name", app.model.name)
        )
        raise OptionError(
            f"setting {key!r} is {value!r} and the student's architecture {app.model.of_student()!r}: allowed with "
            f"method {method.name!r} is one architecture for all"
        )
    check_privacy(settings)
    wanted = wants_label_counts(method, settings.method_config) and app.teacher != TALLY
    if wanted and not app.client.share_label_counts:
        raise OptionError(
            f"setting 'client.share-label-counts' is False: allowed with method {method.name!r} is True; it needs that "
            f"{Need.LABEL_COUNTS.value}"
        )
    check_attack(app.attack, method)
    check_gatekeeper(settings.gatekeeper, method, app.uploads)
    if app.teacher == "run":
        raise OptionError("setting 'teacher' is 'run': allowed in a replay, of a run that ended with an ensemble")
    if isinstance(settings.method_config, IterativeConfig):
        check_iterative(app, settings.method_config)
    if named(app.compute, app.shards) == "in-process":
        resolve_device(app.device)


def check_before_start(settings: Settings, num_supernodes: int) -> None:
    """Refuse, before any process is started, what the simulation would refuse half a minute later.

    Raises:
        OptionError: A setting does not fit the method, the data set or the number of clients.
        DataError: The data set is not there; says how to get it.
    """
    app = settings.app
    if app.min_uploads > num_supernodes:
        raise OptionError(
            f"setting 'min-uploads' is {app.min_uploads}: must be at most {num_supernodes}, the number of clients "
            "(--num-supernodes)"
        )
    check_attackers(app.attack, num_supernodes, app.client.nodes)
    check_needs_of_settings(settings)
    if not os.environ.get("RAY_ADDRESS"):  # a cluster may have what this machine lacks
        resolve_device(app.device)
    check_division(app, open_half(settings, "train"), num_supernodes)
    check_checkpoints(app, num_supernodes)
    job = build_job(settings, open_half(settings, "test"), None)
    check_needs(settings.method, job)
    if settings.refiner is not None:
        settings.refiner.check(job)


def build_strategy(settings: Settings, job: Job) -> OneShot | Iterative:
    """Return the Flower strategy of the configured method."""
    from strategies.flower.one_shot import OneShot
    from strategies.flower.rounds.iterative import Iterative  # late: a replay needs no Flower
    from strategies.flower.run import RunOptions

    app = settings.app
    if app.client.nodes and SUPERNODES_VARIABLE not in os.environ:
        raise OptionError(refused_in_deployment(app.client.nodes))
    run_dir = app.resume or app.run_dir
    if app.resume and not (Path(app.resume).expanduser() / "run.json").exists():
        raise OptionError(f"setting 'resume' is {app.resume!r}: must be the folder of a run (it holds run.json)")
    shared: dict[str, Any] = {
        "student": job.student,
        "num_classes": job.num_classes,
        "input_shape": job.input_shape,
        "normalization": job.normalization,
        "config": job.config,
        "compute": named(app.compute, app.shards),
        "run_dir": run_dir or None,
        "min_uploads": app.min_uploads,
        "seed": app.seed,
        "options": RunOptions(
            app.threads, app.device, app.max_upload_mib, app.checkpoint_s, settings.gatekeeper, app.teacher
        ),
        "proxy": job.proxy,
        "observer": job.observer,
        "facts": {
            "settings": dict(settings.flat),
            "num-supernodes": int(os.environ.get(SUPERNODES_VARIABLE, 0)),
            **({} if app.resume else facts_of(app.uploads, app.forget)),  # a run that goes on has them
        },
    }
    if Need.CLIENTS in settings.method.needs:
        return Iterative(job.builders, refiner=settings.refiner, **shared)
    return OneShot(settings.method, job.builders, **shared)
