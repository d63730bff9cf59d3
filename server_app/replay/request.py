"""What a replay is asked for, and runs of another project: their models, built by its own code, and their job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fl_app.config import AppConfig
from fl_app.data import images_in
from fl_app.project import FAILURES, imported, one_line
from server_app.settings.checks import check_same_run
from server_app.settings.choices import CHOICES, Choice
from server_app.settings.read import Settings, known_settings
from strategies.core.errors import OneShotError, OptionError, StoreError, shorten_list
from strategies.core.facts import ADAPTER, CLASSIFIER, kind_of
from strategies.core.fingerprint import weights_sha256
from strategies.core.options import Scalar, flatten, options_of, parse, reject_unknown
from strategies.core.places import expand_user
from strategies.core.seeds import seeded_torch
from strategies.method import METHODS, TEACHERS, Job, Upload
from strategies.run.run_folder import RunFolder, StoredWeights, load_ensemble, stored_normalization
from strategies.run.stage import last_round, usable_uploads
from strategies.uploads.builders import check_described, check_student, named_builders
from strategies.uploads.checks import Signatures, check_upload
from strategies.uploads.tensors import tensor_form

if TYPE_CHECKING:
    from strategies.method import State


@dataclass(frozen=True)
class ReplayRequest:
    """The options of a replay.

    Attributes:
        method: The server method; empty for the run's own.
        model: ``module:attribute`` that builds the models of another project's run.
        evaluate: ``module:attribute`` that returns a model's accuracy, for another project's run; empty for no scores.
        folder: The run folder of a new replay; None for one beside the run.
        kept: The file of the scores that replays of the same uploads share; None for no file.
    """

    run: Path
    method: str
    overrides: Mapping[str, Scalar]
    resume: Path | None = None
    model: str = ""
    evaluate: str = ""
    compute: str = "in-process"
    folder: Path | None = None
    kept: Path | None = None


def is_foreign(info: Mapping[str, Any]) -> bool:
    """Return whether a run is another project's: its run.json has no settings of this app."""
    return not isinstance(info.get("settings"), dict)


def stored_uploads(run: Path) -> tuple[Upload, ...]:
    """Return the uploads that a replay of a run works with.

    Raises:
        StoreError: The folder is no run folder, or an upload is damaged.
    """
    with RunFolder.open(run, write=False) as folder:
        return usable_uploads(last_round(folder))


def upload_of_each(run: Path) -> dict[str, State]:
    """Return the weights of one stored upload per architecture; all of one have the same names and shapes."""
    with RunFolder.open(run, write=False) as folder:
        # To read and compare all of them takes long, and the server stage does it anyway.
        found = last_round(folder).one_of_each()
    return {upload.architecture: upload.read() for upload in found}


def taught(job: Job, app: AppConfig, info: Mapping[str, Any]) -> Job:
    """Return the job of a replay with the teacher that its settings name.

    Raises:
        OptionError: The run ended without an ensemble, or the named one is of other models.
    """
    if app.teacher != "run":
        return replace(job, teacher=app.teacher if app.teacher in TEACHERS else None)
    run = Path(info["replay-of"])
    try:
        spec, members = load_ensemble(expand_user(app.teacher_run) if app.teacher_run else run, job.builders)
    except StoreError as error:
        raise OptionError(f"setting 'teacher' is 'run': needs a run that ended with an ensemble; {error}") from error
    if app.teacher_run:
        _check_members(app.teacher_run, members, run)
    return replace(job, teacher=spec)


def _check_members(named: str, members: tuple[Upload, ...], run: Path) -> None:
    """Refuse an ensemble of other models than a run's."""
    own = {upload.client: upload for upload in stored_uploads(run)}
    # The head of a client that uploaded sums has weights of its own.
    others = [
        one.client
        for one in members
        if one.client not in own
        or (own[one.client].architecture == one.architecture and _digest(own[one.client]) != _digest(one))
    ]
    if others:
        raise OptionError(
            f"setting 'teacher-run' is {named!r}, whose ensemble has models that {run} does not hold, of "
            f"{shorten_list(others)}: must be a replay of that run"
        )


def _digest(upload: Upload) -> str:
    return upload.read.sha256 if isinstance(upload.read, StoredWeights) else weights_sha256(upload.read())


# The settings of the app that a replay of another project's run takes, beside the seed.
OF_THE_APP = ("preset", "teacher", "teacher-run", "store-images", "data.proxy-file", "gatekeeper.policy")


def of_the_app(app: AppConfig) -> dict[str, Any]:
    """Return the settings :data:`OF_THE_APP` of a replay."""
    return {key: value for key, value in flatten(app).items() if key in OF_THE_APP}


