"""Checks of settings that depend on each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_app.attacks import POISONING, AttackConfig
from fl_app.config import NO_TRACKER, AppConfig
from fl_app.data import Split, nobodys
from fl_app.node_config import client_name, simulated_nodes
from fl_app.node_policy import NodePolicy
from fl_app.privacy import check_architecture
from server_app.settings.choices import CHOICES, Choice
from server_app.settings.read import Settings, known_options, listed_settings, method_keys
from server_app.settings.server_data import open_half
from strategies.compute import place_name
from strategies.core.errors import DataError, OptionError, UploadError
from strategies.core.facts import CLASSIFIER, STATISTICS, kind_of
from strategies.core.gpu import resolve_device
from strategies.core.options import ADOPTION, REPLAY, RESUME, Scalar, parse
from strategies.core.stage_options import NONE, OFF
from strategies.flower.rounds.config import IterativeConfig
from strategies.method import METHODS, TEACHERS, Method, Need
from strategies.run.run_folder import info_of

# They divide by the length of the clients' steps, which is known for SGD.
BY_TRAVEL = ("fednova", "scaffold")


def check_needs_of_settings(settings: Settings) -> None:
    """Refuse settings that give the method unusable uploads, before any client is asked.

    Raises:
        OptionError: The error names the setting, its value and the method's need.
    """
    method, app = settings.choice, settings.app
    if Need.SAME_ARCHITECTURE in method.needs and set(app.model.mix()) != {app.model.of_student()}:
        key, value = (
            ("model.per-client", app.model.per_client) if app.model.per_client else ("model.name", app.model.name)
        )
        raise OptionError(
            f"setting {key!r} is {value!r} and the student's architecture {app.model.of_student()!r}: method "
            f"{method.name!r} needs one architecture for all"
        )
    _check_heads(app, method)
    check_own_training(settings)
    _check_privacy(settings)
    _check_last_layer(app, method)
    needs = method.needs | settings.plan.needs
    if Need.LABEL_COUNTS in needs and app.teacher not in TEACHERS and not app.client.share_label_counts:
        raise OptionError(
            f"setting 'client.share-label-counts' is False: must be True with method {method.name!r}, which needs that "
            f"{Need.LABEL_COUNTS.value}"
        )
    _check_counts_of_sums(app, method)
    if app.uploads and app.gatekeeper.policy != OFF:
        raise OptionError(
            f"setting 'gatekeeper.policy' is {app.gatekeeper.policy!r} and 'uploads' {app.uploads!r}: must be {OFF!r}; "
            "clients quarantined in that run stay left out, and 'forget' leaves out others"
        )
    if app.teacher == "run":
        raise OptionError("setting 'teacher' is 'run': needs a replay, of a run that ended with an ensemble")
    if settings.method is None:
        _check_rounds(app, settings.method_config)
    if place_name(app.compute, app.shards) == "in-process":
        resolve_device(app.device)


def _check_last_layer(app: AppConfig, method: Choice) -> None:
    """Refuse a solved start that clients would not take, or would not share; and a last layer made anew in rounds."""
    reasons = {
        f"with 'uploads' {app.uploads!r}: the start holds what every client of that run sent": bool(app.uploads),
        "with 'client.init' 'different'": app.client.init == "different",
        f"with 'client.checkpoint' {app.client.checkpoint!r}, because no client trains": bool(app.client.checkpoint),
        "where 'model.per-client' names several architectures": set(app.model.mix()) != {app.model.of_student()},
    }
    for why, found in reasons.items():
        if app.start != NONE and found:
            raise OptionError(f"setting 'start' is {app.start!r}: must be {NONE!r} {why}")
    for key, value in (("start", app.start), ("finish", app.finish)):
        if value != NONE and method.method is None:
            raise OptionError(f"setting {key!r} is {value!r}: must be {NONE!r} with method {method.name!r}")


def check_own_training(settings: Settings) -> None:
    """Refuse what needs classes or the app's own training where the user's function trains models of any kind.

    Raises:
        OptionError: The error names the setting, its value and the possible values.
    """
    app, method = settings.app, settings.method
    if not app.model.train:
        return
    if method is None or not method.merges_weights_alone:
        allowed = ", ".join(name for name in METHODS if METHODS[name].merges_weights_alone)
        raise OptionError(
            f"setting 'method' is {settings.choice.name!r}: must be one of {allowed} with 'model.train', because these "
            "methods merge the weights of any model"
        )
    needs = {
        "attack.kind": (app.attack.kind, "none"), "gatekeeper.policy": (app.gatekeeper.policy, OFF),
        "start": (app.start, NONE), "finish": (app.finish, NONE), "privacy.epsilon": (app.privacy.epsilon, 0.0),
    }  # fmt: skip
    for key, (value, needed) in needs.items():
        if value != needed:
            raise OptionError(f"setting {key!r} is {value!r}: must be {needed!r} with 'model.train'")
    if heads := app.model.on_features():
        raise OptionError(f"setting 'model.name' names {heads[0]!r}: must be another architecture with 'model.train'")


def _check_heads(app: AppConfig, method: Choice) -> None:
    """Refuse heads on features, or sums of them, with a method that trains another kind of model or makes images."""
    named = {name: key for key, name in app.model.named() if name in app.model.on_features()}
    if not named or method.uploads == STATISTICS:
        reason = ""
    elif method.method is None:
        reason = "trains whole models in rounds"
    elif method.uploads != CLASSIFIER:
        reason = f"works on uploads of kind {method.uploads!r}"
    elif Need.IMAGE_GRADIENTS in method.needs:
        reason = "makes images by the models' gradient, which does not pass a frozen backbone"
    else:
        reason = ""
    if reason:
        name, key = next(iter(named.items()))
        raise OptionError(
            f"setting {key!r} is {name!r}: must be an architecture of the zoo with method {method.name!r}, "
            f"which {reason}"
        )


def _check_counts_of_sums(app: AppConfig, method: Choice) -> None:
    """Refuse to keep label counts back from sums of features, which hold them."""
    if method.uploads != STATISTICS or app.privacy.on:
        return
    needs = {"share-label-counts": (app.client.share_label_counts, True),
            "label-counts-as": (app.client.label_counts_as, "numbers")}  # fmt: skip
    for key, (value, needed) in needs.items():
        if value != needed:
            raise OptionError(
                f"setting 'client.{key}' is {value!r}: must be {needed!r} with method {method.name!r}, whose sums hold "
                "the number of examples of every class, or 'privacy.epsilon' above 0"
            )


def check_attackers(attack: AttackConfig, num_supernodes: int, nodes: str = "") -> None:
    """Refuse attackers that are no clients of the simulation, or whose node's config has limits.

    Raises:
        OptionError: The error names the unknown attackers and the clients, or the attacker.
    """
    played = simulated_nodes(nodes, num_supernodes)
    attack.check_clients([client_name(facts) for facts in played])
    for facts in played:
        try:
            NodePolicy.of(facts).check_attack(attack.of(client_name(facts)))
        except UploadError as error:
            raise OptionError(f"client.nodes: {client_name(facts)}: {error}") from error


def check_halves(name: str, train: Split, test: Split) -> None:
    """Refuse a data set whose halves have examples of different shapes, or different numbers of classes.

    Raises:
        DataError: The error names both.
    """
    if train.input_shape != test.input_shape:
        raise DataError(
            f"data set {name!r} has examples of shape {train.input_shape} to train on, and {test.input_shape} to test "
            "on: must be the same"
        )
    if train.num_classes != test.num_classes:
        raise DataError(
            f"data set {name!r} shows {train.num_classes} classes to train on, and {test.num_classes} to test on: must "
            "be the same, or 'data.num-classes' must state their number"
        )


def check_private_models(settings: Settings, split: Split) -> None:
    """Refuse clients' architectures that cannot be trained privately.

    Raises:
        OptionError: The error names the first of them, and the architectures that fit.
    """
    if settings.app.privacy.on and settings.choice.uploads != STATISTICS:
        heads = settings.app.model.on_features()
        for name in dict.fromkeys(name for name in settings.app.model.mix() if name not in heads):
            check_architecture(name, split.num_classes, split.input_shape)


def _check_privacy(settings: Settings) -> None:
    """Refuse a method that asks clients for more than one private upload of a classifier."""
    if not settings.app.privacy.on:
        return
    choice = settings.choice
    sums = [name for name in settings.app.model.mix() if kind_of(name) == STATISTICS]
    if choice.uploads == CLASSIFIER and sums:
        raise OptionError(
            f"setting 'model.per-client' names {sums[0]!r}: must be other architectures with 'privacy.epsilon': "
            "sums with noise do not join an ensemble; all clients can send them, by method 'ridge'"
        )
    if choice.method is None or not _asks_once(choice.method):
        allowed = ", ".join(name for name in METHODS if _asks_once(METHODS[name]))
        raise OptionError(
            f"setting 'method' is {choice.name!r}: must be one of {allowed} with 'privacy.epsilon'; these methods ask "
            "each client for one classifier or one set of sums, and for nothing later"
        )
    if (rounds := settings.plan.rounds) > 1:
        raise OptionError(
            f"setting '{choice.name}.rounds' is {rounds}: must be 1 with 'privacy.epsilon'; every round would spend "
            "the budget again"
        )


def _asks_once(method: Method) -> bool:
    once = method.uploads in (CLASSIFIER, STATISTICS) and method.client_phase is None
    return once and not method.needs & {Need.LABEL_COUNTS, Need.EXACT_SUMS}


def _check_rounds(app: AppConfig, config: IterativeConfig) -> None:
    """Refuse what does not fit federated learning in rounds, before any client is asked."""
    if app.attack.kind not in ("none", *POISONING):
        raise OptionError(
            f"setting 'attack.kind' is {app.attack.kind!r}: must be one of none, {', '.join(POISONING)} with method "
            "'iterative', whose clients train in rounds"
        )
    if app.gatekeeper.policy != OFF:
        raise OptionError(
            f"setting 'gatekeeper.policy' is {app.gatekeeper.policy!r}: must be {OFF!r} with method 'iterative', whose "
            "clients answer in every round; the gatekeeper only judges models that are uploaded once"
        )
    if app.client.checkpoint:
        raise OptionError(
            f"setting 'client.checkpoint' is {app.client.checkpoint!r}: must be empty with method 'iterative', "
            "whose clients train in every round"
        )
    if app.teacher != "method" and config.refiner == "none":
        raise OptionError(
            f"setting 'teacher' is {app.teacher!r}: with method 'iterative' it needs an 'iterative.refiner' "
            "that distils"
        )
    if config.strategy in BY_TRAVEL and app.client.optimizer != "sgd":
        raise OptionError(
            f"setting 'client.optimizer' is {app.client.optimizer!r}: must be 'sgd' with 'iterative.strategy' "
            f"{config.strategy!r}"
        )


def check_tracker(name: str) -> None:
    """Refuse a tracker whose package is missing.

    Raises:
        OptionError: The error names the extra that brings it.
    """
    if name != NO_TRACKER and importlib.util.find_spec(name) is None:
        raise OptionError(f"setting 'tracker' is {name!r}, which is not installed: pip install 'oneshot-fl[{name}]'")


def check_same_run(stored: Mapping[str, Any], flat: Mapping[str, Scalar]) -> None:
    """Refuse to resume a run under other settings than it began with.

    Raises:
        OptionError: The error names the first setting that differs.
    """
    if not isinstance(stored.get("settings"), dict):
        return
    begun = listed_settings(stored["settings"])
    free = free_on(RESUME)
    for key, value in listed_settings(flat).items():
        if key not in free and begun.get(key, value) != value:
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run to resume began with {begun[key]!r}: "
                "must be that value, or a new run"
            )


def free_on(where: str) -> frozenset[str]:
    """Return the settings that may differ from those of the run before: on ``"resume"``, for example."""
    return frozenset(option.key for option in known_options() if option.may_change(where))


def _fixed(where: str, flat: Mapping[str, Scalar]) -> list[tuple[str, Scalar]]:
    """Return the settings that may not differ from those of the run before."""
    free = free_on(where) | method_keys()
    return [(key, value) for key, value in flat.items() if key not in free]


def check_adopted(settings: Settings, num_supernodes: int) -> None:
    """Refuse a run on the uploads of another whose clients would hold out other examples than before.

    A client divides its examples anew by these settings. Under other settings it would keep examples for the aggregator
    that the uploaded models were trained on.

    Raises:
        OptionError: The error names the setting, its value and the required value.
        StoreError: "uploads" is not a run folder.
    """
    if not settings.app.uploads:
        return
    info, method = info_of(Path(settings.app.uploads)), settings.choice
    stored = info.get("settings")
    if not isinstance(stored, dict):
        raise OptionError(f"setting 'uploads' is {settings.app.uploads!r}: must be the folder of a run of this app")
    stored = listed_settings(stored)
    for key, value in _fixed(ADOPTION, settings.flat):
        if stored.get(key, value) != value:
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run whose uploads these are was made with {stored[key]!r}: "
                "must be that value; its clients divided their examples by it"
            )
    if num_supernodes != (made := int(info.get("num-supernodes", 0))):
        raise OptionError(f"--num-supernodes is {num_supernodes}: must be {made}, that of the run of the uploads")
    earlier = CHOICES[str(stored["method"])]
    config: Any = parse(earlier.config, stored, earlier.name, str(stored["preset"]))
    asked, before = settings.plan.asks, earlier.plan(config).asks
    held = [
        ("holdout", asked.holdout, before.holdout),
        ("holdout-per-class", asked.holdout_per_class, before.holdout_per_class),
    ]
    for name, value, was in held if asked.holdout else ():
        if value != was:
            raise OptionError(
                f"setting '{method.name}.{name}' is {value!r}, but the clients of {settings.app.uploads} kept "
                f"{was if before.holdout else 'nothing'} from training: must be a run whose clients held out the same"
            )


def check_settled(stored: Mapping[str, Any], settings: Settings) -> None:
    """Refuse a replay that cannot follow its settings, or whose proxy images the clients trained on.

    Raises:
        OptionError: The error names the setting, its value and the required value.
        DataError: The proxy is a share of a training set that is missing.
    """
    begun = {**listed_settings(stored), "resume": "", "run-dir": ""}  # a replay has a folder of its own
    for key, value in _fixed(REPLAY, settings.flat):
        if begun.get(key, value) != value:
            changing = sorted(free_on(REPLAY) - method_keys())
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run was made with {begun[key]!r}: must be that value; a "
                f"replay can change the options of the methods, and {', '.join(changing)}"
            )
    uses_share = Need.PROXY_IMAGES in settings.choice.needs or settings.plan.labelled != "unused"
    if settings.app.data.proxy and uses_share:
        made = AppConfig.from_settings(listed_settings(stored))
        check_unseen(settings, made, open_half(settings, "train"))


def check_unseen(settings: Settings, made: AppConfig, train: Split) -> None:
    """Refuse proxy images that the run's clients trained on, and name the largest possible share."""
    total, share = len(train.labels), settings.app.data.proxy
    unseen = nobodys(train, seed=made.seed, limit=made.data.limit, proxy=made.data.proxy)
    if (wanted := int(share * total)) > unseen:
        raise OptionError(
            f"setting 'data.proxy' is {share}, the last {wanted} of {total} training images, but the run's clients "
            f"held all but the last {unseen} ('data.limit' {made.data.limit}, 'data.proxy' {made.data.proxy}): must "
            f"be at most {int(10_000 * unseen / total) / 10_000}, or another data set by 'data.proxy-name'"
        )
