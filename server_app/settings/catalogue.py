"""The catalogue of methods and options: a file made from the dataclasses, read where loading torch would take too long.

``make config`` writes it beside this file, and a test compares. So help, lists and errors of spelling appear at once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.settings.text import merge_settings, with_absolute_paths
from strategies.core.errors import OptionError
from strategies.core.options import Option, Scalar, listed, meant

CATALOGUE = Path(__file__).with_name("catalogue.json")
KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}
RULES = ("low", "high", "above", "choices", "path", "main")


@dataclass(frozen=True)
class Catalogue:
    """The methods and options of this app.

    Attributes:
        assumptions: The headings of the methods' list, in order.
        methods: Name -> title, source, kind, assumption, needs and options (key -> name of a preset -> value).
        former: The keys that settings had before -> what to write in their place.
    """

    assumptions: Sequence[str]
    methods: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Option]
    former: Mapping[str, str]

    def check_method(self, name: str) -> None:
        """Refuse an unknown method.

        Raises:
            OptionError: It names the known methods, and the closest one.
        """
        if name not in self.methods:
            known = sorted(self.methods)
            raise OptionError(f"unknown method {name!r}: known are {', '.join(known)}{meant(name, known)}")

    def check_methods(self, names: str) -> None:
        """Refuse an unknown method in a list with commas; ``all`` stands for every method.

        Raises:
            OptionError: See :meth:`check_method`.
        """
        for name in listed(names):
            if name != "all":
                self.check_method(name)

    def method_facts(self, name: str) -> dict[str, Any]:
        """Return a method's facts, as JSON has them; its main options come first.

        Raises:
            OptionError: The method is unknown.
        """
        self.check_method(name)
        method = self.methods[name]
        options = [
            {"key": key, "main": self.options[key].rules.get("main", False), "presets": values,
             "allowed": self.options[key].allowed, "help": self.options[key].help}
            for key, values in method["options"].items()
        ]  # fmt: skip
        options.sort(key=lambda option: not option["main"])
        return {
            "name": name,
            **{key: method[key] for key in ("title", "source", "kind", "assumption", "needs")},
            "options": options,
        }

    def settings(self, texts: Sequence[str], **more: Scalar | None) -> dict[str, Scalar]:
        """Return the settings of a command line, flat, each checked alone; paths are absolute.

        Args:
            texts: TOML files, or ``key=value`` pairs; later ones win.
            more: Settings that have options of their own, which win over the texts; None for one that is not given.

        Raises:
            OptionError: A key is unknown, a value is out of range, or a file cannot be read.
        """
        given = merge_settings(texts, {key: option.kind for key, option in self.options.items()}, self.former)
        given |= {key: value for key, value in more.items() if value is not None}
        for key, value in given.items():
            self.options[key].check(value)
        if "method" in given:
            try:
                self.check_method(str(given["method"]))
            except OptionError as error:
                raise OptionError(f"setting 'method': {error}") from error
        return with_absolute_paths(given, [key for key, option in self.options.items() if option.rules.get("path")])


@functools.cache
def catalogue() -> Catalogue:
    """Read the catalogue."""
    found = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    options = {
        row["key"]: Option(
            row["key"], KINDS[row["kind"]], row["default"], row["help"], row["allowed"], row["rules"], row["presets"]
        )
        for row in found["options"]
    }  # fmt: skip
    methods = {row["name"]: row for row in found["methods"]}
    return Catalogue(found["assumptions"], methods, options, dict(found["former"][0]))