def foreign_models(text: str, info: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Import the models' builder: one callable for all, or a dict of architecture name -> callable.

    Args:
        text: ``module:attribute``; the module may lie in the current folder.
        info: The content of the run's run.json; a single callable builds the architecture of its result.

    Raises:
        OptionError: The import fails, or the attribute is neither of the two.
    """
    student, shape = info["student"], info["input-shape"] if info["num-classes"] else None
    found = imported(text, "--model")
    with _naming(text):
        models = named_builders(found if isinstance(found, Mapping) else {student: found}, shape)
        if student not in models:
            raise OptionError(f"it builds {', '.join(map(str, models))}: must build {student!r} too, the run's student")
    return models


def check_models(
    text: str, job: Job, stored: Mapping[str, State], answering: Collection[str], *, trained: bool = False
) -> None:
    """Refuse models that stored weights do not fit, or that do not map examples to logits, before any work.

    Args:
        text: What :func:`foreign_models` imported, for the errors.
        job: Its builders and its shapes; an architecture that it does not build is left unchecked.
        stored: Architecture -> weights that a model of it has to take.
        answering: The architectures whose models map examples [B, *input_shape] to logits [B, C].
        trained: Whether the student is to be trained.

    Raises:
        OptionError: A model cannot be built, or is of another project than the weights; in one line.
    """
    for name in job.builders:
        if name in stored or name in answering:
            with _naming(text):
                _check_model(name, job, stored.get(name))
                if name in answering:
                    trains = trained and name == job.student
                    check_student(replace(job, student=name), trained=trains, trained_by_clients=name in stored)


def answering_of(method: Choice, student: str, stored: Collection[str]) -> set[str]:
    """Return the architectures whose models answer with logits where a method works on stored uploads of these."""
    classifiers = {*stored, student} if method.uploads == CLASSIFIER else set[str]()
    students = {student} if method.kind == "student" else set[str]()
    return {name for name in classifiers | students if kind_of(name) == CLASSIFIER}


def _check_model(name: str, job: Job, weights: State | None) -> None:
    with seeded_torch(0, "check"):
        model = job.builders[name]()
    if not isinstance(model, nn.Module):
        raise OptionError(f"architecture {name!r} builds {type(model).__name__}: must be an nn.Module")
    if weights is not None:
        check_upload(weights, name, Signatures({name: lambda: model})[name], tensor_form("stored tensors", exact=False))


@contextmanager
def _naming(text: str) -> Iterator[None]:
    """Name --model in every error of a block, in one line; those of the project's own code become such errors."""
    try:
        yield
    except OneShotError as error:
        raise OptionError(f"--model {text!r}: {' '.join(str(error).split())}") from error
    except FAILURES as error:
        raise OptionError(f"--model {text!r} fails: {one_line(error)}") from error


def foreign_job(request: ReplayRequest, info: Mapping[str, Any]) -> tuple[Settings, Job]:
    """Return the settings of the method and the job, without uploads, of a run of another project.

    Raises:
        DataError: The file of the server's images is missing or damaged.
        OptionError: The request names no method or no model, a setting is wrong, the import fails, or the models are
            not those of the run's uploads.
        StoreError: The run's folder or an upload is damaged.
    """
    settings, job = _foreign_job(request, info)
    if job.student == ADAPTER:  # adapters, which merge without their base
        check_described(METHODS[settings.choice.name], None, None)
        return settings, job
    stored = upload_of_each(request.run)
    answering, trained = answering_of(settings.choice, job.student, stored), settings.choice.kind == "student"
    if not job.num_classes:  # its server merged weights alone
        check_described(METHODS[settings.choice.name], None, None)
        answering = set()
    check_models(request.model, job, stored, answering, trained=trained)
    return settings, job


def _no_module() -> nn.Module:
    raise OptionError("the uploads are LoRA adapters, which no module holds: load the merged folder with PeftModel")


def _foreign_job(request: ReplayRequest, info: Mapping[str, Any]) -> tuple[Settings, Job]:
    name = request.method or (info["method"] if request.resume is not None else "")
    adapters = info["student"] == ADAPTER
    if not name or (":" not in request.model and not adapters):
        raise OptionError(
            f"{request.run} is a run of another project: needs {'' if name else '--method and '}--model, as "
            "module:attribute that returns its nn.Module"
        )
    method = CHOICES[name]
    reject_unknown(request.overrides, ["seed", *OF_THE_APP, *(o.key for o in options_of(method.config, name))])
    begun = known_settings(info.get("options", {}), name) if request.resume is not None else {}
    chosen = {**begun, **request.overrides}
    said = {key: chosen[key] for key in OF_THE_APP if key in chosen}
    app = AppConfig.from_settings({"seed": request.overrides.get("seed", info["seed"]), **said})
    config: Any = parse(method.config, chosen, name, app.preset)
    if request.resume is not None:
        now = {**flatten(config, name), "seed": app.seed, **of_the_app(app)}
        check_same_run({"settings": {**begun, "seed": info["seed"]}}, now)
    shape = tuple(info["input-shape"])
    job = Job(
        uploads=(),
        builders={ADAPTER: _no_module} if adapters else foreign_models(request.model, info),
        student=info["student"],
        num_classes=info["num-classes"],
        input_shape=shape,
        normalization=stored_normalization(info),
        config=config,
        seed=app.seed,
        clients_seed=app.seed if adapters else None,  # they started from their base, with B = 0
        threads=0,
        proxy=images_in(app.data.proxy_file, shape) if app.data.proxy_file else None,
        store_images=app.store_images,
    )
    return Settings(app, method, config, None, {**flatten(app), **flatten(config, name)}), job
