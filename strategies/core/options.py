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
from typing import Any, Generic, TypeVar, dataclass_transform, get_type_hints

from .errors import OptionError

Scalar = bool | int | float | str
T = TypeVar("T")
OWN_FORM = "module:attribute of your own"
UNSET = ""  # the value of a setting that the method and its preset decide
QUICK = "quick"  # the default preset: minutes on a CPU
PUBLISHED = "published"  # the defaults as a config declares them
PRESET_NAMES = (QUICK, PUBLISHED, "paper", "published-code", "co-boosting", "fedsyn", "feddf")
LENGTHS = ("epochs", "rounds", "iterations")  # the options that tell how long a method works


def is_own(name: str) -> bool:
    """Return whether a name is one of the user's code, ``package.module:attribute``; others have no colon."""
    module, _, attribute = name.partition(":")
    return all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def listed(text: str) -> list[str]:
    """Return the names in a setting's text, which has commas between them."""
    return [name.strip() for name in text.split(",") if name.strip()]


# What may differ from the run that is resumed, replayed, or whose stored uploads another run uses.
RESUME, REPLAY, ADOPTION = "resume", "replay", "adoption"
ANYWHERE = (RESUME, REPLAY, ADOPTION)


def option(  # noqa: PLR0913  every rule on an option stands where the option is declared
    default: Any,
    help: str,  # noqa: A002  the word every command line uses
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] = (),
    scaled: bool = False,
    path: bool = False,
    free: Sequence[str] = (),
    private: tuple[Scalar, str] | None = None,
    never_private: Mapping[str, str] | None = None,
    main: bool = False,
    table: str = "",
    setting: bool = True,
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
        path: Whether it names a file or a folder, which the command line makes absolute.
        free: Where its value may differ from that of the run before: :data:`RESUME`, :data:`REPLAY`,
            :data:`ADOPTION`.
        private: The value that differential privacy requires, and why; None for any value.
        never_private: Values that exclude differential privacy -> why.
        main: Whether ``oneshot methods NAME`` shows it first.
        table: The table of its key, where methods share the option; empty for the config's own table.
        setting: Whether it has a key; False for a value in which publications differ, which only presets set.

    Returns:
        A dataclass field.
    """
    rules = {
        "help": help, "low": low, "high": high, "above": above, "choices": tuple(choices), "scaled": scaled,
        "path": path, "free": frozenset(free), "private": private, "never_private": dict(never_private or {}),
        "main": main, "table": table, "setting": setting,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=rules)


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
        default: Its default; :data:`UNSET` where the method and its preset decide.
        presets: Where the default is :data:`UNSET`: the name of a preset -> its value, in one method's config.
    """

    key: str
    kind: type
    default: Scalar
    help: str
    allowed: str
    rules: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    presets: Mapping[str, Scalar] = dataclasses.field(default_factory=dict, compare=False)

    def check(self, value: Scalar) -> None:
        """Refuse a value of the wrong kind, or out of range.

        Raises:
            OptionError: Names the key, the value and the range.
        """
        if not (value == UNSET == self.default):
            _check_value(self.key, value, self.kind, self.rules)

    def may_change(self, where: str) -> bool:
        """Whether its value may differ from that of the run before: on :data:`RESUME`, for example."""
        return where in self.rules.get("free", ())


def kebab(name: str) -> str:
    """Return a field's name as it is spelt in settings: ``min_uploads`` -> ``min-uploads``."""
    return name.replace("_", "-")


def options_of(config: type | Any, table: str = "") -> list[Option]:
    """List the options of a config type, nested tables included, in the order of their declaration.

    Args:
        config: The dataclass, or an instance whose values become the defaults.
        table: The name of its table; the keys are prefixed with it, except those of shared tables.
    """
    if isinstance(config, type):
        return list(_declared(config, table))
    values = dict(_values(config, table))
    return [dataclasses.replace(entry, default=values[entry.key]) for entry in _declared(type(config), table)]


