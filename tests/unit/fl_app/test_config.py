from __future__ import annotations

import dataclasses

import pytest

from fl_app.config import AppConfig, ClientConfig, ModelConfig
from fl_app.models import ARCHITECTURES
from strategies.core.errors import OptionError
from strategies.core.options import flatten


def test_settings_when_none_are_given_are_those_of_the_main_job() -> None:
    config = AppConfig.from_settings({})

    assert config == AppConfig()
    assert (config.method, config.data.name, config.data.law, config.data.alpha) == (
        "tally",
        "digits",
        "dirichlet-classes",
        0.3,
    )
    assert (config.model.name, config.compute, config.seed, config.min_uploads) == ("lenet5", "ray", 0, 2)


def test_flat_settings_when_parsed_and_flattened_come_back() -> None:
    given = {
        "seed": 7,
        "min-uploads": 3,
        "deadline-s": 5,
        "data.alpha": 1,
        "data.classes-per-client": 4,
        "model.per-client": "lenet5, cnn5",
        "client.share-label-counts": False,
        "client.batch-size": 8,
    }

    config = AppConfig.from_settings(given)

    assert {key: flatten(config)[key] for key in given} == given
    assert isinstance(config.deadline_s, float)
    assert isinstance(config.data.alpha, float)
    assert AppConfig.from_settings(flatten(config)) == config


def test_settings_of_methods_are_left_to_the_methods() -> None:
    assert AppConfig.from_settings({"dense.epochs": 3}) == AppConfig()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("seed", -1, "at least 0"),
        ("seed", 1.0, "a whole number"),
        ("seed", True, "a whole number"),
        ("min-uploads", 0, "at least 1"),
        ("deadline-s", 0.0, "greater than 0.0"),
        ("deadline-s", float("nan"), "a number"),
        ("compute", "gpu", "'ray', 'in-process'"),
        ("device", "tpu?", "auto, cpu, cuda"),
        ("device", "cuda:x", "auto, cpu, cuda"),
        ("max-upload-mib", 0, "greater than 0.0"),
        ("method", 3, "a text"),
        ("data.name", "cifar", "'cifar10'"),
        ("data.image-size", 513, "at most 512"),
        ("data.law", "dirichlet", "'dirichlet-classes'"),
        ("data.alpha", 0.0, "greater than 0.0"),
        ("data.classes-per-client", 0, "at least 1"),
        ("data.sigma", -0.1, "at least 0.0"),
        ("data.limit", -1, "at least 0"),
        ("model.name", "lenet", "'lenet5'"),
        ("client.epochs", 0, "at least 1"),
        ("client.lr", 0.0, "greater than 0.0"),
        ("client.momentum", 1.5, "at most 1.0"),
        ("client.schedule", "step", "'constant', 'cosine'"),
        ("client.share-label-counts", 1, "true or false"),
        # A server must not fill a node's memory, or have it search for a noise without end.
        ("client.epochs", 2**62, "at most 1000000"),
        ("client.steps", 10**12, "at most 10000000"),
        ("client.attack-steps", 1001, "at most 1000"),
        ("client.latent", 10**8, "at most 4096"),
        ("privacy.epsilon", 1e15, "at most 1000000.0"),
        ("data.sigma", 1e4, "at most 20.0"),
        ("data.copies", 1e308, "at most 1000000.0"),
        ("data.num-classes", 10**9, "at most 65536"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line_with_key_value_and_remedy(key: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError) as error:
        AppConfig.from_settings({key: value})  # type: ignore[dict-item]

    text = str(error.value)
    assert repr(key) in text
    assert repr(value) in text
    assert allowed in text
    assert "\n" not in text


def test_a_law_whose_settings_do_not_fit_each_other_is_refused_before_any_client_is_asked() -> None:
    with pytest.raises(OptionError, match="'data.sigma' is 0.0"):
        AppConfig.from_settings({"data.law": "lognormal"})

    assert AppConfig.from_settings({"data.law": "lognormal", "data.sigma": 0.5}).data.sigma == 0.5


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"data.name": "ag-news", "data.law": "domains"},
            r"'data.law' is 'domains' .* domain-digits, pacs, heart-disease",
        ),
        ({"data.name": "heart-disease", "data.left-out": "va"}, "'data.left-out' is 'va'"),
        (
            {"data.name": "ag-news", "client.augmentation": "flip"},
            "'client.augmentation' is 'flip': must be 'data-set' or 'none' where",
        ),
        ({"data.name": "ag-news", "data.proxy-name": "mnist"}, "'data.proxy-name' is 'mnist': must be one of '' where"),
        (
            {"data.proxy-name": "ag-news"},
            "'data.proxy-name' is 'ag-news': must be one of mnist, .*imagefolder, '' where",
        ),
    ],
)
def test_settings_of_images_are_refused_for_rows_and_texts(given: dict[str, str], line: str) -> None:
    with pytest.raises(OptionError, match=line):
        AppConfig.from_settings(given)


def test_settings_cannot_be_changed_once_they_are_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClientConfig().lr = -1.0  # type: ignore[misc]
    assert set(ModelConfig().mix()) <= set(ARCHITECTURES)
