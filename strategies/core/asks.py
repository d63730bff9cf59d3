"""The requests of a method to its clients, and how a client reads the numbers of one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UploadError


@dataclass(frozen=True)
class ClientAsks:
    """The requests of a method to its clients beside the upload, whose kind is ``Method.uploads``.

    Attributes:
        holdout: Share of its examples that a client keeps from training; 0: none.
        holdout_per_class: Keep the share of every class, not of all examples at random.
        calibrate: A client sends the ranges of its layers' outputs, so that the server can quantise its model.
    """

    holdout: float = 0.0
    holdout_per_class: bool = False
    calibrate: bool = False


def whole_of(said: Mapping[str, Any], key: str, usual: int | None = None) -> int:
    """Return a whole number of a request's config, or its default.

    Args:
        said: The config, with any values.
        key: The number's key.
        usual: The default; None: the config must have the key.

    Raises:
        UploadError: The server has sent something else.
    """
    value = said.get(key, usual)
    if type(value) is not int:
        raise UploadError(f"the server's {key} is {value!r:.80}: must be a whole number of 64 bits")
    return value


def real_of(said: Mapping[str, Any], key: str, usual: float | None = None) -> float:
    """Return a finite number of a request's config, or its default; see :func:`whole_of`.

    Raises:
        UploadError: The server has sent something else.
    """
    value = said.get(key, usual)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UploadError(f"the server's {key} is {value!r:.80}: must be a finite number")
    return float(value)
