"""The settings of the papers' tables: they are read, hold what they must and no more, and say what the papers say."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from doc_pages import CONF, ROOT, commands, name_of

from fl_app.data import GROUPS
from fl_app.data.tables import FEATURES
from fl_app.data.text import CLASSES, LENGTH
from fl_app.data.torchvision_sets import KNOWN
from fl_app.models import builders
from server_app.settings.choices import CHOICES
from server_app.settings.read import Settings, default_settings, known_options, read_settings
from server_app.settings.text import merge_settings
from strategies.core.options import parse
from strategies.methods.co_boosting import CoBoostingConfig
from strategies.methods.dense import DenseConfig
from strategies.methods.fed_gen import FedGenConfig
from strategies.rounds.refinement import Refiner

KINDS = {o.key: o.kind for o in known_options()}
ROWS = {paper: ROOT / "conf" / f"{paper}-rows.toml" for paper in ("fens", "flboost")}
FIGURES = ("fens-agnews",)  # files of a figure
TABLES = [path for path in CONF if "-table" in path.stem or path.stem in FIGURES]
FEDSYN = [path for path in TABLES if path.stem.startswith("fedsyn")]
FENS = [path for path in TABLES if path.stem.startswith("fens")]
FLBOOST = [path for path in TABLES if path.stem.startswith("flboost")]
SHORT = [path for path in CONF if path.stem.startswith("flboost-short")]
# Paper -> the method that a file of its tables runs.
RUN = {"coboosting": "co-boosting", "fedsyn": "dense", "fens": "fens", "flboost": "iterative"}
PRESET = {"coboosting": "co-boosting", "fedsyn": "fedsyn", "fens": "published", "flboost": "published"}
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
MIX_P1, MIX_P2 = "cnn5,cnn-torch,resnet18,mobilenet,shufflenet", "resnet18,cnn1,cnn5,wrn16-1,wrn40-1"


@dataclass(frozen=True)
class Table:
    """What a paper says about one of its tables; the column that the file is."""

    clients: int
    alpha: float
    model: str
    law: str
    more: dict[str, Any]


def p1(clients: int, alpha: float, model: str, law: str = "dirichlet-classes", **more: Any) -> Table:
    return Table(clients, alpha, model, law, {"client.epochs": 300, "client.clip": 10.0, **_keys(more)})


def p2(clients: int, alpha: float, model: str, **more: Any) -> Table:
    return Table(clients, alpha, model, "dirichlet-clients", {"client.epochs": 200, "client.clip": 0.0, **_keys(more)})


def p3(clients: int, alpha: float, model: str, **more: Any) -> Table:
    local = {
        "client.epochs": 500, "client.batch-size": 16, "client.lr": 0.0025, "client.momentum": 0.0, "client.clip": 0.0,
        "client.schedule": "cosine", "client.final-lr": 0.001, "client.init": "different",
    }  # fmt: skip
    return Table(clients, alpha, model, "dirichlet-clients", {**local, **_keys(more)})


def p4(alpha: float, model: str = "resnet18-imagenet", **more: Any) -> Table:
    """The row FLBoost, which is SCAFFOLD with FLBoost. T = 1000 rounds of 10 of 100 clients, unless said."""
    local = {
        "client.epochs": 5, "client.steps": 50, "client.batch-size": 50, "client.lr": 0.1, "client.momentum": 0.0,
        "client.weight-decay": 0.001, "client.clip": 10.0, "client.augmentation": "none",
        "data.normalization": "data-set", "flboost.per-class": True,
        "iterative.strategy": "scaffold", "iterative.refiner": "flboost", "iterative.rounds": 1000,
        "iterative.fraction": 0.1, "iterative.lr-decay": 0.998,
    }  # fmt: skip
    return Table(100, alpha, model, "dirichlet-shuffled", {**local, **_keys(more)})


def _keys(more: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", ".").replace("_", "-"): value for key, value in more.items()}


# Where a paper does not say it (alpha of a law that has none), the app's default.
PAPERS = {
    "coboosting-table1-mnist": p1(10, 0.1, "lenet5"),
    "coboosting-table1-fmnist": p1(10, 0.1, "lenet5"),
    "coboosting-table1-svhn": p1(10, 0.1, "cnn5"),
    "coboosting-table1-cifar10": p1(10, 0.1, "cnn5"),
    "coboosting-table1-cifar100": p1(10, 0.1, "cnn5"),
    "coboosting-table3-cifar10": p1(5, 0.1, MIX_P1, model__student="resnet18"),
    "coboosting-table4-cifar10": p1(10, 0.1, "cnn5", "lognormal", data__sigma=0.4),
    "coboosting-table5-cifar10": p1(10, 0.3, "cnn5", "classes", data__classes_per_client=2, fedavg__weights="uniform"),
    "coboosting-table6-cifar10": p1(20, 0.1, "cnn5"),
    "coboosting-table7-svhn": p1(10, 0.05, "cnn5"),
    "coboosting-table7-cifar10": p1(10, 0.05, "cnn5"),
    "coboosting-table12-tiny": p1(10, 0.1, "resnet18", data__image_size=64),
    "coboosting-table13-digits": p1(
        3, 0.3, "cnn5", "domains", data__left_out="mnist", fedavg__weights="uniform",
        client__augmentation="resized-crop-flip",
    ),
    "coboosting-table14-pacs": p1(
        3, 0.3, "resnet18", "domains", data__left_out="photo", data__image_size=64, fedavg__weights="uniform",
        client__augmentation="resized-crop-flip",
    ),
    "coboosting-table16-svhn": p1(10, 0.05, "cnn5", client__sam_rho=0.05),
    "coboosting-table16-cifar10": p1(10, 0.05, "cnn5", client__sam_rho=0.05),
    "coboosting-table17-cifar10": p1(10, 0.05, "vgg11"),
    "fedsyn-table1-mnist": p2(5, 0.1, "mnist-cnn", data__image_size=28),
    "fedsyn-table1-fmnist": p2(5, 0.1, "mnist-cnn", data__image_size=28),
    "fedsyn-table1-svhn": p2(5, 0.1, "cnn5"),
    "fedsyn-table1-cifar10": p2(5, 0.1, "cnn5"),
    "fedsyn-table1-cifar100": p2(5, 0.1, "cnn5-wide"),
    "fedsyn-table1-tiny": p2(5, 0.1, "resnet18", data__image_size=64, client__augmentation="rotate-flip"),
    "fedsyn-table2-cifar10": p2(5, 0.1, "cnn5", client__loss="ldam"),
    "fedsyn-table3-cifar10": p2(5, 0.1, MIX_P2, model__student="resnet18"),
    "fedsyn-table4-cifar10": p2(10, 0.5, "cnn5"),
    "fedsyn-table5-cifar10": p2(5, 0.1, "cnn5", client__epochs=10, dense__rounds=5),
    "fedsyn-table6-cifar10": p2(5, 0.5, "cnn5"),
    "fens-table1-cifar10": p3(
        20, 0.1, "resnet8", data__proxy_name="cifar100", fens__rounds=500, fens__server_lr=0.001
    ),
    "fens-table1-cifar100": p3(
        20, 0.1, "resnet8", fens__aggregator="per-class", fens__rounds=1000, fens__server_lr=0.003,
        data__min_size=100,
    ),
    "fens-table1-svhn": p3(
        20, 0.1, "resnet8", client__epochs=50, client__lr=0.01, fens__rounds=500, fens__client_lr=0.1,
        fens__server_lr=0.01, client__augmentation="flip",
    ),
    "fens-table4-cifar10": p3(
        20, 0.1, "resnet8-ds", fens__rounds=500, fens__server_lr=0.001, fens__precision="float32"
    ),
    "fens-table14-heart": Table(4, 0.3, "logistic", "domains", {
        "client.epochs": 50, "client.batch-size": 4, "client.optimizer": "adam", "client.lr": 0.001, "client.clip": 0.0,
        "fens.aggregator": "per-class", "fens.rounds": 50, "fens.local-steps": 5,
        "fens.batch-size": 2, "fens.client-lr": 0.1, "fens.server-lr": 0.1, "fens.holdout-per-class": True,
        "fens.precision": "float32", "client.init": "different",
    }),
    "flboost-table1-cifar10": p4(0.6),
    "flboost-table1-cifar100": p4(0.6, flboost__latent=256, fed_gen__latent=256),
    "flboost-table3-cifar10": p4(0.6),
    "flboost-table4-cifar10": p4(0.3, iterative__rounds=500),
    "flboost-table6-cifar10": p4(0.3, "vgg11"),
    # Local training is our choice; the server's values are the default.
    "fens-agnews": Table(10, 0.1, "text-bag", "dirichlet-clients", {
        "client.epochs": 10, "client.batch-size": 32, "client.optimizer": "adam", "client.lr": 0.001,
        "client.clip": 0.0, "data.proxy": 0.4, "data.min-size": 4, "fens.rounds": 500, "fens.server-lr": 0.001,
    }),
}  # fmt: skip
# Data set in the name of the file -> data.name.
DATA = {
    "fmnist": "fashion-mnist",
    "tiny": "imagefolder",
    "digits": "domain-digits",
    "heart": "heart-disease",
    "agnews": "ag-news",
}
# data.name of examples that are no images -> classes, shape.
OTHERS = {"heart-disease": (2, (FEATURES, 1, 1)), "ag-news": (len(CLASSES), (1, 1, LENGTH))}


def given_by(*paths: Path) -> dict[str, Any]:
    return dict(merge_settings([str(path) for path in paths], KINDS))


def settings_of(*paths: Path) -> Settings:
    return read_settings(given_by(*paths))


def config_of(settings: Settings, name: str) -> Any:
    return parse(CHOICES[name].config, settings.flat, name, settings.app.preset)


def stated_for(name: str, path: Path) -> dict[str, Any]:
    """Return the options of a method that its paper states for a table."""
    return {
        key.removeprefix(f"{name}.").replace("-", "_"): value
        for key, value in PAPERS[path.stem].more.items()
        if key.startswith(f"{name}.")
    }


def paper_of(path: Path) -> str:
    return path.stem.partition("-")[0]


def augmented(path: Path) -> str:
    return "crop-flip" if "cifar" in path.stem else "none"


def test_every_table_has_its_published_values_here() -> None:
    assert {path.stem for path in TABLES} == set(PAPERS)


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_sets_the_published_values_and_no_others(path: Path) -> None:
    table, given, defaults = PAPERS[path.stem], given_by(path), default_settings()
    data = path.stem.rpartition("-")[2]
    mixed = "," in table.model
    wanted = {
        "method": RUN[paper_of(path)],
        "preset": PRESET[paper_of(path)],
        "data.name": DATA.get(data, data),
        "data.partition": table.law,
        "data.alpha": table.alpha,
        "model.per-client" if mixed else "model.name": table.model,
        "client.batch-size": 128,
        **table.more,
    }
    assert {key: value for key, value in given.items() if defaults[key] == value} == {}, "as by default"
    others = CHOICES.keys() - {"fedavg"}  # whose settings there the next two tests are about
    stated = {key for key in given if key.partition(".")[0] not in others or key in table.more}
    assert {key: given[key] for key in stated} == {
        key: value for key, value in wanted.items() if defaults[key] != value
    }
    assert settings_of(path).app.client.lr == table.more.get("client.lr", 0.01)
    assert settings_of(path).app.client.momentum == table.more.get("client.momentum", 0.9)


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_runs_its_paper_s_method_with_the_paper_s_values(path: Path) -> None:
    settings = settings_of(path)
    if path in FEDSYN:
        rounds = PAPERS[path.stem].more.get("dense.rounds", 1)
        own = "crop-flip" if "cifar" in path.stem else "flip"
        assert settings.method_config == DenseConfig(
            rounds=rounds, synthesis_augmentation="crop-flip", pool_augmentation=own
        )
    elif path in FLBOOST:
        assert settings.method_config == settings.choice.config(**stated_for("iterative", path))
        assert settings.refiner == Refiner.of("flboost", **stated_for("flboost", path))
    elif path in FENS:
        assert settings.method_config == settings.choice.config(**stated_for(settings.choice.name, path))
    else:
        assert settings.method_config == CoBoostingConfig(pool_augmentation=augmented(path))


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_with_the_rows_gives_every_method_its_paper_s_images(path: Path) -> None:
    alone = settings_of(path)
    settings = settings_of(ROWS[paper_of(path)], path) if paper_of(path) in ROWS else alone
    assert settings.app == alone.app
    if path in FLBOOST:
        assert settings.method_config == replace(alone.method_config, mu=1e-4, dyn_alpha=1e-2)
        assert settings.refiner == alone.refiner
        wanted = FedGenConfig.preset("flboost", **stated_for("fed-gen", path))
        assert config_of(settings, "fed-gen") == wanted
        return
    if path in FENS and path.stem != "fens-table1-cifar10":
        return  # tables without these rows
    if path in FENS:
        assert config_of(settings, "fedavg") == CHOICES["fedavg"].config(bn_buffers="first")
        for name in ("fedkd", "fed-et"):
            assert config_of(settings, name) == CHOICES[name].config(augmentation=augmented(path))
        return
    if path not in FEDSYN:
        if "-table4-" in path.stem or "-table7-" in path.stem:
            return  # tables without these rows
        found = config_of(settings, "dense")
        assert found == DenseConfig.preset("co-boosting", pool_augmentation=augmented(path))
        for name in ("f-dafl", "f-adi"):
            assert config_of(settings, name) == CHOICES[name].config(pool_augmentation=augmented(path))
        assert config_of(settings, "feddf") == CHOICES["feddf"].config(augmentation=augmented(path))
    else:
        own = DenseConfig()
        shared = ("epochs", "batch_size", "kd_temperature", "student_lr", "weight_decay", "schedule", "student_clip")
        for name in ("f-dafl", "f-adi", "feddf"):
            config = config_of(settings, name)
            assert {key: getattr(config, key) for key in shared} == {key: getattr(own, key) for key in shared}
        assert config_of(settings, "f-dafl").recipe() == own.recipe()


def test_the_rows_of_every_table_are_long_as_it_is() -> None:
    table = settings_of(ROOT / "conf" / "coboosting-table1-mnist.toml")
    assert all(config_of(table, name).epochs == 500 for name in ("dense", "f-dafl", "feddf"))


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_table_file_names_architectures_that_take_its_images(path: Path) -> None:
    app = settings_of(path).app
    if known := KNOWN.get(app.data.name):
        classes, channels, size = known.num_classes, known.channels, known.image_size
    elif group := GROUPS.get(app.data.name):
        classes, channels, size = group.num_classes, 3, group.image_size
    else:
        classes, channels, size = 200, 3, 0
    size = app.data.image_size or size
    models = builders(*OTHERS.get(app.data.name, (classes, (channels, size, size))))
    assert {*app.model.mix(), app.model.of_student()} <= models.keys()


@pytest.mark.parametrize("path", FEDSYN, ids=name_of)
def test_table_of_dense_under_the_preset_of_its_comment_is_the_paper_s_or_the_release_s(path: Path) -> None:
    alone = settings_of(path)
    rounds, own = alone.method_config.rounds, alone.method_config.pool_augmentation
    text = read_settings({**given_by(path), "preset": "paper", "dense.pool-augmentation": "none"})
    code = read_settings({**given_by(path), "preset": "published-code"})
    assert text.method_config == DenseConfig.preset("paper", rounds=rounds)
    assert code.method_config == DenseConfig.preset("published-code", rounds=rounds, pool_augmentation=own)


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

    assert found.method_config == CoBoostingConfig.preset("published-code")
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
    assert (data.partition, data.copies) == ("dirichlet-overlap" if alone else "dirichlet-classes", 10.0)
    assert (client.views, settings_of(path).method_config.bn) == (
        ("batch", "test-batch") if alone else ("image", "running")
    )


def run_by(path: Path) -> list[Settings]:
    """Return the settings of every run whose command a file shows, in order."""
    found = []
    for words in commands(path):
        if words[1] == "run":
            given = [words[place + 1] for place, word in enumerate(words) if word == "--run-config"]
            sources = [str(ROOT / source) if source.endswith(".toml") else source for source in given]
            found.append(read_settings(merge_settings(sources, KINDS)))
    return found


def rows_of_iterative(path: Path) -> list[tuple[str, str]]:
    configs = [settings.method_config for settings in run_by(path)]
    return [(config.strategy, config.refiner) for config in configs]


def test_the_commands_of_flboost_s_rows_are_the_rows_of_its_tables() -> None:
    rows, combined = ROWS["flboost"], ROOT / "conf" / "flboost-table3-cifar10.toml"

    assert rows_of_iterative(rows) == [
        *((strategy, "none") for strategy in ("fedavg", "fedprox", "feddyn", "scaffold")),
        ("fedavg", "fed-gen"), ("fedavg", "fed-gen"), ("fedavg", "flboost"),
    ]  # fmt: skip
    assert rows_of_iterative(combined) == [
        *((strategy, "flboost") for strategy in ("scaffold", "fedavg", "fedprox", "feddyn")),
        ("scaffold", "fed-gen"), ("scaffold", "fed-gen"), ("scaffold", "flboost"),
    ]  # fmt: skip
    runs = [*run_by(rows), *run_by(combined)]
    assert {run.method_config.mu for run in runs if run.method_config.strategy == "fedprox"} == {1e-4}
    spec = [run.refiner.config for run in runs if run.method_config.refiner == "fed-gen" and run.refiner is not None]
    assert [(config.level, config.generator_width) for config in spec] == [("features", 8192), ("images", 8192)] * 2
    last = runs[-1].refiner
    assert last == Refiner.of("flboost", level="features", generator_width=8192, per_class=True)


def test_flboost_s_row_feddf_takes_so_many_steps_of_a_generator_of_no_adversary_and_of_the_model() -> None:
    refiner = run_by(ROWS["flboost"])[-1].refiner
    assert refiner is not None
    config = refiner.config
    assert config.iterations * config.generator_steps == 50
    assert config.iterations * config.student_steps == 20
    assert (config.generator_step, config.weights, config.adversarial_weight) == ("joint", "uniform", 0.0)
    assert (config.ce_weight, config.diversity_weight, config.labels) == (1.0, 1.0, "counts")
    assert (config.generator_lr, config.student_lr, config.lr_decay, config.weight_decay) == (0.01, 0.1, 0.998, 1e-3)


@pytest.mark.parametrize("path", SHORT, ids=name_of)
def test_short_file_of_flboost_differs_from_the_paper_as_it_states(path: Path) -> None:
    short, paper = settings_of(path), settings_of(ROOT / "conf" / "flboost-table1-cifar10.toml")
    shorter = {"rounds": 20, "strategy": "fedavg", "refiner": "none"}
    assert short.method_config == replace(paper.method_config, **shorter)
    shared = ("epochs", "batch_size", "lr", "momentum", "weight_decay", "clip", "optimizer", "schedule", "augmentation")
    assert [getattr(short.app.client, key) for key in shared] == [getattr(paper.app.client, key) for key in shared]
    data = short.app.data
    assert (data.partition, data.alpha, data.limit) == (paper.app.data.partition, 0.1, 100 * 500)
    assert paper.refiner is not None
    tried = {
        "adversarial_weight": 0.1,
        "generator_step": "joint",
        "generator_steps": 3,
        "student_lr": 0.05,
        "per_class": False,
    }
    refiners = [run.refiner for run in run_by(path) if run.refiner is not None]
    assert [refiner.config for refiner in refiners] == [replace(paper.refiner.config, **tried)] * 2
    assert rows_of_iterative(path) == [
        ("fedavg", "none"), ("fedavg", "flboost"), ("scaffold", "none"), ("scaffold", "flboost"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_published_file_begins_with_its_table_its_commands_and_its_length(path: Path) -> None:
    comment = path.read_text().partition("\n\n")[0]
    assert re.search(r"https://(arxiv\.org/abs/\d|openreview\.net/forum)", comment)
    assert re.search(r"\b(Long|Short), ", comment.replace("\n# ", " "))
    run, *later = commands(path)
    assert run[:2] == ["oneshot", "run"]
    assert name_of(path) in run
    files = [word for word in run if word.endswith(".toml")]
    clients = int(run[run.index("--num-supernodes") + 1])
    if path in TABLES:
        assert ("Figure" if path.stem in FIGURES else "Table") in comment
        # The length of a run in rounds is their number, which is no number of epochs.
        rounds = PAPERS[path.stem].more.get("iterative.rounds", 0)
        assert (f"iterative.rounds={rounds // 10}" if rounds else "scale=0.1") in comment
        assert clients == PAPERS[path.stem].clients
        compared = {name for words in later for name in words[-1].split(",") if words[1] == "compare"}
        if (rows := ROWS.get(paper_of(path))) is not None:
            assert (name_of(rows) in files) == bool(compared & {"fedkd"})
    else:
        tables = [file for file in files if "-table" in file]
        assert len(tables) == ("data.name" not in given_by(path))  # with its own data set it stands alone
        assert [PAPERS[Path(table).stem].clients for table in tables] in ([], [clients])


@pytest.mark.parametrize("path", CONF, ids=name_of)
def test_conf_file_is_read_and_begins_with_a_comment(path: Path) -> None:
    assert settings_of(path).choice.name
    assert path.read_text().startswith("# ")
