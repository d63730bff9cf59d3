"""What a replay cannot change: its clients trained long ago, on images that the server must not take for its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_app.config import AppConfig
from fl_app.data import Split, nobodys
from server_app.build import Settings
from server_app.server_data import open_half
from strategies.errors import OptionError
from strategies.method import METHODS, Need

# Of the app's own settings; those of the methods are free as well.
FREE_ON_REPLAY = (
    "method", "seed", "threads", "device", "checkpoint-s", "data.root", "data.proxy", "data.proxy-name",
    "data.proxy-limit", "model.student", "teacher",
)  # fmt: skip


def check_settled(stored: Mapping[str, Any], settings: Settings) -> None:
    """Refuse a replay whose settings it could not follow, or whose proxy images the clients trained on.

    Args:
        stored: The settings that the run was made with.
        settings: Those of the replay.

    Raises:
        OptionError: Names the setting, its value and what is allowed.
        DataError: The proxy is a share of a training set that is not here.
    """
    begun = {**stored, "resume": "", "run-dir": ""}  # a replay has a folder of its own
    for key, value in settings.flat.items():
        free = key in FREE_ON_REPLAY or key.partition(".")[0] in METHODS
        if not free and begun.get(key, value) != value:
            raise OptionError(
                f"setting {key!r} is {value!r}, but the run was made with {begun[key]!r}: allowed is that value; a "
                f"replay can change the options of the methods and {', '.join(FREE_ON_REPLAY)}"
            )
    uses_share = Need.PROXY_IMAGES in settings.method.needs or hasattr(settings.method_config, "train_on")
    if settings.app.data.proxy and uses_share:
        made = AppConfig.from_settings({key: stored[key] for key in settings.flat if key in stored})
        check_unseen(settings, made, open_half(settings, "train"))


def check_unseen(settings: Settings, made: AppConfig, train: Split) -> None:
    """Refuse proxy images that the run's clients trained on.

    Args:
        settings: Of the replay.
        made: The app's settings that the run was made with.
        train: The training half.

    Raises:
        OptionError: Names the share, how many images it is, and the largest that is allowed.
    """
    total, share = len(train.labels), settings.app.data.proxy
    unseen = nobodys(train, seed=made.seed, limit=made.data.limit, proxy=made.data.proxy)
    if (wanted := int(share * total)) > unseen:
        raise OptionError(
            f"setting 'data.proxy' is {share}, the last {wanted} of {total} training images, but the run's clients "
            f"held all but the last {unseen} ('data.limit' {made.data.limit}, 'data.proxy' {made.data.proxy}): allowed "
            f"is at most {int(10_000 * unseen / total) / 10_000}, or another data set by 'data.proxy-name'"
        )
