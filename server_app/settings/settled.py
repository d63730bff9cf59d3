"""The settings that a resumed run, and a replay, cannot change: their clients trained earlier, on their own images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from fl_app.data import Split, nobodys
from server_app.settings.choices import CHOICES
from server_app.settings.read import Settings, default_settings, known_settings
from server_app.settings.server_data import open_half
from strategies.core.errors import OptionError
from strategies.core.options import Scalar, options_of, parse
from strategies.method import ClientAsks, Need
from strategies.run.run_folder import RunFolder

# Settings of the app; those of the methods and of the gatekeeper are free as well.
FREE_TABLES = (*CHOICES, "gatekeeper")
FREE_ON_REPLAY = (
    "method", "seed", "threads", "device", "shards", "checkpoint-s", "data.root", "data.proxy", "data.proxy-name",
    "data.proxy-limit", "data.proxy-file", "data.held-out", "model.student", "teacher", "teacher-run", "store-images",
    "tracker",
)  # fmt: skip


# The settings that may differ in a resumed run: folders and waiting times do not change its result, and a client's
# device changes no more than rounding.
FREE_ON_RESUME = (
    "resume", "run-dir", "compute", "shards", "data.root", "client.state-dir", "min-uploads", "deadline-s",
    "checkpoint-s", "max-upload-mib", "client.max-ensemble-mib", "client.device", "fens.quorum", "fens.patience-s",
    "fens.ensemble-patience-s", "tracker",
)  # fmt: skip


def check_same_run(stored: Mapping[str, Any], flat: Mapping[str, Scalar]) -> None:
    """Refuse to resume a run under other settings than it began with.

    Args:
        stored: The content of its run.json.
        flat: All settings of the resumed run.

    Raises:
        OptionError: The error names the first setting that differs.
    """
    if not isinstance(stored.get("settings"), dict):
        return
    begun = completed(stored["settings"])
    for key, value in flat.items():
        if key not in FREE_ON_RESUME and begun.get(key, value) != value:
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run to resume began with {begun[key]!r}: "
                "must be that value, or a new run"
            )


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's stored settings; a setting newer than the run has its default, which is how the run behaved."""
    return {**default_settings(), **known_settings(stored)}


# The settings, beside the methods' options, that a run on the uploads of another may change: folders and waiting times.
FREE_ON_ADOPTION = (
    "method", "uploads", "forget", "threads", "device", "compute", "shards", "checkpoint-s", "deadline-s",
    "min-uploads", "max-upload-mib", "data.root", "client.state-dir", "client.max-ensemble-mib", "client.device",
    "run-dir", "resume",
    "scale", "teacher", "teacher-run", "store-images", "tracker",
)  # fmt: skip


def check_adopted(settings: Settings, num_supernodes: int) -> None:
    """Refuse a run on the uploads of another whose clients would hold out other examples than before.

    A client divides its examples anew by these settings. Under other settings it would keep examples for the aggregator
    that the uploaded models were trained on.

    Args:
        settings: The settings of the run, with "uploads".
        num_supernodes: The number of simulated clients; 0 for real ones.

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
    stored = completed(stored)
    for key, value in settings.flat.items():
        free = key in FREE_ON_ADOPTION or key.partition(".")[0] in FREE_TABLES
        if not free and stored.get(key, value) != value:
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run whose uploads these are was made with {stored[key]!r}: "
                "must be that value; its clients divided their examples by it"
            )
    if num_supernodes != (made := int(info.get("num-supernodes", 0))):
        raise OptionError(f"--num-supernodes is {num_supernodes}: must be {made}, that of the run of the uploads")
    asked, before = settings.plan.asks, asked_by(stored)
    held = [
        ("holdout", asked.holdout, before.holdout),
        ("holdout-per-class", asked.holdout_per_class, before.holdout_per_class),
    ]
    for name, value, was in held if asked.holdout else ():
        if value != was:
            raise OptionError(
                f"setting '{method.name}.{name}' is {value!r}, but the clients of {settings.app.uploads} kept "
                f"{was if before.holdout else 'nothing'} from training: must be a run whose clients did as this one's"
            )


def asked_by(stored: Mapping[str, Any]) -> ClientAsks:
    """Return the questions that the method of a run sends its clients."""
    method = CHOICES[str(stored["method"])]
    keys = {option.key for option in options_of(method.config, method.name)}
    config: Any = parse(method.config, {key: value for key, value in stored.items() if key in keys}, method.name)
    return method.plan(config).asks


def check_settled(stored: Mapping[str, Any], settings: Settings) -> None:
    """Refuse a replay that cannot follow its settings, or whose proxy images the clients trained on.

    Args:
        stored: The settings that the run was made with.
        settings: The settings of the replay.

    Raises:
        OptionError: The error names the setting, its value and the required value.
        DataError: The proxy is a share of a training set that is missing.
    """
    begun = {**completed(stored), "resume": "", "run-dir": ""}  # a replay has a folder of its own
    for key, value in settings.flat.items():
        free = key in FREE_ON_REPLAY or key.partition(".")[0] in FREE_TABLES
        if not free and begun.get(key, value) != value:
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run was made with {begun[key]!r}: must be that value; a "
                f"replay can change the options of the methods, of the gatekeeper, and {', '.join(FREE_ON_REPLAY)}"
            )
    uses_share = Need.PROXY_IMAGES in settings.choice.needs or settings.plan.labelled != "unused"
    if settings.app.data.proxy and uses_share:
        made = AppConfig.from_settings({key: stored[key] for key in settings.flat if key in stored})
        check_unseen(settings, made, open_half(settings, "train"))


def check_unseen(settings: Settings, made: AppConfig, train: Split) -> None:
    """Refuse proxy images that the run's clients trained on.

    Args:
        settings: The settings of the replay.
        made: The app's settings that the run was made with.
        train: The training half.

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
