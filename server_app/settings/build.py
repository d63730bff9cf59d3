"""Builds the server's objects from settings; no file but this and the two ``app.py`` does so."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.config import AppConfig
from fl_app.data import Split, check_request, clients_share, half_of
from fl_app.models import ARCHITECTURES, HEAD_FORM, USERS_FORM, known_name
from fl_app.models.feature_heads import feature_builders, of_backbone
from fl_app.models.features import FeatureFunction
from fl_app.models.huggingface import folder_digest, is_folder
from fl_app.models.uploaded import model_builders, uploaded_builders
from fl_app.node_config import (
    SUPERNODES_VARIABLE,
    checkpoint_path,
    client_name,
    read_nodes,
    refused_in_deployment,
    simulated_nodes,
)
from fl_app.project import own_scores, own_training
from server_app.settings.checks import (
    check_attackers,
    check_halves,
    check_needs_of_settings,
    check_own_training,
    check_private_models,
    check_tracker,
)
from server_app.settings.commit import commit_facts
from server_app.settings.read import Settings, forgotten
from server_app.settings.server_data import HeldOut, OwnScores, Scorer, labelled_images, open_half, proxy_images
from strategies.compute import place_name
from strategies.core.clients import FOLDER_KEY
from strategies.core.errors import OptionError
from strategies.core.facts import CVAE, HEAD, PROTOTYPES, STATISTICS, backbone_in, holds_images
from strategies.core.gpu import resolve_device
from strategies.core.options import listed, meant
from strategies.core.places import expand_user
from strategies.core.scan import LOG
from strategies.core.seeds import seeded_torch
from strategies.core.stage_options import StageOptions
from strategies.method import TEACHERS, Job
from strategies.run import FACTS_FILE, is_run_folder
from strategies.run.run_folder import RunFolder
from strategies.uploads.needs import check_needs

if TYPE_CHECKING:
    from strategies.flower.one_shot import OneShot
    from strategies.flower.rounds.iterative import Iterative
    from strategies.method import ModelBuilder


DEFAULT_SUPERNODES = 5


def number_of_clients(app: AppConfig) -> int:
    """Return the number of simulated clients if no option gives one.

    Raises:
        OptionError: "client.nodes" holds no valid nodes; see :func:`fl_app.node_config.read_nodes`.
    """
    return len(read_nodes(Path(app.client.nodes))) if app.client.nodes else DEFAULT_SUPERNODES


def check_division(app: AppConfig, train: Split, num_supernodes: int) -> None:
    """Refuse a number of clients or a division of the data that is impossible, before half a minute of start-up.

    Args:
        train: The training half of the data set. Nodes with a data root of their own have other images, which are not
            read.

    Raises:
        OptionError: The training set cannot be divided so, "client.nodes" has fewer nodes, or one of them is invalid.
    """
    app.data.check_holders(by_client=train.by_client)
    shared = clients_share(train, seed=app.seed, limit=app.data.limit, proxy=app.data.proxy)
    for num_clients in sorted(_divisions(app, num_supernodes)):
        if num_clients > len(shared):
            raise OptionError(
                f"--num-supernodes is {num_clients}: must be at most {len(shared)}, one training image per client"
            )
        check_request(
            train.labels[shared].numpy(),
            app.data,
            num_clients=num_clients,
            num_classes=train.num_classes,
            domains=None if train.domains is None else train.domains[shared].numpy(),
        )


def check_checkpoints(app: AppConfig, num_supernodes: int) -> None:
    """Refuse a run without uploads in which fewer than "min-uploads" clients train a model or find theirs."""
    if app.resume or app.uploads:
        return
    paths = [  # None: of a client that trains
        checkpoint_path(
            facts.get("checkpoint") or app.client.checkpoint,
            client=client_name(facts),
            partition_id=facts.get("partition-id", 0),
        )
        for facts in simulated_nodes(app.client.nodes, num_supernodes)
    ]
    missing = [file for path in paths if path is not None and not (file := expand_user(path)).is_file()]
    if num_supernodes - len(missing) < app.min_uploads:
        raise OptionError(
            f"{len(missing)} of the {num_supernodes} clients' checkpoints are missing, {missing[0]} is the first "
            f"('client.checkpoint'): at least {app.min_uploads} clients ('min-uploads') must have a model"
        )


def _divisions(app: AppConfig, num_supernodes: int) -> set[int]:
    nodes = simulated_nodes(app.client.nodes, num_supernodes)
    if num_supernodes > len(nodes):
        raise OptionError(
            f"--num-supernodes is {num_supernodes}: must be at most {len(nodes)}, the nodes of {app.client.nodes}"
        )
    found = set()
    for number, facts in enumerate(nodes):
        where = f"client.nodes: node {facts.get('client', number)}"
        name, part, parts = (facts.get(key) for key in ("architecture", "partition-id", "num-partitions"))
        if name and not known_name(name, sums=True):
            forms = f"{', '.join(ARCHITECTURES)}, {HEAD_FORM}, {USERS_FORM}"
            raise OptionError(f"{where}: architecture is {name!r}: must be {forms}")
        if part is not None and not 0 <= part < (parts or 1):
            raise OptionError(f"{where}: partition-id is {part}: must be 0 to {(parts or 1) - 1}")
        if part is not None and "data-root" not in facts:
            found.add(parts or 1)
    return found


def held_out(settings: Settings, split: Split | None = None) -> tuple[Scorer | None, Split]:
    """Open the held-out images, which no client holds, and the facts of their data set.

    Args:
        split: The test half, where it is open; None to open it.

    Returns:
        None in place of the images where the server has none, or where results are not scored on them; the user's own
        function on these examples where ``model.evaluate`` names one.

    Raises:
        DataError: The data set is missing; the error names the remedy.
    """
    split = open_half(settings, "test") if split is None else split
    if where_scored(settings, has_examples=bool(len(split.labels))) in ("clients", "none"):
        return None, split
    half = half_of(split.labels, settings.app.data.held_out, split.groups)
    if name := settings.app.model.evaluate:
        scored = partial(own_scores(name), data=split.pairs(half))
        return OwnScores(name, scored, option="model.evaluate", left_out=LOG.warning), split
    functions = functions_of(settings, split)
    groups = None if split.groups is None else split.groups[half].numpy()
    data = split.take(half)
    found = HeldOut(data, split.normalization, None, functions, split.classes, groups, settings.app.metric)
    return found, split


def where_scored(settings: Settings, *, has_examples: bool) -> str:
    """Return where a result is scored: ``"server"``, ``"clients"``, ``"both"`` or ``"none"``.

    Raises:
        OptionError: The setting needs examples that the server lacks, or clients that are not asked.
    """
    on, app = settings.app.evaluate.on, settings.app
    if app.model.train and not app.model.evaluate:
        if on not in ("auto", "none"):
            raise OptionError(
                f"setting 'evaluate.on' is {on!r}: must be 'none' or 'auto' with 'model.train', or 'model.evaluate' "
                "must name a function that scores such models"
            )
        on = "none"
    if on == "auto":
        on = "server" if has_examples else "clients"
    if on in ("server", "both") and not has_examples:
        raise OptionError(
            f"setting 'evaluate.on' is {on!r}: must be 'clients', 'none' or 'auto' on a server without examples"
        )
    if on in ("clients", "none") and app.data.held_out != "all":
        raise OptionError(
            f"setting 'data.held-out' is {app.data.held_out!r}: must be 'all' where the server scores no result "
            f"('evaluate.on' {app.evaluate.on!r})"
        )
    beside = "'privacy.epsilon', because scores carry no noise" if app.privacy.on else "method 'iterative'"
    if on in ("clients", "both") and (app.privacy.on or settings.method is None):
        meant = f", which means {on!r} here" * (app.evaluate.on == "auto")
        raise OptionError(
            f"setting 'evaluate.on' is {app.evaluate.on!r}{meant}: must be 'server' or 'none' with {beside}"
        )
    return on


def functions_of(settings: Settings, split: Split) -> tuple[FeatureFunction, ...]:
    """Return the feature functions of the run's heads and sums, one per backbone, without their projection."""
    app = settings.app
    names = dict.fromkeys(backbone_in(name) or app.features.backbone for name in app.model.on_features())
    own = {app.features.backbone: None} if settings.choice.uploads == STATISTICS else {}
    function = FeatureFunction(app.features, 0, *split.normalization)
    return tuple(of_backbone(function.whole, name) for name in {**own, **names})