def _read_options(config: type, table: str) -> tuple[Option, ...]:
    found: list[Option] = []
    for field, kind, key in _fields(config, table):
        rules = field.metadata
        if dataclasses.is_dataclass(kind):
            found += _declared(kind, key)
        elif rules.get("setting", True):
            chosen = {
                name: changes[field.name] for name, changes in presets_of(config).items() if field.name in changes
            }
            chosen = {**chosen, PUBLISHED: field.default} if chosen else {}
            default = UNSET if chosen else field.default
            found.append(Option(key, kind, default, rules.get("help", ""), _allowed(kind, rules), rules, chosen))
    return tuple(found)


def _read_fields(config: type, table: str) -> tuple[tuple[Any, Any, str], ...]:
    """Return every field of a config type, its type and its key."""
    kinds = get_type_hints(config)

    def key(field: Any) -> str:
        place = (field.metadata.get("table") or table) if table else ""
        return f"{place}.{kebab(field.name)}" if place else kebab(field.name)

    return tuple((field, kinds[field.name], key(field)) for field in dataclasses.fields(config))


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


def _check_values(config: Any, table: str) -> None:
    # A function of the module, because a user's config class travels to a Ray actor with what its methods name.
    for field, kind, key in _fields(type(config), table):
        if not dataclasses.is_dataclass(kind):
            _check_value(key, getattr(config, field.name), kind, field.metadata)


@dataclass_transform(frozen_default=True)
def config_class(table: str = "") -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass of options, each of which is checked when a config is made.

    Its ``__post_init__``, or that of a base, is called after that and checks what the values mean together.

    Args:
        table: The table of its keys, such as ``"dense"`` of ``dense.epochs``; empty for keys without one.

    Returns:
        A decorator; a config raises an OptionError for a value of the wrong kind or out of range.
    """

    def decorate(cls: type[T]) -> type[T]:
        further = getattr(cls, "__post_init__", None)

        def check(config: T) -> None:
            _check_values(config, table)
            if further is not None:
                further(config)

        cls.__post_init__ = check  # type: ignore[attr-defined]
        return dataclasses.dataclass(frozen=True)(cls)

    return decorate


def shortened(config: T, scale: float) -> T:
    """Return a config whose scaled options are multiplied by ``scale``; at least 1 epoch is left.

    Images, steps per epoch and rates stay as they are, and a schedule is run through in fewer epochs.
    """
    names = [field.name for field in dataclasses.fields(config) if field.metadata.get("scaled")]  # type: ignore[arg-type]
    changes = {name: max(1, round(scale * getattr(config, name))) for name in names}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def parse(cls: type[T], settings: Mapping[str, Scalar], table: str = "", preset: str | None = None) -> T:
    """Build a config from flat settings; absent keys keep their default.

    Args:
        settings: ``key -> value``; only keys that belong to this config (see :func:`reject_unknown`). The key of an
            option in a shared table may also be that of the config's own table, which wins, as in runs of before.
        preset: The preset whose values stand where a key is absent or :data:`UNSET`; None: the declared defaults, and
            no value is unset.

    Raises:
        OptionError: A value is of the wrong kind or out of range.
    """
    values = dict(presets_of(cls).get(preset, {})) if preset else {}
    for field, kind, key in _fields(cls, table):
        if dataclasses.is_dataclass(kind):
            values[field.name] = parse(kind, settings, key)  # type: ignore[arg-type]
            continue
        found = [name for name in (own_key(field.name, table), key) if name in settings]
        if preset:
            found = [name for name in found if settings[name] != UNSET]
        if found:
            value = settings[found[0]]
            # Flower's settings are TOML: a float may be written without a decimal point.
            value = float(value) if kind is float and type(value) is int and -WHOLE <= value < WHOLE else value
            _check_value(found[0], value, kind, field.metadata)
            values[field.name] = value
    return cls(**values)


def keys_of(config: type, table: str) -> set[str]:
    """Return every key that :func:`parse` reads of a config, those of values that only presets set too."""
    return {name for field, _, key in _fields(config, table) for name in (key, own_key(field.name, table))}


def moved_keys(config: type, table: str) -> dict[str, str]:
    """Return the keys of a config's own table -> those of the shared table that its options have."""
    keys = {own_key(field.name, table): key for field, _, key in _fields(config, table)}
    return {own: key for own, key in keys.items() if own != key}


