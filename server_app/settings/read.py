"""Reads and checks settings one by one: flat values become the app's config, the method and its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_app.config import AppConfig
from server_app.settings.choices import CHOICES, Choice
from strategies.core.errors import OptionError
from strategies.core.facts import STATISTICS
from strategies.core.options import Option, Scalar, flatten, listed, options_of, parse, reject_unknown, shortened
from strategies.gatekeeper.config import OFF, GatekeeperConfig
from strategies.method import METHODS, Method, Plan
from strategies.rounds.refinement import Refiner
from strategies.statistics.choice import with_share

# Defaults for small data. Tried out on digits, they take seconds, where DENSE's own values take an hour and FENS's a
# minute. FLBoost's values, tried out on Fashion-MNIST, suit models as small as the main job's.
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
    """Checked settings.

    Attributes:
        app: The app's own settings, with the local epochs after ``scale``.
        choice: The value of the setting ``method``.
        method_config: Its config, with the server epochs after ``scale``.
        refiner: The method that fine-tunes the model of every round, with its config after ``scale``; None for none.
        flat: All settings as given, completed by the defaults.
        gatekeeper: The options of the gatekeeper.
    """

    app: AppConfig
    choice: Choice
    method_config: Any
    refiner: Refiner | None
    flat: Mapping[str, Scalar]
    gatekeeper: GatekeeperConfig

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
    def options(self) -> dict[str, Scalar]:
        """The options of the method, and of the rounds' refiner, by key."""
        refiner = {} if self.refiner is None else flatten(self.refiner.config, self.refiner.method.name)
        return {**flatten(self.method_config, self.choice.name), **refiner}

    @property
    def scaled(self) -> dict[str, list[Scalar]]:
        """The schedules that ``scale`` shortens: key -> the configured number of epochs, and the number that runs."""
        run = {**flatten(self.app), **self.options}
        return {key: [self.flat[key], value] for key, value in run.items() if value != self.flat[key]}


def default_settings() -> dict[str, Scalar]:
    """Return every key with its default, as in pyproject.toml and for a bare ``flwr run .``."""
    return {**{o.key: o.default for o in known_options()}, **APP_DEFAULTS}


def known_options() -> list[Option]:
    """Return every option of the app, of its gatekeeper and of the methods."""
    own = options_of(AppConfig) + options_of(GatekeeperConfig, "gatekeeper")
    return own + [o for name in CHOICES for o in options_of(CHOICES[name].config, name)]


def known_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored run that are options of this version; the others have no effect any more."""
    known = {o.key for o in known_options()}
    return {key: value for key, value in stored.items() if key in known}


def read_settings(given: Mapping[str, Scalar]) -> Settings:
    """Check settings and read them.

    Args:
        given: Flat settings; absent keys have their default.

    Raises:
        OptionError: The error names the key, the value and the possible values.
    """
    reject_unknown(given, [o.key for o in known_options()])
    flat = {**default_settings(), **given}
    app = AppConfig.from_settings(flat)
    try:
        choice = CHOICES[app.method]
    except OptionError as error:
        raise OptionError(f"setting 'method': {error}") from error
    config: Any = shortened(parse(choice.config, flat, choice.name), app.scale)
    gatekeeper = parse(GatekeeperConfig, flat, "gatekeeper")
    if choice.uploads == STATISTICS and gatekeeper.policy != OFF:
        config = with_share(config)
    refiner = _refiner(config.refiner, flat, app.scale) if choice.method is None else None
    return Settings(app, choice, config, refiner, flat, gatekeeper)


def _refiner(name: str, flat: Mapping[str, Scalar], scale: float) -> Refiner | None:
    if name == "none":
        return None
    return Refiner(METHODS[name], shortened(parse(METHODS[name].config, flat, name), scale))


def forgotten(text: str) -> set[str]:
    """Return the clients in the setting "forget"."""
    return set(listed(text))


def scaled_line(scaled: Mapping[str, Sequence[Any]]) -> str:
    """Return the schedules that ``scale`` shortens, as text: ``client.epochs 30 instead of 300``."""
    return ", ".join(f"{key} {run} instead of {was}" for key, (was, run) in scaled.items())