def build_job(settings: Settings, split: Split, observer: Scorer | None, *, data_seed: int | None = None) -> Job:
    """Return the server's job, without uploads.

    Args:
        data_seed: The seed that divided the training set; None for the seed of the settings.

    Raises:
        OptionError: A setting does not fit the data set, or the method needs images that no setting names.
        DataError: These images are missing; the error names the remedy.
    """
    app = settings.app
    check_tracker(app.tracker)
    check_own_training(settings)
    of_sums = settings.choice.uploads == STATISTICS
    seed = app.seed if data_seed is None else data_seed
    function = FeatureFunction(app.features, seed, *split.normalization)
    for name in [*([""] if of_sums else []), *map(backbone_in, app.model.on_features())]:
        of_backbone(function, name).check(split, app.data.name)
    if of_sums:
        function.check_size(split.num_classes, settings.choice.name, app.max_upload_mib)
    models, student = architectures(settings, split, function)
    app.attack.check_classes(split.num_classes)
    if not holds_images(split.input_shape):
        app.check_imageless()
    if settings.choice.uploads in (PROTOTYPES, CVAE) or app.attack.kind == "backdoor":
        split.check_pixels(app.data.name)
    check_private_models(settings, split)
    return Job(
        uploads=(),
        builders=models,
        student=student,
        num_classes=0 if app.model.train else split.num_classes,  # only weights are merged
        input_shape=split.input_shape,
        normalization=split.normalization,
        config=settings.method_config,
        seed=app.seed,
        clients_seed=seed,
        threads=app.threads,
        device=app.device,
        proxy=proxy_images(settings, split.input_shape, seed),
        labelled=labelled_images(settings, seed),
        teacher=app.teacher if app.teacher in TEACHERS else None,
        observer=observer,
        store_images=app.store_images,
        agreement=split.agreement,
    )