def own_key(name: str, table: str) -> str:
    """Return a field's key in the table of its own config: ``generator_lr`` of "dense" -> ``dense.generator-lr``."""
    return f"{table}.{kebab(name)}" if table else kebab(name)


def presets(table: Mapping[str, Mapping[str, Any]]) -> classmethod[Any, ..., Any]:
    """Return a config's class method ``preset(name, **changes)``, which builds the settings of a preset.

    Args:
        table: Preset name -> the fields that differ from the declared defaults.
    """

    def preset(config: type[T], name: str, **changes: Any) -> T:
        """Return the settings of a preset; ``changes`` override fields.

        Raises:
            OptionError: The name is unknown or a change is out of range.
        """
        if name not in (known := (PUBLISHED, *table)):
            raise OptionError(f"unknown preset {name!r} of {config.__name__}: known are {', '.join(known)}")
        return preset_of(config, name, **changes)

    preset.table = table  # type: ignore[attr-defined]
    return classmethod(preset)


def presets_of(config: type) -> Mapping[str, Mapping[str, Any]]:
    """Return the presets of a config type: name -> the fields that differ from the declared defaults."""
    found: Mapping[str, Mapping[str, Any]] = getattr(getattr(config, "preset", None), "table", {})
    return found


def preset_of(config: type[T], name: str, **changes: Any) -> T:
    """Return a config under a preset; one without this preset has its declared defaults."""
    return config(**{**presets_of(config).get(name, {}), **changes})


def described(config: Any) -> str:
    """Return which preset a method's config is, and how much shorter than published: "quick: 24 epochs of 200".

    The name is that of a preset whose values all hold; it is empty for the declared defaults.
    """
    published, kind = type(config)(), type(config)
    if config == published:
        return ""
    names = [name for name, changes in presets_of(kind).items() if kind(**changes) == config]
    pairs = [(name, getattr(config, name), getattr(published, name)) for name in LENGTHS if hasattr(config, name)]
    shorter = ", ".join(f"{now} {name} of {then}" for name, now, then in pairs if now < then)
    return ": ".join(filter(None, [*names[:1], shorter]))


WHOLE = 2**63  # the messages of Flower hold whole numbers below it
DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DEVICE_NAMES = "auto, cpu, cuda, cuda:N or mps"


def check_device(device: str, where: str = "setting 'device'") -> None:
    """Check the name of a torch device; the machine need not have it.

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
    if isinstance(value, str) and value.encode(errors="replace").decode() != value:
        # A path's bytes; the run folder, its page and messages to clients are UTF-8.
        raise OptionError(f"setting {key!r} is {value!r:.200}, which is not UTF-8: must be a text")
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


# Former names of settings, which stored runs have: the one table of old and new names. A setting that methods share has
# its former key in each method's own table (``dense.batch-size`` is ``server.batch-size`` now); those keys follow from
# the declarations, see :func:`moved_keys`.
RENAMED: Mapping[str, str] = {
    "data.law": "data.partition",
    "f-adi.inversion-batch-size": "f-adi.synthesis-batch-size",
}
# What settings were that are fixed now -> their value. A stored run with another one of a method cannot be replayed by
# this method, and with another one of the app by none.
FIXED: Mapping[str, Scalar] = {
    "attack.poisoned": 0.3, "data.copies": 10.0, "features.map": "none", "flboost.moments": "none",
}  # fmt: skip
# Newer settings whose default is not how stored runs without them behaved -> how they did.
BEFORE: Mapping[str, Scalar] = {"server.teacher-precision": "float32"}
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
