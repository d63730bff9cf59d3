"""Settings as text, and the catalogue of methods and options: a file that is read where torch would take too long.

``make config`` makes the catalogue from the dataclasses, beside this file, and a test compares. So help, lists and
errors of spelling appear at once.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.core.errors import OptionError
from strategies.core.options import Option, Scalar, listed, meant, reject_unknown
from strategies.core.places import expand_user
from strategies.core.toml import read_toml, read_toml_file

CONF = Path(__file__).resolve().parents[2] / "conf"  # the settings files that have names, in a clone or installed


def merge_settings(
    sources: Sequence[str], kinds: Mapping[str, type], former: Mapping[str, str] | None = None
) -> dict[str, Scalar]:
    """Merge files and pairs, later ones over earlier ones.

    Args:
        sources: Paths that end in ``.toml``, names of the files in ``conf/``, or ``key=value`` pairs divided by
            spaces. Quotes are optional.
        kinds: Every known key with the type of its value.
        former: The keys that settings had before -> what to write in their place.

    Raises:
        OptionError: The error names the key or file, and the possible values.
    """
    merged: dict[str, Scalar] = {}
    for source in sources:
        file = _file_of(source, kinds)
        merged.update(
            _read_pairs(source, kinds) if file is None else _flat(read_toml_file(file, "settings file"), str(file))
        )
    for key, value in merged.items():
        if former and key in former:
            raise OptionError(f"setting {key!r} is {former[key]}")
        if former and f"{key}={value}" in former:
            raise OptionError(f"setting {key!r} is {value!r}, which is {former[f'{key}={value}']}")
    reject_unknown(merged, list(kinds))
    return merged


def with_absolute_paths(settings: Mapping[str, Scalar], keys: Collection[str]) -> dict[str, Scalar]:
    """Return settings with absolute paths under these keys: the app runs in a folder of its own.

    Settings that name a run may be words; :func:`.launch.arguments.settings_of` makes those absolute.
    """
    paths = {key: value for key, value in settings.items() if key in keys and isinstance(value, str) and value}
    return {**settings, **{key: str(expand_user(value).absolute()) for key, value in paths.items()}}


def to_toml(value: Scalar) -> str:
    """Return a value in the syntax of TOML."""
    # JSON's texts, truth values and whole numbers are valid TOML, except for the character DEL.
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")


def toml_table(settings: Mapping[str, Scalar]) -> str:
    """Return flat settings as a TOML file."""

    def quoted(key: str) -> str:
        return ".".join(to_toml(part) for part in key.split("."))

    return "".join(f"{quoted(key)} = {to_toml(value)}\n" for key, value in settings.items())


def _file_of(source: str, kinds: Mapping[str, type]) -> Path | None:
    """Return the file that a source is, or names, None for pairs; outside a clone conf/ is the installed one."""
    if source.endswith(".toml") and source.partition("=")[0].strip() not in kinds:
        own, named = Path(source), CONF / Path(source).name
        return named if source == f"conf/{named.name}" and named.exists() and not own.exists() else own
    name = source.strip()
    if not name or "=" in name:
        return None
    known = sorted(path.stem for path in CONF.glob("*.toml"))
    if name not in known:
        raise OptionError(
            f"setting {name[:200]!r} is not a pair: must be key=value, a file that ends in .toml, or the name of a "
            f"settings file, such as 'short'{meant(name, known)}"
        )
    return CONF / f"{name}.toml"


def _flat(table: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, where, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{key}", value
        else:
            raise OptionError(
                f"{where}: {prefix}{key} is {type(value).__name__}: must be true/false, a number or a text"
            )


def _read_pairs(text: str, kinds: Mapping[str, type]) -> dict[str, Scalar]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise OptionError(f"settings {text[:200]!r} cannot be read: {error}") from error
    pairs: dict[str, Scalar] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise OptionError(f"setting {word[:200]!r} is not a pair: must be key=value, or a file that ends in .toml")
        pairs[key.strip()] = value if kinds.get(key.strip()) is str else _value(value.strip())
    return pairs


def _value(text: str) -> Scalar:
    try:
        value = read_toml(f"value = {text}")["value"]
    except ValueError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


CATALOGUE = Path(__file__).with_name("catalogue.json")
KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}
RULES = ("low", "high", "above", "choices", "path", "main")


@dataclass(frozen=True)
class Catalogue:
    """The methods and options of this app.

    Attributes:
        assumptions: The headings of the methods' list, in order.
        methods: Name -> title, source, kind, assumption, needs and options (key -> name of a preset -> value); and
            merges_weights_alone, whether it merges models that are no classifiers.
        former: The keys that settings had before -> what to write in their place.
    """

    assumptions: Sequence[str]
    methods: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Option]
    former: Mapping[str, str]

    def check_method(self, name: str) -> None:
        """Refuse an unknown method, and name the known ones and the closest."""
        if name not in self.methods:
            known = sorted(self.methods)
            raise OptionError(f"unknown method {name!r}: known are {', '.join(known)}{meant(name, known)}")

    def check_methods(self, names: str) -> None:
        """Refuse an unknown method in a list with commas; ``all`` stands for every method."""
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
            **{key: method[key] for key in ("title", "source", "kind", "assumption", "merges_weights_alone", "needs")},
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
