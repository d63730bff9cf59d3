"""Data sets of the user's own code: the answers of a function, and the refusals of wrong ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_app.config import AppConfig
from fl_app.data import open_data
from fl_app.data.config import DataConfig
from fl_app.data.opening import open_own
from fl_app.division import own_positions
from strategies.core.errors import OneShotError

SOURCES = """
import numpy as np
import torch


def images(split, root):
    count = 12 if split == "train" else 6
    return np.arange(count * 64, dtype="uint8").reshape(count, 1, 8, 8), [k % 3 for k in range(count)]


def rows(split):
    count = 12 if split == "train" else 6
    return np.ones((count, 5)), torch.arange(count) % 2, [k % 4 for k in range(count)]


def none_to_test_on(split):
    count = 12 if split == "train" else 0
    return np.ones((count, 5)), np.arange(count) % 2


def fails():
    raise KeyError("patient 7")


texts = lambda: (torch.ones(4, 7, dtype=torch.int64), torch.tensor([0, 1, 0, 1]))
where = lambda root: (np.full((2, 1), float(len(root))), [0, 1])
one = lambda: [1]
words = lambda: (np.array(["a"]), [0])
ragged = lambda: ([[1.0], [1.0, 2.0]], [0, 1])
flat = lambda: (np.zeros(3, "float32"), [0, 1, 0])
infinite = lambda: (np.full((2, 2), np.inf), [0, 1])
floats = lambda: (np.zeros((2, 2)), [0.0, 1.0])
negative = lambda: (np.zeros((2, 2)), [0, -1])
fewer = lambda: (np.zeros((3, 2)), [0, 1])
gap = lambda: (np.zeros((2, 2)), [0, 1], [0, 2])
patients = lambda: (np.zeros((2, 2)), [0, 1], [10**15, 10**15 + 1])
large = lambda: (np.zeros((2, 2)), np.array([0, 2**63], "uint64"))
oblong = lambda: (np.zeros((2, 1, 4, 6), "uint8"), [0, 1])
last = lambda: (np.zeros((2, 8, 8, 3), "uint8"), [0, 1])
grey = lambda: (np.arange(128).reshape(2, 8, 8).astype("uint8"), [0, 1])
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_sources.py").write_text(SOURCES)
    monkeypatch.chdir(tmp_path)
    open_own.cache_clear()
    yield
    open_own.cache_clear()
    sys.modules.pop("own_sources", None)


def test_pixels_become_images_in_the_input_space_of_all_data_sets() -> None:
    train, test = (open_data(DataConfig(name="own_sources:images"), half) for half in ("train", "test"))

    assert (train.input_shape, train.num_classes, len(train.labels), len(test.labels)) == ((1, 8, 8), 3, 12, 6)
    assert train.normalization == ((0.5,), (0.5,))
    assert train.domains is None
    assert torch.equal(train.take([1]).images[0, 0, 0], torch.arange(64, 72, dtype=torch.uint8))
    assert open_data(DataConfig(name="own_sources:images", image_size=16), "train").take([0]).images.shape[2:] == (
        16,
        16,
    )


def test_images_without_channels_have_one() -> None:
    split = open_data(DataConfig(name="own_sources:grey"), "train")
    assert split.input_shape == (1, 8, 8)
    assert split.take([1]).images[0, 0, 0].tolist() == list(range(64, 72))


def test_rows_stay_as_they_are_and_lie_with_their_holders() -> None:
    data = DataConfig(name="own_sources:rows", partition="domains")
    split = open_data(data, "train")

    assert split.input_shape == (5, 1, 1)
    assert split.take().images.dtype == torch.float32
    config = AppConfig(data=data)
    parts = [own_positions(split, config, partition_id=k, num_partitions=4).tolist() for k in range(4)]
    assert parts == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_a_server_without_examples_needs_their_form_and_the_number_of_classes() -> None:
    data = DataConfig(name="own_sources:none_to_test_on")

    with pytest.raises(OneShotError, match=r"test half, has no examples: must name .* or 'data.num-classes'"):
        open_data(data, "test")
    test = open_data(replace(data, num_classes=2), "test")
    assert (len(test.labels), test.input_shape, test.num_classes) == (0, (5, 1, 1), 2)


def test_texts_are_tokens_and_the_folder_of_the_settings_is_passed_on() -> None:
    assert open_data(DataConfig(name="own_sources:texts"), "train").input_shape == (1, 1, 7)
    assert open_data(DataConfig(name="own_sources:where", root="/abc"), "test").take().images.flatten().tolist() == [
        4,
        4,
    ]
    assert open_data(DataConfig(name="own_sources:where"), "test", root="/node/b").take().images[0].item() == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails", "fails: KeyError: 'patient 7'"),
        ("one", "returns list of 1: must return examples and labels, and perhaps holders"),
        ("words", r"returns examples that are not an array \(ndarray\)"),
        ("ragged", r"returns examples that are not an array \(list\): must be numpy or torch"),
        ("flat", r"returns examples of float32 \[3\]: must be uint8 or float32 \[N, channels, height, width\]"),
        ("infinite", "returns examples with NaN or Inf"),
        ("floats", r"returns labels of float64 \[2\]: must be whole numbers"),
        ("negative", "returns labels with -1: must be 0 or more"),
        ("large", r"returns labels of 2\*\*63 or more: must be less"),
        ("fewer", "returns 3 examples and 2 labels: must be as many"),
        ("gap", "returns holders without 1: must be 0 to K - 1"),
        ("patients", "returns holders without 0: must be 0 to K - 1"),
        ("oblong", "returns images of 4 x 6 pixels: must be squares, or set 'data.image-size'"),
        (
            "last",
            r"of shape \[2, 8, 8, 3\], with the channels last: must be \[N, channels, height, width\], as of np.mo",
        ),
        ("absent", "module 'own_sources' has no 'absent'"),
    ],
)
def test_a_wrong_answer_is_refused_in_one_line_that_names_the_source(name: str, reason: str) -> None:
    with pytest.raises(OneShotError, match=reason) as error:
        open_data(DataConfig(name=f"own_sources:{name}"), "train")

    assert f"own_sources:{name}" in str(error.value)
