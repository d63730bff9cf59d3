from dataclasses import dataclass, field

import pytest

from strategies.core.errors import OptionError
from strategies.core.options import config_class, flatten, option, options_of, parse, reject_unknown


@config_class("inner")
class Inner:
    alpha: float = option(0.3, "skew", above=0.0)
    law: str = option("dirichlet", "law", choices=("dirichlet", "iid"))


@dataclass(frozen=True)
class Outer:
    seed: int = option(0, "seed", low=0)
    use_it: bool = option(True, "switch")
    inner: Inner = field(default_factory=Inner)


def test_parse_with_nested_tables_reads_kebab_keys() -> None:
    parsed = parse(Outer, {"seed": 3, "use-it": False, "inner.alpha": 1, "inner.law": "iid"})
    assert parsed == Outer(seed=3, use_it=False, inner=Inner(alpha=1.0, law="iid"))


def test_parse_of_flatten_returns_the_same_config() -> None:
    config = Outer(seed=9, inner=Inner(alpha=0.1))
    assert parse(Outer, flatten(config)) == config


@pytest.mark.parametrize(
    ("settings", "key", "allowed"),
    [
        ({"seed": -1}, "'seed'", "at least 0"),
        ({"seed": True}, "'seed'", "a whole number"),
        ({"seed": "7"}, "'seed'", "a whole number"),
        ({"seed": 2**63}, "'seed'", "a whole number at least 0, of 64 bits"),
        ({"inner.alpha": 10**400}, "'inner.alpha'", "a number greater than 0.0, of 64 bits"),
        ({"use-it": 1}, "'use-it'", "true or false"),
        ({"inner.alpha": 0.0}, "'inner.alpha'", "greater than 0.0"),
        ({"inner.alpha": float("nan")}, "'inner.alpha'", "a number"),
        ({"inner.law": "zipf"}, "'inner.law'", "one of 'dirichlet', 'iid'"),
        ({"inner.law": "caf\udce9"}, "'inner.law'", "not UTF-8: must be a text"),
    ],
)
def test_parse_of_a_bad_value_names_key_and_range(settings: dict[str, object], key: str, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse(Outer, settings)  # type: ignore[arg-type]
    assert key in str(caught.value)
    assert allowed in str(caught.value)


def test_a_word_that_is_close_to_an_allowed_one_is_suggested_and_another_is_not() -> None:
    with pytest.raises(OptionError, match=r"must be one of 'dirichlet', 'iid'; did you mean 'dirichlet'\?$"):
        parse(Outer, {"inner.law": "dirchlet"})
    with pytest.raises(OptionError, match=r"must be one of 'dirichlet', 'iid'$"):
        parse(Outer, {"inner.law": "zipf"})


def test_construction_with_a_bad_value_is_refused() -> None:
    with pytest.raises(OptionError, match="inner.law"):
        Inner(law="zipf")


def test_reject_unknown_names_the_closest_key() -> None:
    with pytest.raises(OptionError, match=r"'inner.alhpa'.*did you mean 'inner.alpha'"):
        reject_unknown({"inner.alhpa": 1}, [o.key for o in options_of(Outer)])


def test_options_of_lists_nested_options_in_order() -> None:
    assert [o.key for o in options_of(Outer)] == ["seed", "use-it", "inner.alpha", "inner.law"]
