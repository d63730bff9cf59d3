"""The settings of the papers' tables: every row that their commands run, compared with the papers' values."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from doc_pages import CONF, ROOT, commands, name_of

from fl_app.data import GROUPS
from fl_app.data.tables import FEATURES
from fl_app.data.text import CLASSES, LENGTH
from fl_app.data.torchvision_sets import KNOWN
from fl_app.models import builders
from server_app.settings.catalogue import merge_settings
from server_app.settings.choices import CHOICES
from server_app.settings.read import Settings, known_options, overridden, read_settings
from strategies.core.options import flatten
from strategies.methods.co_boosting import CoBoostingConfig

KINDS = {o.key: o.kind for o in known_options()}
PAPERS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "paper_values.toml").read_text())
TABLES = [path for path in CONF if path.stem in PAPERS["tables"]]
SHORT = [path for path in CONF if path.stem.startswith("flboost-short")]
OURS = (
    "short",
    "tally-long",
    "tally-spans",
    "fmnist-short",
    "fens-deployment",
    "privacy-digits",
    *(path.stem for path in SHORT),
)
PUBLISHED = [path for path in CONF if path.stem not in OURS]
# Data set in the name of the file -> data.name.
DATA = {"fmnist": "fashion-mnist"}
# data.name of examples that are no images -> classes, shape.
OTHERS = {"heart-disease": (2, (FEATURES, 1, 1)), "ag-news": (len(CLASSES), (1, 1, LENGTH))}


def given_by(*paths: Path) -> dict[str, Any]:
    return dict(merge_settings([str(path) for path in paths], KINDS))


def settings_of(*paths: Path) -> Settings:
    return read_settings(given_by(*paths))


def sources_of(words: list[str]) -> list[str]:
    """Return the files and pairs of settings that a command names."""
    named = [words[place + 1] for place, word in enumerate(words) if word in ("--run-config", "--set")]
    return [str(ROOT / source) if source.endswith(".toml") else source for source in named]


@cache
def runs_by(path: Path) -> list[tuple[int, Settings]]:
    """Return the clients and the settings of every row that a file's commands run, compare or replay, in order."""
    given, clients, found = {}, 0, list[tuple[int, Settings]]()
    for words in commands(path):
        if words[1] == "run":
            given, clients = merge_settings(sources_of(words), KINDS), int(words[words.index("--num-supernodes") + 1])
            found.append((clients, read_settings(given)))
        if words[1] in ("compare", "replay"):
            named = [words[place + 1] for place, word in enumerate(words) if word in ("--methods", "--method")]
            for method in named[0].split(",") if named else [given["method"]]:
                changes = {**merge_settings(sources_of(words), KINDS), "method": method}
                found.append((clients, read_settings(overridden(given, changes))))
    return found


def name_of_row(settings: Settings) -> str:
    config = settings.method_config
    return settings.choice.name if settings.method else f"{config.strategy} {config.refiner}"