def architectures(
    settings: Settings, split: Split, function: FeatureFunction
) -> tuple[Mapping[str, ModelBuilder], str]:
    """Return a builder of every architecture of a run, by name, and the name of the student's.

    Raises:
        OptionError: A setting names an architecture that does not take the data set's examples.
    """
    app, of_sums = settings.app, settings.choice.uploads == STATISTICS
    models = _models_of(app, split, function, used=not of_sums)
    if app.model.train:  # its outputs may be anything
        return models, app.model.of_student()
    sent = uploaded_builders(
        settings.choice.uploads,
        split.num_classes,
        split.input_shape,
        latent=app.client.latent,
        blocks=app.client.blocks,
        sums=partial(function.sums, split.num_classes, app.privacy.noise, settings.choice.name),
        own=app.model.own(),
        normalization=split.normalization,
    )
    heads = feature_builders([f"{HEAD}{app.features.backbone}"] if of_sums else [], function, split.num_classes)
    return {**models, **sent, **heads}, next(iter(heads), app.model.of_student())


def _models_of(app: AppConfig, split: Split, function: FeatureFunction, *, used: bool) -> Mapping[str, ModelBuilder]:
    """Return the architectures that take the data set's images; refuse settings that name and use others."""
    named, noise = (*app.model.own(), *app.model.heads(app.features.backbone)), app.privacy.noise
    models = model_builders(
        split.num_classes, split.input_shape, named, function, noise=noise, logits=not app.model.train
    )
    for key, name in app.model.named() if used else ():
        if name not in models:
            raise OptionError(
                f"setting {key!r} is {name!r}, which does not take examples of shape {split.input_shape} in "
                f"{split.num_classes} classes: must be {', '.join(models)}"
            )
    if app.data.partition.startswith("classes") and app.data.classes_per_client > split.num_classes:
        raise OptionError(
            f"setting 'data.classes-per-client' is {app.data.classes_per_client}: must be at most "
            f"{split.num_classes}, the number of classes"
        )
    return models


def _check_simulated_device(name: str) -> None:
    if name.startswith("cuda:"):
        raise OptionError(
            f"setting 'client.device' is {name!r}: must be auto, cpu or cuda in a simulation: a client sees one GPU"
        )
    resolve_device(name, "'client.device'")


