from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from server_app.settings.catalogue import merge_settings, to_toml, with_absolute_paths
from server_app.settings.read import known_options
from strategies.core.errors import OptionError

KINDS = {option.key: option.kind for option in known_options()}
PATHS = [option.key for option in known_options() if option.rules["path"]]


def test_pairs_when_quoted_or_not_are_read_by_the_type_of_their_key() -> None:
    text = "method=fedens run-dir='my runs/a' data.name=\"mnist\" seed=3 data.alpha=0.5 client.share-label-counts=false"

    assert merge_settings([text], KINDS) == {
        "method": "fedens",
        "run-dir": "my runs/a",
        "data.name": "mnist",
        "seed": 3,
        "data.alpha": 0.5,
        "client.share-label-counts": False,
    }


@pytest.mark.parametrize("text", ["5", "true", "0.25", "a=b", ""])
def test_a_text_when_it_looks_like_something_else_stays_a_text(text: str) -> None:
    assert merge_settings([f"run-dir={text}"], KINDS) == {"run-dir": text}


def test_a_value_that_is_no_toml_is_kept_as_it_is_for_the_check_to_name() -> None:
    assert merge_settings(["seed=three"], KINDS) == {"seed": "three"}
    assert merge_settings(["seed=[1,2]"], KINDS) == {"seed": "[1,2]"}


def test_files_and_pairs_when_both_are_given_the_later_wins(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text('seed = 1\nmethod = "dense"\n[server]\nepochs = 7\nkd-temperature = 4.0\n[data]\nalpha = 0.1\n')

    first = merge_settings([str(file), "seed=2 server.epochs=8", "seed=3"], KINDS)
    last = merge_settings(["seed=2", str(file)], KINDS)

    assert first == {"seed": 3, "method": "dense", "server.epochs": 8, "server.kd-temperature": 4.0, "data.alpha": 0.1}
    assert last["seed"] == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data.alpa=0.1", r"unknown setting 'data.alpa' \(value '?0.1'?\): did you mean 'data.alpha'\?"),
        ("zzzzzz=1", r"'zzzzzz' \(value 1\): known are checkpoint-s, .*, uploads; tables are attack, .*"),
        ("ridge.zzzzzz=1", r"'ridge.zzzzzz' \(value 1\): known are ridge.penalty, ridge.values"),
        ("seed", r"setting 'seed' is not a pair: must be key=value"),
        ("run-dir='open", r"cannot be read: No closing quotation"),
        # The contents of a file.
        (b"seed = [1, 2]\n", r"some.toml: seed is list: must be true/false, a number or a text"),
        (b"[data]\nalpha = 2026-01-01\n", r"some.toml: data.alpha is date: must be"),
        (b"seed = \n", r"some.toml is not TOML: "),
        (b"run-dir = '\xff'\n", r"some.toml is not TOML: "),
        (b"[data]\nalpa = 1.0\n", r"unknown setting 'data.alpa'"),
    ],
)
def test_invalid_pairs_and_files_are_refused_in_one_line(tmp_path: Path, source: str | bytes, message: str) -> None:
    if isinstance(source, bytes):
        (tmp_path / "some.toml").write_bytes(source)
        source = str(tmp_path / "some.toml")

    with pytest.raises(OptionError, match=message):
        merge_settings([source], KINDS)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    file.write_text("seed = 3\n", encoding="utf-8-sig")

    assert merge_settings([str(file)], KINDS) == {"seed": 3}


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"absent.toml cannot be read: No such file"):
        merge_settings([str(tmp_path / "absent.toml")], KINDS)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(OptionError, match=r"folder.toml cannot be read: Is a directory"):
        merge_settings([str(tmp_path / "folder.toml")], KINDS)


def test_pairs_may_end_in_the_name_of_a_file() -> None:
    assert merge_settings(["seed=2 client.nodes=nodes/a.toml"], KINDS) == {"seed": 2, "client.nodes": "nodes/a.toml"}
    with pytest.raises(OptionError, match="settings file alpha=0.1/absent.toml cannot be read: No such file"):
        merge_settings(["alpha=0.1/absent.toml"], KINDS)


@pytest.mark.parametrize("value", [True, False, 0, -3, 0.1, 1e-05, 1e300, "", "plain", 'a "quoted" \\ path', "ü"])
def test_a_value_when_written_as_toml_reads_back_equal(value: bool | float | str) -> None:
    back = tomllib.loads(f"value = {to_toml(value)}")["value"]

    assert back == value
    assert type(back) is type(value)


def test_a_file_of_conf_is_found_outside_a_clone_and_an_own_one_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "short.toml").write_text("[server]\nepochs = 1\n")

    assert merge_settings(["conf/short.toml"], KINDS) == {"server.epochs": 1}
    assert merge_settings(["conf/tally-spans.toml"], KINDS)["tally.spanned"] == 8192
    with pytest.raises(OptionError, match="conf/none.toml cannot be read"):
        merge_settings(["conf/none.toml"], KINDS)


def test_paths_when_relative_are_those_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "data.root": "sets",
        "data.proxy-file": "images.safetensors",
        "features.weights": "backbone.pt",
        "client.checkpoint": "models/{client}.pt",
        "client.state-dir": "",
        "data.name": "mnist",
    }

    assert with_absolute_paths(given, PATHS) == {
        **given,
        "data.root": str(tmp_path / "sets"),
        "data.proxy-file": str(tmp_path / "images.safetensors"),
        "features.weights": str(tmp_path / "backbone.pt"),
        "client.checkpoint": str(tmp_path / "models/{client}.pt"),
    }
    assert with_absolute_paths({"data.root": "/data"}, PATHS) == {"data.root": "/data"}
