"""Data sets of several domains, on tiny files in their published layouts that the tests write themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from whole_sets import load, write_matlab, write_mnist

from fl_app.data import open_split
from fl_app.data.domains import DIGITS, GROUPS, THINGS
from strategies.core.errors import DataError
from strategies.core.vision import torchvision


def write_folders(folder: Path, classes: tuple[str, ...], value: int, size: tuple[int, ...] = (9, 7, 3)) -> None:
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.full(size, value + label, dtype=np.uint8)).save(folder / name / "a.png")


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MNIST and SVHN as torchvision has them, MNIST-M and the synthetic digits as folders of classes."""
    write_mnist(tmp_path, counts=(12, 10), first=0)
    for half, count in (("train", 12), ("test", 10)):
        write_matlab(tmp_path / f"{half}_32x32.mat", np.arange(count) % 10)
        write_folders(tmp_path / "MNIST-M" / half, DIGITS, 100)
        write_folders(tmp_path / "SYN" / half, DIGITS, 50, size=(9, 7))
    monkeypatch.setattr(torchvision.datasets.utils, "check_integrity", lambda *_: True)
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)
    return tmp_path


@pytest.fixture
def pacs(tmp_path: Path) -> Path:
    for number, domain in enumerate(GROUPS["pacs"].domains):
        write_folders(tmp_path / "PACS" / domain, THINGS, 50 * number)
    return tmp_path


def test_digits_hold_the_kept_domains_in_order_and_the_one_left_out_for_the_test(digits: Path) -> None:
    source = load("domain-digits", root=str(digits), left_out="mnist-m", download=False)

    assert (source.input_shape, source.num_classes, source.augmentation) == ((3, 32, 32), 10, "none")
    train = open_split("domain-digits", "train", root=str(digits), left_out="mnist-m", download=False)
    assert train.domains is not None
    assert torch.bincount(train.domains).tolist() == [12, 12, 10]
    assert source.train.labels.tolist() == [*range(10), 0, 1, *range(10), 0, 1, *range(10)]
    mnist = load("mnist", root=str(digits), download=False).train.images
    assert torch.equal(source.train.images[:12], mnist.expand(-1, 3, -1, -1))
    assert torch.equal(source.train.images[12:24], load("svhn", root=str(digits), download=False).train.images)
    assert source.train.images[24:, :, 0, 0].tolist() == [[50 + label] * 3 for label in range(10)]
    assert source.test.images[:, 0, 0, 0].tolist() == [100 + label for label in range(10)]
    assert source.test.labels.tolist() == list(range(10))


def test_pacs_holds_whole_domains(pacs: Path) -> None:
    source = load("pacs", root=str(pacs), left_out="art_painting", image_size=8)

    assert (source.input_shape, source.num_classes) == ((3, 8, 8), 7)
    firsts = source.train.images[:, 0, 0, 0].reshape(3, 7)
    assert firsts.tolist() == [[value + label for label in range(7)] for value in (0, 100, 150)]
    assert source.test.images[:, 0, 0, 0].tolist() == [50 + label for label in range(7)]
    assert source.test.labels.tolist() == list(range(7))


@pytest.mark.parametrize(
    ("name", "left_out", "gone", "message"),
    [
        ("domain-digits", "syn", "MNIST-M", "no images in .*MNIST-M/train/<class> .*Ganin.*mnist_m_train_labels.txt"),
        ("domain-digits", "mnist", "SYN", "no images in .*SYN/train/<class> .*Ganin.*folder of its digit"),
        ("domain-digits", "syn", "MNIST", "'mnist' is not in .*torchvision.datasets.MNIST"),
        ("pacs", "photo", "PACS/cartoon", "no images in .*PACS/cartoon/<class> .*Li et al., ICCV 2017"),
    ],
)
def test_a_domain_that_is_not_there_says_how_to_get_it(
    digits: Path, pacs: Path, name: str, left_out: str, gone: str, message: str
) -> None:
    (digits / gone).rename(digits / "elsewhere")

    with pytest.raises(DataError, match=message):
        open_split(name, "train", root=str(pacs), left_out=left_out, image_size=8, download=False)
