"""Options: frozen dataclasses whose fields carry their meaning and their range.

One declaration serves every use: the check at construction, the flat ``table.key`` settings of Flower's run config,
the list that the command line prints, and the manual.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

from .errors import OptionError

Scalar = bool | int | float | str
T = TypeVar("T")
OWN_FORM = "module:attribute of your own"


def is_own(name: str) -> bool:
    """Return whether a name is one of the user's code, ``package.module:attribute``; others have no colon."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def listed(text: str) -> list[str]:
    """Return the names in a setting's text, which has commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


def option(
    default: Any,
    help: str,  # noqa: A002  the word every command line uses
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    scaled: bool = False,
) -> Any:
    """Declare a field of a config dataclass.

    Args:
        default: The field's default.
        help: One sentence on its effect, with its unit and its symbol in the paper.
        low: The smallest valid value.
        high: The largest valid value.
        above: A bound that every valid value exceeds.
        choices: The valid words; :data:`OWN_FORM` among them permits names of the user's own code.
        scaled: Whether it is a number of epochs that :func:`shortened` multiplies.

    Returns:
        A dataclass field.
    """
    facts = {"help": help, "low": low, "high": high, "above": above, "choices": tuple(choices), "scaled": scaled}
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True)
class Always(Generic[T]):
    """A function of a config that returns the same value for all of them, and that can be pickled."""

    value: T

    def __call__(self, config: Any) -> T:  # noqa: ARG002  the signature of a function of a config
        """Return the value."""
        return self.value


@dataclasses.dataclass(frozen=True)
class Option:
    """One declared option, as the command line and the manual show it.

    Attributes:
        key: Its key in settings.
        kind: bool, int, float or str.
        default: Its default.
        help: Its meaning.
        allowed: The valid values, in words.
        facts: The bounds ``low``, ``high`` and ``above``, and the ``choices``; an absent one does not apply.
    """

    key: str
    kind: type
    default: Scalar
    help: str
    allowed: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def check(self, value: Scalar) -> None:
        """Refuse a value of the wrong kind, or out of range.

        Raises:
            OptionError: Names the key, the value and the range.
        """
        _check_value(self.key, value, self.kind, self.facts)


def kebab(name: str) -> str:
    """Return a field's name as it is spelt in settings: ``min_uploads`` -> ``min-uploads``."""
    return name.replace("_", "-")


def options_of(config: type | Any, table: str = "") -> list[Option]:
    """List the options of a config type, nested tables included, in the order of their declaration.

    Args:
        config: The dataclass, or an instance whose values become the defaults.
        table: The name of its table; the keys are prefixed with it.
    """
    if isinstance(config, type):
        return list(_declared(config, table))
    values = dict(_values(config, table))
    return [dataclasses.replace(entry, default=values[entry.key]) for entry in _declared(type(config), table)]


def _read_options(config: type, table: str) -> tuple[Option, ...]:
    found: list[Option] = []
    for field, kind, key in _fields(config, table):
        if dataclasses.is_dataclass(kind):
            found += _declared(kind, key)
        else:
            allowed = _allowed(kind, field.metadata)
            found.append(Option(key, kind, field.default, field.metadata.get("help", ""), allowed, field.metadata))
    return tuple(found)


def _read_fields(config: type, table: str) -> tuple[tuple[Any, Any, str], ...]:
    """Return every field of a config type, its type and its key."""
    kinds = get_type_hints(config)
    prefix = f"{table}." if table else ""
    return tuple((field, kinds[field.name], prefix + kebab(field.name)) for field in dataclasses.fields(config))


# A start asks each type often.
_declared: Callable[[Any, str], tuple[Option, ...]] = functools.cache(_read_options)
_fields: Callable[[Any, str], tuple[tuple[Any, Any, str], ...]] = functools.cache(_read_fields)


def _values(config: Any, table: str) -> Iterator[tuple[str, Scalar]]:
    for field, kind, key in _fields(type(config), table):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(kind):
            yield from _values(value, key)
        else:
            yield key, value


def check(config: Any, table: str = "") -> None:
    """Check every value of a config; call it from ``__post_init__``.

    Args:
        config: An instance of a dataclass made of :func:`option` fields.
        table: The name of its table, for the message.

    Raises:
        OptionError: A value is of the wrong kind or out of range.
    """
    for field, kind, key in _fields(type(config), table):
        if not dataclasses.is_dataclass(kind):
            _check_value(key, getattr(config, field.name), kind, field.metadata)


