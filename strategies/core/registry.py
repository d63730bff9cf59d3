"""Registries: entries by name, each imported from its module when it is first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from .errors import OptionError
from .options import meant

Entry = TypeVar("Entry")
LIBRARY = __package__.rpartition(".")[0]  # under whatever name the library is vendored


# Where the teachers stand that a job may name in place of a method's own ensemble; settings choose among these names.
TEACHER_HOMES = {"tally": "combiners.tally_pool:TEACHER", "dw-fedens": "methods.dw_fedens:TEACHER"}


class Registry(Mapping[str, Entry]):
    """Entries by name.

    Args:
        kind: The kind of the entries, for errors: ``"method"``.
        homes: Name -> ``"module:attribute"``, the module below the library: ``"combiners.trained:Linear"``.
    """

    def __init__(self, kind: str, homes: Mapping[str, str]) -> None:
        self.homes = dict(homes)
        self._kind = kind

    def __getitem__(self, name: str) -> Entry:
        if name not in self.homes:
            known = sorted(self.homes)
            raise OptionError(f"unknown {self._kind} {name!r}: known are {', '.join(known)}{meant(name, known)}")
        module, _, attribute = self.homes[name].partition(":")
        found: Entry = getattr(importlib.import_module(f".{module}", LIBRARY), attribute)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)

    def __contains__(self, name: object) -> bool:
        return name in self.homes