def wanted_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each row of a table, and its values by the paper."""
    table = PAPERS["tables"][name]
    rows = table["rows"]
    for row, *more in PAPERS["tables"][rows]["rows"] if isinstance(rows, str) else rows:
        values: dict[str, Any] = {}
        for part in (*table["sets"], table["values"], *more):
            values |= PAPERS["sets"][part] if isinstance(part, str) else part
        yield row, values


def test_every_table_has_its_papers_values() -> None:
    files = {path.stem for path in CONF if re.search(r"-(table\d+|rows|paper|iterative|agnews)\b", path.stem)}
    assert files == PAPERS["tables"].keys()


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_every_row_that_a_table_s_commands_run_has_the_paper_s_values(path: Path) -> None:
    found, wanted = runs_by(path), list(wanted_rows(path.stem))
    assert [name_of_row(settings) for _, settings in found] == [name for name, _ in wanted]
    for (clients, settings), (name, values) in zip(found, wanted, strict=True):
        has = {"clients": clients, **flatten(settings.app), **settings.options}
        assert {key: has[key] for key in values if key in has} == {key: values[key] for key in values if key in has}, (
            name
        )


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_a_table_sets_nothing_that_its_paper_s_values_lack(path: Path) -> None:
    stated = {key for _, values in wanted_rows(path.stem) for key in values}
    for _, settings in runs_by(path):
        known = stated | {"method", "preset", "iterative.strategy", "iterative.refiner"}
        assert given_by(path).keys() & {**flatten(settings.app), **settings.options}.keys() <= known


def test_every_value_of_the_papers_is_compared_with_some_row() -> None:
    compared = {
        key
        for path in TABLES
        for (_, settings), (_, values) in zip(runs_by(path), wanted_rows(path.stem), strict=True)
        for key in values
        if key in {"clients": 0, **flatten(settings.app), **settings.options}
    }
    stated = {key for name in PAPERS["tables"] for _, values in wanted_rows(name) for key in values}
    assert stated - compared == set()


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_rows_of_one_table_train_alike(path: Path) -> None:
    # What a paper gives to all of its rows: a rival with other images, epochs or arithmetic would be no comparison.
    shared = {f"server.{key}-precision" for key in ("generator", "teacher")}
    shared |= {"server.pool-augmentation", "server.batch-size", "server.student-lr"}
    students = ("co-boosting", "dense", "f-dafl", "f-adi")
    rows = [settings for _, settings in runs_by(path) if settings.choice.name in students]
    for key in shared if path.stem.startswith(("coboosting", "fedsyn")) else ():
        values = {
            str(one.options[key]) for one in rows if key in one.options and one.app.data.name == rows[0].app.data.name
        }
        assert len(values) == 1, key


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_settings_that_a_header_names_in_its_text_exist(path: Path) -> None:
    header = path.read_text().partition("\n\n")[0].replace("\n# ", " ")
    for pairs in re.findall(r'"([a-z0-9.-]+=[^"$]*)"', header):
        merge_settings([pairs], KINDS)


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_names_architectures_that_take_its_images(path: Path) -> None:
    app = runs_by(path)[0][1].app
    if known := KNOWN.get(app.data.name):
        classes, channels, size = known.num_classes, known.channels, known.image_size
    elif group := GROUPS.get(app.data.name):
        classes, channels, size = group.num_classes, 3, group.image_size
    else:
        classes, channels, size = 200, 3, 0
    size = app.data.image_size or size
    models = builders(*OTHERS.get(app.data.name, (classes, (channels, size, size))))
    assert {*app.model.mix(), app.model.of_student()} <= models.keys()


def test_release_of_dense_under_the_preset_of_its_tables_comment_has_its_student_s_values() -> None:
    given = given_by(ROOT / "conf" / "fedsyn-table1-cifar10.toml")
    release = read_settings({**given, "preset": "published-code"}).method_config
    assert replace(release, generator_precision="auto") == CHOICES["dense"].config.preset("published-code")


# Of FedCVAE-Ens, its authors' best runs: local epochs, length of the noise, images, epochs of the classifier.
BEST = {
    "mnist": (15, 10, 5000, 10),
    "fmnist": (25, 10, 5000, 5),
    "svhn": (50, 10, 5000, 5),
    "cifar10": (100, 25, 7500, 5),
}


@pytest.mark.parametrize("path", [path for path in CONF if path.stem.startswith(("fedov", "fedcvae"))], ids=name_of)
def test_file_of_other_uploads_sets_the_published_values_behind_the_table_of_its_command(path: Path) -> None:
    [run] = [words for words in commands(path) if words[1] == "run"]
    alone, behind = settings_of(path), settings_of(*(ROOT / word for word in run if word.endswith(".toml")))
    data = path.stem.rpartition("-")[2]
    assert (alone.app.client.optimizer, alone.app.client.lr) == ("adam", 0.001)
    if path.stem == "fedov":
        assert (alone.app.client.batch_size, alone.app.client.epochs) == (64, 200)
        assert alone.method_config == CHOICES["fedov"].config()
    else:
        epochs, latent, images, server_epochs = BEST[data]
        client = alone.app.client
        assert (client.batch_size, client.epochs, client.latent) == (32, epochs, latent)
        assert alone.method_config == CHOICES["fedcvae-ens"].config(images=images, epochs=server_epochs)
        assert alone.app.data.limit == (30_000 if data in ("mnist", "fmnist") else 0)  # half of the images
        assert behind.app.data.name == DATA.get(data, data)
    assert (behind.app.client.schedule, behind.method_config) == ("constant", alone.method_config)
    same = {key: behind.flat[key] for key in given_by(path)}
    assert same == given_by(path)


def test_script_of_the_release_behind_a_table_has_its_clients_and_its_server() -> None:
    found = settings_of(ROOT / "conf/coboosting-table1-cifar10.toml", ROOT / "conf/coboosting-published-script.toml")

    assert found.method_config == CoBoostingConfig.preset("published-code", generator_precision="float32")
    app = found.app
    assert (app.data.alpha, app.client.epochs, app.client.batch_size, app.seed) == (0.6, 100, 128, 42)
    assert app.model.name == "cnn5"


@pytest.mark.parametrize("path", [path for path in CONF if path.stem.startswith("fafi")], ids=name_of)
def test_file_of_encoders_has_the_published_optimiser_and_the_overlapping_clients_only_where_it_stands_alone(
    path: Path,
) -> None:
    client, data = settings_of(path).app.client, settings_of(path).app.data
    assert (client.optimizer, client.lr, client.momentum, client.clip) == ("sgd", 0.05, 0.9, 1.0)
    assert (client.whole_batches, client.momentum_epochs, client.weight_decay) == (True, 1, 0.0)
    alone = path.stem == "fafi-cifar10"
    assert (client.batch_size, client.epochs) == ((512, 300) if alone else (128, 60))
    assert data.partition == ("dirichlet-overlap" if alone else "dirichlet-classes")
    assert (client.views, settings_of(path).method_config.bn) == (
        ("batch", "test-batch") if alone else ("image", "running")
    )


@pytest.mark.parametrize("path", SHORT, ids=name_of)
def test_short_file_of_flboost_differs_from_the_paper_as_it_states(path: Path) -> None:
    short, paper = settings_of(path), settings_of(ROOT / "conf" / "flboost-table1-cifar10.toml")
    shorter = {"rounds": 20, "strategy": "fedavg", "refiner": "none"}
    assert short.method_config == replace(paper.method_config, **shorter)
    shared = ("epochs", "batch_size", "lr", "momentum", "weight_decay", "clip", "optimizer", "schedule", "augmentation")
    assert [getattr(short.app.client, key) for key in shared] == [getattr(paper.app.client, key) for key in shared]
    data = short.app.data
    assert (data.partition, data.alpha, data.limit) == (paper.app.data.partition, 0.1, 100 * 500)
    tried = {
        "adversarial_weight": 0.1,
        "generator_step": "joint",
        "generator_steps": 3,
        "student_lr": 0.05,
        "per_class": False,
        "ce_form": "per-sample",
        "generator_precision": "auto",
    }
    refiners = [run.refiner for _, run in runs_by(path) if run.refiner is not None]
    assert [refiner.config for refiner in refiners] == [replace(paper.refiner.config, **tried)] * 2
    rows = ["fedavg none", "fedavg flboost", "scaffold none", "scaffold flboost"]
    assert [name_of_row(run) for _, run in runs_by(path)] == rows


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_published_file_begins_with_its_table_its_commands_and_its_length(path: Path) -> None:
    comment = path.read_text().partition("\n\n")[0]
    assert re.search(r"https://(arxiv\.org/abs/\d|openreview\.net/forum)", comment)
    assert re.search(r"\b(Long|Short), ", comment.replace("\n# ", " "))
    run, *_ = commands(path)
    assert run[:2] == ["oneshot", "run"]
    assert name_of(path) in run
    behind = [Path(word).stem for word in run if "-table" in word and word != name_of(path)]
    if path in TABLES:
        assert re.search(r"\b(Tables?|tables|Figure|text)\b", comment)
        assert behind or re.search(r"iterative\.rounds=\d+|scale=0\.1", comment)
    else:
        assert len(behind) == ("data.name" not in given_by(path))  # with its own data set it stands alone
        clients = int(run[run.index("--num-supernodes") + 1])
        assert [next(wanted_rows(table))[1]["clients"] for table in behind] in ([], [clients])


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_a_table_says_what_it_takes_on_two_cores_and_on_a_gpu(path: Path) -> None:
    header = path.read_text().partition("\n\n")[0].replace("\n# ", " ")
    cost = re.split(r"\b(?:Long|Short), ", header)[-1]
    if " the table " in cost:  # which it is put before or behind: that one says it
        run, *_ = commands(path)
        table = next(word for word in run if "-table" in word and word != name_of(path))
        assert cost.startswith("as the table ")
        assert ROOT / table in TABLES
        return
    assert re.search(r"\b(estimated|measured)\b", cost)
    amount = r"(\d|\ban?\b|\bsome\b)[^;:]*\b(second|minute|hour)s?\b"
    cores, gpu = cost.split("one H100")
    assert "two cores" in cores
    assert re.search(amount, cores)
    assert re.search(amount, gpu)


@pytest.mark.parametrize("path", CONF, ids=name_of)
def test_conf_file_is_read_and_begins_with_a_comment(path: Path) -> None:
    assert settings_of(path).choice.name
    assert path.read_text().startswith("# ")
