"""The settings of the papers' tables: they parse, and say what the method's presets say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from doc_pages import CONF, commands, name_of

from fl_app.data.torchvision_sets import KNOWN
from fl_app.models import builders
from server_app.build import Settings, known_options, read_settings
from server_app.settings_text import merge_settings
from strategies.dense import DenseConfig

KINDS = {o.key: o.kind for o in known_options()}
PARTS = {"dense-paper": "paper", "dense-published-code": "published-code"}
TABLES = [path for path in CONF if "-table" in path.stem]
PUBLISHED = [path for path in CONF if path in TABLES or path.stem in PARTS]
# Data set in the name of the file -> data.name.
DATA = {"fmnist": "fashion-mnist"}


def settings_of(*paths: Path) -> Settings:
    return read_settings(merge_settings([str(path) for path in paths], KINDS))


def wanted_dense(path: Path) -> DenseConfig:
    changes: dict[str, Any] = {}
    if path.stem.startswith("fedsyn"):
        return DenseConfig.preset("default", rounds=5 if "table5" in path.stem else 1)
    if "cifar" not in path.stem:
        changes["pool_augmentation"] = "none"
    return DenseConfig.preset("co-boosting", **changes)


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_sets_the_published_values(path: Path) -> None:
    settings = settings_of(path)
    app = settings.app
    paper, table, data = path.stem.split("-")
    assert settings.method_config == wanted_dense(path)
    assert app.data.name == DATA.get(data, data)
    assert (app.client.batch_size, app.client.lr, app.client.momentum) == (128, 0.01, 0.9)
    if paper == "coboosting":
        assert (app.client.epochs, app.client.clip) == (300, 10.0)
        assert app.data.law == ("classes" if table == "table5" else "dirichlet-classes")
    else:
        assert (app.client.epochs, app.client.clip) == (10 if table == "table5" else 200, 0.0)
        assert app.data.law == "dirichlet-clients"


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_names_architectures_that_take_its_images(path: Path) -> None:
    app = settings_of(path).app
    known = KNOWN[app.data.name]
    size = app.data.image_size or known.image_size
    models = builders(known.num_classes, (known.channels, size, size))
    assert {*app.model.mix(), app.model.of_student()} <= models.keys()


@pytest.mark.parametrize("path", [path for path in CONF if path.stem in PARTS], ids=name_of)
def test_part_file_is_the_preset_whatever_it_is_combined_with(path: Path) -> None:
    preset = DenseConfig.preset(PARTS[path.stem])
    assert settings_of(path).method_config == preset
    for other in TABLES:
        combined = settings_of(other, path)
        assert combined.method_config == preset
        assert combined.app == settings_of(other).app


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_published_file_begins_with_its_table_its_command_and_its_length(path: Path) -> None:
    comment = path.read_text().partition("\n\n")[0]
    assert re.search(r"https://arxiv\.org/abs/\d", comment)
    assert re.search(r"\bLong: ", comment.replace("\n# ", " "))
    if path in TABLES:
        assert "Table" in comment
    [words] = commands(path)
    assert name_of(path) in words
    clients = 5 if path.stem.startswith(("fedsyn", "dense", "coboosting-table3")) else 10
    assert words[words.index("--num-supernodes") + 1] == str(clients)


@pytest.mark.parametrize("path", CONF, ids=name_of)
def test_conf_file_is_read_and_begins_with_a_comment(path: Path) -> None:
    assert settings_of(path).method.name
    assert path.read_text().startswith("# ")