def check_before_start(settings: Settings, num_supernodes: int) -> None:
    """Refuse settings before any process starts, instead of half a minute later in the simulation.

    Raises:
        OptionError: A setting does not fit the method, the data set or the number of clients.
        DataError: The data set is missing; the error names the remedy.
    """
    app = settings.app
    if app.min_uploads > num_supernodes:
        raise OptionError(
            f"setting 'min-uploads' is {app.min_uploads}: must be at most {num_supernodes}, the number of clients "
            "(--num-supernodes)"
        )
    check_attackers(app.attack, num_supernodes, app.client.nodes)
    check_needs_of_settings(settings)
    if not os.environ.get("RAY_ADDRESS"):  # a cluster may have the GPU that this machine lacks
        resolve_device(app.device)
    if not app.uploads:  # of another run, whose clients have trained
        _check_simulated_device(app.client.device)
    test = open_half(settings, "test")
    where_scored(settings, has_examples=bool(len(test.labels)))
    nodes = simulated_nodes(app.client.nodes, num_supernodes)
    # Else the server may lack training examples, too.
    if len(test.labels) or not all("data-root" in facts for facts in nodes):
        train = open_half(settings, "train")
        check_division(app, train, num_supernodes)
        check_halves(app.data.name, train, test)
    check_checkpoints(app, num_supernodes)
    job = build_job(settings, test, None)
    if settings.method is not None:
        check_needs(settings.method, job)
    if settings.refiner is not None:
        settings.refiner.check(job)
    if app.model.train:
        own_training(app.model.train)
    scorer, _ = held_out(settings, test) if app.model.evaluate else (None, test)
    if isinstance(scorer, OwnScores):  # a function that fails is refused before a client trains
        odd = list[str]()  # which an untrained model may score
        with seeded_torch(0, "check"):
            found = replace(scorer, left_out=odd.append).asked(job.builders[job.student]())
        if app.metric not in ("accuracy", *found) and not odd:
            raise OptionError(
                f"setting 'metric' is {app.metric!r}: must be one of {', '.join(found)}, which {scorer.what} returns"
                f"{meant(app.metric, found)}"
            )


def folder_digests(settings: Settings) -> dict[str, str]:
    """Return the digest of each folder of Hugging Face that is a client's model, for the requests to train."""
    folders = filter(is_folder, (*settings.app.model.mix(), *listed(settings.app.model.accepted)))
    return {f"{FOLDER_KEY}{name}": folder_digest(name) for name in folders}


def build_strategy(settings: Settings, job: Job) -> OneShot | Iterative:
    """Return the Flower strategy of the configured method."""
    from strategies.flower.one_shot import OneShot
    from strategies.flower.rounds.iterative import Iterative  # late: a replay needs no Flower
    from strategies.flower.run import RunOptions

    app = settings.app
    if app.client.nodes and SUPERNODES_VARIABLE not in os.environ:
        raise OptionError(refused_in_deployment(app.client.nodes))
    run_dir = app.resume or app.run_dir
    # Every CVAE sends a decoder of one architecture, whatever its encoder.
    accepted = "" if settings.choice.uploads == CVAE else app.model.accepted
    if app.resume and not is_run_folder(expand_user(app.resume)):
        raise OptionError(f"setting 'resume' is {app.resume!r}: must be the folder of a run (it holds {FACTS_FILE})")
    of_stage = {entry.name: getattr(app, entry.name) for entry in fields(StageOptions)}
    shared: dict[str, Any] = {
        "compute": place_name(app.compute, app.shards),
        "run_dir": run_dir or None,
        "min_uploads": app.min_uploads,
        "options": RunOptions(accepted=accepted, **of_stage),
        "facts": {
            "settings": dict(settings.flat),
            **commit_facts(),
            "num-supernodes": int(os.environ.get(SUPERNODES_VARIABLE, 0)),
            **({} if app.resume else facts_of(app.uploads, app.forget)),  # a resumed run already has them
        },
    }
    if settings.method is not None:
        return OneShot.of_job(settings.method, job, **shared)
    return Iterative.of_job(job, refiner=settings.refiner, **shared)


def facts_of(uploads: str, forget: str) -> dict[str, object]:
    """Return the entries of run.json that a run on earlier uploads adds to the settings."""
    if not uploads:
        return {}
    with RunFolder.open(Path(uploads), write=False) as source:
        # The files on the clients' own disks bear the id of the run that they uploaded to.
        origin, before = source.info.get("uploads-id", source.id), source.info.get("forgotten", [])
    return {"uploads-of": uploads, "uploads-id": origin, "forgotten": sorted(forgotten(forget) | set(before))}
