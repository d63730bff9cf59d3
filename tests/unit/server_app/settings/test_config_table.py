from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from server_app.settings.catalogue import CATALOGUE, catalogue, merge_settings
from server_app.settings.choices import CHOICES
from server_app.settings.config_table import PYPROJECT, catalogue_text, config_table, with_config_table
from server_app.settings.read import default_settings, known_options
from strategies.core.errors import OptionError
from strategies.core.options import Option, options_of


def test_pyproject_holds_the_table_that_make_config_writes() -> None:
    text = PYPROJECT.read_text()

    assert config_table().strip() in text, "pyproject.toml is stale: run `make config`"
    assert with_config_table(text) == text, "pyproject.toml is stale: run `make config`"


def test_catalogue_is_the_one_that_make_config_writes() -> None:
    assert CATALOGUE.read_text() == catalogue_text(), "the catalogue is stale: run `make config`"


def test_catalogue_when_read_has_the_options_of_the_dataclasses_and_their_checks() -> None:
    found = catalogue()

    assert tuple(found.options.values()) == known_options()
    assert [option.presets for option in found.options.values()] == [option.presets for option in known_options()]
    for option in known_options():
        own = found.options[option.key]
        for value in (option.default, -1.5, "no such word", True):
            assert refusal(own, value) == refusal(option, value)


def refusal(option: Option, value: bool | float | str) -> str:
    try:
        option.check(value)
    except OptionError as error:
        return str(error)
    return ""


def test_the_table_has_every_key_with_its_default_and_a_comment_behind(tmp_path: Path) -> None:
    head, _, *lines = config_table().splitlines()

    assert head == "[tool.flwr.app.config]"
    assert [line.split(" = ")[0] for line in lines] == list(default_settings())
    assert all("  # " in line and "; " in line for line in lines)
    assert [option.key for option in known_options()] == list(default_settings())
    (tmp_path / "table.toml").write_text("\n".join(lines))
    read = merge_settings([str(tmp_path / "table.toml")], {option.key: option.kind for option in known_options()})
    assert read == default_settings()
    assert all(type(read[key]) is type(value) for key, value in default_settings().items())


def test_other_sections_when_the_table_is_written_stay_as_they_are() -> None:
    before = '[a]\nx = 1\n\n[tool.flwr.app.config]\nold = 1\nolder = "[b]"\n\n[b]\ny = 2\n'

    after = with_config_table(before)

    assert after.startswith("[a]\nx = 1\n\n[tool.flwr.app.config]\n")
    assert after.endswith("\n\n[b]\ny = 2\n")
    assert "old" not in tomllib.loads(after)["tool"]["flwr"]["app"]["config"]
    assert with_config_table(after) == after


def test_every_former_key_says_what_to_write_and_is_refused() -> None:
    former, listed = catalogue().former, default_settings()

    assert former["dense.batch-size"] == "'server.batch-size' now"
    assert former["dense.keep-images"] == "a value of the method's preset, which no setting changes"
    assert former["data.law"] == "'data.partition' now"
    assert not former.keys() & listed.keys()
    keys = {line.split("'")[1] for key, line in former.items() if line.endswith("now") and "=" not in key}
    assert keys <= listed.keys()
    with pytest.raises(OptionError, match=r"^setting 'dense.batch-size' is 'server.batch-size' now$"):
        catalogue().settings(["dense.batch-size=3"])
    line = r"^setting 'data.partition' is 'classes-p1', which is 'classes-equal-size' now$"
    with pytest.raises(OptionError, match=line):
        catalogue().settings(["data.partition=classes-p1"])


def test_each_method_shows_at_most_five_options_first() -> None:
    assert all(sum(o.rules["main"] for o in options_of(CHOICES[name].config, name)) <= 5 for name in CHOICES)
