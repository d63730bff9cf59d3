"""The settings that a resumed run, and a replay, cannot change: their clients trained earlier, on their own images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from fl_app.data import Split, nobodys
from server_app.settings.choices import CHOICES
from server_app.settings.read import Settings, known_options, listed_settings, method_keys
from server_app.settings.server_data import open_half
from strategies.core.errors import OptionError
from strategies.core.options import ADOPTION, REPLAY, RESUME, Scalar, parse
from strategies.method import Need
from strategies.run.run_folder import RunFolder


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
    with RunFolder.open(Path(settings.app.uploads), write=False) as source:
        info = source.info
    stored, method = info.get("settings"), settings.choice
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
    """Refuse proxy images that the run's clients trained on.

    Raises:
        OptionError: The error names the share, its number of images, and the largest possible share.
    """
    total, share = len(train.labels), settings.app.data.proxy
    unseen = nobodys(train, seed=made.seed, limit=made.data.limit, proxy=made.data.proxy)
    if (wanted := int(share * total)) > unseen:
        raise OptionError(
            f"setting 'data.proxy' is {share}, the last {wanted} of {total} training images, but the run's clients "
            f"held all but the last {unseen} ('data.limit' {made.data.limit}, 'data.proxy' {made.data.proxy}): must "
            f"be at most {int(10_000 * unseen / total) / 10_000}, or another data set by 'data.proxy-name'"
        )