def shortened(config: T, scale: float) -> T:
    """Return a config whose scaled options are multiplied by ``scale``; at least 1 epoch is left.

    Images, steps per epoch and rates stay as they are, and a schedule is run through in fewer epochs.
    """
    names = [field.name for field in dataclasses.fields(config) if field.metadata.get("scaled")]  # type: ignore[arg-type]
    changes = {name: max(1, round(scale * getattr(config, name))) for name in names}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def parse(cls: type[T], settings: Mapping[str, Scalar], table: str = "") -> T:
    """Build a config from flat settings; absent keys keep their default.

    Args:
        cls: The config dataclass.
        settings: ``key -> value``; only keys that belong to this config (see :func:`reject_unknown`).
        table: The name of its table; keys are looked up as ``table.key``.

    Raises:
        OptionError: A value is of the wrong kind or out of range.
    """
    values: dict[str, Any] = {}
    for field, kind, key in _fields(cls, table):
        if dataclasses.is_dataclass(kind):
            values[field.name] = parse(kind, settings, key)  # type: ignore[arg-type]
        elif key in settings:
            value = settings[key]
            # Flower's settings are TOML: a float may be written without a decimal point.
            value = float(value) if kind is float and type(value) is int and -WHOLE <= value < WHOLE else value
            _check_value(key, value, kind, field.metadata)
            values[field.name] = value
    return cls(**values)


def presets(table: Mapping[str, Mapping[str, Any]]) -> classmethod[Any, ..., Any]:
    """Return a config's class method ``preset(name, **changes)``, which builds the settings of a publication.

    Args:
        table: Preset name -> the fields that differ from the defaults.
    """

    def preset(config: type[T], name: str, **changes: Any) -> T:
        """Return the settings of a publication; ``changes`` override fields.

        Raises:
            OptionError: The name is unknown or a change is out of range.
        """
        if name not in table:
            raise OptionError(f"unknown preset {name!r} of {config.__name__}: known are {', '.join(table)}")
        return config(**{**table[name], **changes})

    return classmethod(preset)


WHOLE = 2**63  # the messages of Flower hold whole numbers below it
DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"


def check_device(device: str, where: str = "setting 'device'") -> None:
    """Check the name of a torch device; the machine need not have it.

    Args:
        device: The name.
        where: Where it stands, for the error.

    Raises:
        OptionError: The name is not that of a torch device.
    """
    if not DEVICES.fullmatch(device):
        raise OptionError(f"{where} is {device[:80]!r}: must be {DEVICE_NAMES}")


def flatten(config: Any, table: str = "") -> dict[str, Scalar]:
    """Return a config as flat settings, the inverse of :func:`parse`."""
    return dict(_values(config, table))


def reject_unknown(settings: Mapping[str, Scalar], known: Sequence[str]) -> None:
    """Refuse unknown settings.

    Raises:
        OptionError: A key is unknown; the message names the first one and the closest known key.
    """
    for key in sorted(settings):
        if key not in known:
            hint = meant(key, known).removeprefix("; ") or f"known are {_nearest(key, sorted(known))}"
            raise OptionError(f"unknown setting {key[:80]!r} (value {settings[key]!r:.80}): {hint}")


def _nearest(key: str, known: Sequence[str]) -> str:
    """Return the keys of the same table; of an unknown table, the keys without one and the names of all tables."""
    table, dot, _ = key.partition(".")
    same = [name for name in known if dot and name.startswith(f"{table}.")]
    tables = sorted({name.partition(".")[0] for name in known if "." in name})
    alone = [name for name in known if "." not in name]
    return ", ".join(same) if same else ", ".join(alone) + (f"; tables are {', '.join(tables)}" if tables else "")


def meant(word: str, known: Iterable[str]) -> str:
    """Return the end of an error line, "; did you mean 'alpha'?"; empty if no known word is close."""
    close = difflib.get_close_matches(word[:80], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _check_value(key: str, value: Any, kind: type, facts: Mapping[str, Any]) -> None:
    whole_float = kind is float and type(value) is int
    fits = (type(value) is kind or whole_float) and not (isinstance(value, float) and not math.isfinite(value))
    wide = type(value) is int and not -WHOLE <= value < WHOLE
    fits = fits and not wide
    low, high, above = facts.get("low"), facts.get("high"), facts.get("above")
    choices = facts.get("choices", ())
    if fits and not isinstance(value, str):
        fits = (low is None or value >= low) and (high is None or value <= high) and (above is None or value > above)
    if fits and choices:
        fits = value in choices if ":" not in value else OWN_FORM in choices and is_own(value)
    if not fits:
        hint = meant(value, choices) if isinstance(value, str) else ", of 64 bits" * wide
        raise OptionError(f"setting {key!r} is {value!r:.200}: must be {_allowed(kind, facts)}{hint}")


def _allowed(kind: type, facts: Mapping[str, Any]) -> str:
    if choices := facts.get("choices"):
        return "one of " + ", ".join(word if word == OWN_FORM else repr(word) for word in choices)
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}.get(kind, kind.__name__)
    limits = (("low", "at least"), ("above", "greater than"), ("high", "at most"))
    bounds = [f"{words} {facts[key]}" for key, words in limits if facts.get(key) is not None]
    return " ".join([name, " and ".join(bounds)]).strip()
