"""A folder of images as a data set."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fl_app.data import load, open_data, open_split
from fl_app.data.config import DataConfig
from fl_app.data.preprocessing import resize
from fl_app.data.sources import open_folders
from strategies.core.errors import DataError


def random_pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (9, 7, 3), dtype=np.uint8)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for half, names in (("train", ("a.png", "b.png", "c.png")), ("test", ("d.png",))):
        for seed, label in enumerate(("cat", "ant")):
            folder = tmp_path / half / label
            folder.mkdir(parents=True)
            for name in names:
                Image.fromarray(random_pixels(seed)).save(folder / name)
    return tmp_path


def test_imagefolder_is_read_in_the_order_of_names(images: Path) -> None:
    source = load("imagefolder", root=str(images), image_size=8)
    assert source.input_shape == (3, 8, 8)
    assert source.num_classes == 2
    assert source.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.test.labels.tolist() == [0, 1]
    ant = torch.from_numpy(random_pixels(1)).permute(2, 0, 1)[None]
    assert torch.equal(source.test.images[:1], resize(ant, 8))


@pytest.mark.parametrize("classes", ["", "gesund,\u00d6dem,Pneumonie"])
def test_a_class_has_one_number_however_a_machine_stores_its_letters(tmp_path: Path, classes: str) -> None:
    found = []
    for form in ("NFC", "NFD"):
        for name in ("\u00d6dem", "gesund", "Pneumonie"):
            folder = tmp_path / form / "train" / unicodedata.normalize(form, name)
            folder.mkdir(parents=True)
            Image.fromarray(np.full((5, 5), len(name), dtype=np.uint8)).save(folder / "1.png")
        config = DataConfig("imagefolder", str(tmp_path / form), image_size=5, classes=classes)
        split = open_data(config, "train")
        data = split.take()
        found.append((split.classes, dict(zip(data.images[:, 0, 0, 0].tolist(), data.labels.tolist(), strict=True))))
    assert found[0] == found[1]
    assert found[0][1] == {len(name): number for number, name in enumerate(found[0][0])}

    (tmp_path / "NFD" / "train" / "\u00d6dem").mkdir()
    with pytest.raises(DataError, match="has two folders of the name \u00d6dem: must have one"):
        open_data(config, "train")


@pytest.mark.parametrize(("half", "other"), [("train", "test"), ("test", "train")])
def test_imagefolder_of_a_node_or_a_server_needs_one_half_alone(images: Path, half: str, other: str) -> None:
    whole = open_split("imagefolder", half, root=str(images), image_size=8)
    (images / other).rename(images / "elsewhere")
    (images / half / ".thumbnails").mkdir()

    alone = open_split("imagefolder", half, root=str(images), image_size=8)

    assert (alone.num_classes, alone.classes) == (whole.num_classes, ("ant", "cat"))
    assert torch.equal(alone.labels, whole.labels)


@pytest.mark.parametrize("empty", [True, False])
def test_imagefolder_of_named_classes_may_lack_some(images: Path, empty: bool) -> None:
    for file in (images / "train" / "ant").iterdir():
        file.unlink()
    if not empty:
        (images / "train" / "ant").rmdir()
    names = ("bee", "cat", "ant")

    train, test = (open_folders(images, half, 8, names) for half in ("train", "test"))

    assert train.classes == test.classes == names
    assert (train.num_classes, train.labels.tolist()) == (3, [1, 1, 1])
    assert (test.num_classes, sorted(test.labels.tolist())) == (3, [1, 2])
    named = DataConfig(name="imagefolder", root=str(images), image_size=8, classes="bee, cat,ant")
    assert torch.equal(open_data(named, "train").labels, train.labels)


def test_imagefolder_names_an_image_of_too_many_pixels(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)  # 63 are more than twice as many
    with pytest.raises(DataError, match="image .* cannot be decoded: Image size .* exceeds limit"):
        load("imagefolder", root=str(images), image_size=8)
