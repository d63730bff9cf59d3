"""Former names of settings, which stored runs have: the one table of old and new names.

A setting that methods share has its former key in each method's own table (``dense.batch-size`` is
``server.batch-size`` now); those keys follow from the declarations, see :func:`.options.moved_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "data.law": "data.partition",
    "f-adi.inversion-batch-size": "f-adi.synthesis-batch-size",
}
# Setting of today -> former value -> value of today.
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "data.partition": {
        "dirichlet-p4": "dirichlet-shuffled",
        "dirichlet-p4prep": "fedftg-weighted",
        "classes-p1": "classes-equal-size",
    },
    "preset": {"flboost": "published"},  # which it was for every method that a replay can run
}


def named_as_today(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings under their names, and with their values, of today."""
    named = {RENAMED.get(key, key): value for key, value in settings.items()}
    return {
        key: RENAMED_VALUES[key].get(value, value) if key in RENAMED_VALUES else value for key, value in named.items()
    }
