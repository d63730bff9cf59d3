"""Reads and checks settings one by one: flat values become the app's config, the method and its config."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fl_app.config import AppConfig
from server_app.settings.choices import CHOICES, Choice
from strategies.core.errors import OptionError
from strategies.core.facts import STATISTICS
from strategies.core.options import (
    ADOPTION,
    BEFORE,
    FIXED,
    REPLAY,
    UNSET,
    Option,
    Scalar,
    flatten,
    keys_of,
    listed,
    moved_keys,
    named_as_today,
    options_of,
    parse,
    reject_unknown,
    shortened,
)
from strategies.core.stage_options import OFF, GatekeeperConfig, limit_share
from strategies.flower.rounds.refinement import Refiner
from strategies.method import METHODS, Method, Plan


@dataclass(frozen=True)
class Settings:
    """Checked settings.

    Attributes:
        app: The app's own settings, with the local epochs after ``scale``.
        method_config: Its config, with the server epochs after ``scale``.
        refiner: The method that fine-tunes the model of every round, with its config after ``scale``; None for none.
        flat: All settings as given, completed by the defaults; those that the method and its preset decide are empty.
        scaled: The schedules that ``scale`` shortens: key -> the configured number of epochs, and the number that runs.
    """

    app: AppConfig
    choice: Choice
    method_config: Any
    refiner: Refiner | None
    flat: Mapping[str, Scalar]
    scaled: Mapping[str, list[Scalar]] = field(default_factory=dict)

    @property
    def method(self) -> Method | None:
        """The server method; None for federated learning in rounds."""
        return self.choice.method

    @property
    def plan(self) -> Plan:
        """What the run involves under the config."""
        return self.choice.plan(self.method_config)

    @property
    def learner(self) -> Choice:
        """What learns on the server: the rounds' refiner if there is one, else the method itself."""
        return self.choice if self.refiner is None else Choice.of(self.refiner.method)

    @property
    def averaging(self) -> Any:
        """The config of the FedAvg that stands beside the method's result."""
        return parse(METHODS["fedavg"].config, self.flat, "fedavg", self.app.preset)

    @property
    def options(self) -> dict[str, Scalar]:
        """The options of the method, and of the rounds' refiner, by key."""
        refiner = {} if self.refiner is None else flatten(self.refiner.config, self.refiner.method.name)
        return {**flatten(self.method_config, self.choice.name), **refiner}


def default_settings() -> dict[str, Scalar]:
    """Return every key with its default, as in pyproject.toml and for a bare ``flwr run .``."""
    return {o.key: o.default for o in known_options()}


@functools.cache
def known_options() -> tuple[Option, ...]:
    """Return every option of the app, of its gatekeeper and of the methods, each key once.

    An option that methods share is unset by default where they, or their presets, differ.
    """
    found = {o.key: o for o in options_of(AppConfig)}
    for name in CHOICES:
        for own in options_of(CHOICES[name].config, name):
            server_side = {**own.rules, "free": own.rules["free"] | {REPLAY, ADOPTION}}
            known = found.get(own.key)
            alike = known is None or (known.default, known.presets) == (own.default, own.presets)
            found[own.key] = (
                replace(own, rules=server_side) if alike else replace(known or own, default=UNSET, presets={})
            )
    return tuple(found.values())


@functools.cache
def method_keys() -> frozenset[str]:
    """Return the keys of methods' and the gatekeeper's options, former ones of stored runs included."""
    return frozenset(keys_of(GatekeeperConfig, "gatekeeper").union(*(CHOICES[name].keys for name in CHOICES)))


def known_settings(stored: Mapping[str, Any], method: str = "") -> dict[str, Any]:
    """Return a stored run's settings under their names of today, without those that have no effect any more.

    Newer settings whose default is not how the run behaved are among them.

    Args:
        method: What they are for; empty for the run's own method, with its refiner.

    Raises:
        OptionError: One that is fixed now had another value, and is the app's or this method's.
    """
    used = {method} if method else {stored.get("method"), stored.get("iterative.refiner")}
    for key, value in FIXED.items():
        table = key.partition(".")[0]
        if stored.get(key, value) != value and (table in used or table not in CHOICES):
            raise OptionError(f"stored setting {key!r} is {stored[key]!r}: must be {value!r}, which is fixed now")
    known = {o.key for o in known_options()} | method_keys()
    return {**BEFORE, **{key: value for key, value in named_as_today(stored).items() if key in known}}


def overridden(stored: Mapping[str, Any], changes: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return stored settings with changes; another preset replaces all stored options of methods."""
    former, method = _former_keys().items(), str(changes.get("method", ""))
    gone = method_keys() if "preset" in changes else {own for own, shared in former if shared in changes}
    kept = {key: value for key, value in known_settings(stored, method).items() if key not in gone}
    return {**dict.fromkeys(BEFORE.keys() & gone, UNSET), **kept, **changes}


def listed_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings under the keys of today; those of the run's own method come from former keys too.

    A setting that is newer than a stored run has the value by which the run behaved, its default but for
    :data:`BEFORE`.
    """
    whole = {**default_settings(), **known_settings(flat)}
    choice = CHOICES[str(whole["method"])]
    if choice.method is None and whole["iterative.refiner"] != "none":
        choice = CHOICES[str(whole["iterative.refiner"])]
    moved = moved_keys(choice.config, choice.name).items()
    return {key: whole[key] for key in default_settings()} | {new: whole[old] for old, new in moved if old in whole}


@functools.cache
def _former_keys() -> dict[str, str]:
    """Return the keys of shared options in the methods' own tables, where stored runs have them -> those of today."""
    return {old: new for name in CHOICES for old, new in moved_keys(CHOICES[name].config, name).items()}


def read_settings(given: Mapping[str, Scalar]) -> Settings:
    """Check settings and read them.

    Raises:
        OptionError: The error names the key, the value and the possible values.
    """
    reject_unknown(given, [*default_settings(), *method_keys()])
    flat = {**default_settings(), **given}
    whole = parse(AppConfig, flat)
    try:
        choice = CHOICES[whole.method]
    except OptionError as error:
        raise OptionError(f"setting 'method': {error}") from error
    config: Any = parse(choice.config, flat, choice.name, whole.preset)
    if choice.uploads == STATISTICS and whole.gatekeeper.policy != OFF:
        config = limit_share(config)
    parts = [(whole.client, "client"), (config, choice.name)]
    refiner = config.refiner if choice.method is None else "none"
    if refiner != "none":
        parts.append((parse(METHODS[refiner].config, flat, refiner, whole.preset), refiner))
    short = [shortened(part, whole.scale) for part, _ in parts]
    was = {key: value for part, table in parts for key, value in flatten(part, table).items()}
    now = {
        key: value for part, (_, table) in zip(short, parts, strict=True) for key, value in flatten(part, table).items()
    }
    return Settings(
        app=replace(whole, client=short[0]),
        choice=choice,
        method_config=short[1],
        refiner=None if refiner == "none" else Refiner(METHODS[refiner], short[2]),
        flat=flat,
        scaled={key: [was[key], value] for key, value in now.items() if value != was[key]},
    )


def forgotten(text: str) -> set[str]:
    """Return the clients in the setting "forget"."""
    return set(listed(text))


def scaled_line(scaled: Mapping[str, Sequence[Any]]) -> str:
    """Return the schedules that ``scale`` shortens, as text: ``client.epochs 30 instead of 300``."""
    return ", ".join(f"{key} {run} instead of {was}" for key, (was, run) in scaled.items())
