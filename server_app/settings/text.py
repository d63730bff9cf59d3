"""Settings as text: TOML files and ``key=value`` pairs, merged into flat settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strategies.core.errors import OptionError
from strategies.core.options import Scalar, meant, reject_unknown
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
