"""Data sources, on tiny files in the layouts of torchvision that the tests write themselves."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from whole_sets import load, pixels, write_idx, write_matlab, write_mnist

from fl_app.data import GROUPS, SOURCES, open_data, open_facts, open_split
from fl_app.data.config import DataConfig
from fl_app.data.folders import open_images
from fl_app.data.preprocessing import resize
from fl_app.data.sources import open_folders
from strategies.core.errors import DataError, OptionError
from strategies.core.vision import torchvision

datasets = torchvision.datasets


def md5_of(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()


def write_pickle(file: Path, content: dict) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(content))
    return md5_of(file)


@pytest.fixture
def cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cifar-100-python"
    for half, count in (("train", 3), ("test", 2)):
        content = {"data": pixels(count, 3072), "fine_labels": list(range(97, 97 + count))}
        monkeypatch.setattr(datasets.CIFAR100, f"{half}_list", [[half, write_pickle(folder / half, content)]])
    md5 = write_pickle(folder / "meta", {"fine_label_names": [str(label) for label in range(100)]})
    monkeypatch.setattr(datasets.CIFAR100, "meta", {"filename": "meta", "key": "fine_label_names", "md5": md5})
    return tmp_path


@pytest.fixture
def svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    halves = {}
    for half, count in (("train", 3), ("test", 2)):
        file = tmp_path / f"{half}_32x32.mat"
        write_matlab(file, np.array([10, 1, 9][:count]))
        halves[half] = ["", file.name, md5_of(file)]
    monkeypatch.setattr(datasets.SVHN, "split_list", halves)
    return tmp_path


def test_digits_are_split_in_their_order_and_scaled() -> None:
    source, bunch = load("digits", image_size=8), load_digits()
    assert source.input_shape == (1, 8, 8)
    assert source.train.labels.tolist() == bunch.target[:1297].tolist()
    assert source.test.labels.tolist() == bunch.target[1297:].tolist()
    assert len(source.test.images) == 500
    expected = np.round(bunch.images[1297] * 255 / 16).astype(np.uint8)
    assert np.array_equal(source.test.images[0, 0].numpy(), expected)
    assert source.test.images.max() == 255


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_mnist_layout_is_read_and_resized_to_32(tmp_path: Path, name: str, folder: str) -> None:
    write_mnist(tmp_path, folder)
    source = load(name, root=str(tmp_path), download=False)
    stored = torch.from_numpy(pixels(7, 28, 28, seed=1))[:, None]
    assert source.input_shape == (1, 32, 32)
    assert torch.equal(source.train.images, resize(stored, 32))
    assert source.train.labels.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert source.test.labels.tolist() == [3, 4, 5, 6]
    assert torch.equal(load(name, root=str(tmp_path), image_size=28).train.images, stored)


def test_cifar100_has_100_classes(cifar100: Path) -> None:
    source = load("cifar100", root=str(cifar100), download=False)
    assert source.num_classes == 100
    assert source.train.labels.tolist() == [97, 98, 99]
    assert source.augmentation == "crop-flip"


def test_svhn_is_read_with_its_zero_as_class_zero(svhn: Path) -> None:
    source = load("svhn", root=str(svhn), download=False, image_size=16)
    assert source.input_shape == (3, 16, 16)
    assert source.train.labels.tolist() == [0, 1, 9]
    assert source.augmentation == "none"
    stored = torch.from_numpy(pixels(32, 32, 3, 2)).permute(3, 2, 0, 1)
    assert torch.equal(load("svhn", root=str(svhn)).test.images, stored)


@pytest.mark.parametrize(
    "config",
    [
        DataConfig(name="imagefolder", image_size=8),
        DataConfig(name="imagefolder", image_size=8, classes="healthy,ill"),
        DataConfig(name="mnist"),
        DataConfig(name="pacs", image_size=8, left_out="photo"),
        DataConfig(name="heart-disease"),
        DataConfig(name="ag-news"),
    ],
    ids=lambda config: config.name,
)
def test_a_folder_that_is_closed_to_this_user_is_one_line(
    tmp_path: Path, close: Callable[[Path], None], config: DataConfig
) -> None:
    close(tmp_path)
    with pytest.raises(DataError, match=rf"{tmp_path}/.* under data\.root cannot be read: Permission denied"):
        open_data(config, "train", root=str(tmp_path), download=False)


def test_absent_set_is_downloaded_whole_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(self: object) -> None:
        calls.append(self.root)  # type: ignore[attr-defined]
        write_mnist(Path(self.root))  # type: ignore[attr-defined]

    monkeypatch.setattr(datasets.MNIST, "download", download)
    assert len(load("mnist", root=str(tmp_path)).test.labels) == 4
    assert len(calls) == 1
    assert Path(calls[0]) != tmp_path
    assert [entry.name for entry in tmp_path.iterdir()] == ["MNIST"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: (raw / "t10k-labels-idx1-ubyte").unlink(),
        lambda raw: (raw / "train-images-idx3-ubyte").write_bytes(b""),
        lambda raw: (raw / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03\x00"),
        lambda raw: write_idx(raw / "train-images-idx3-ubyte", pixels(6, 28, 28)),
        lambda raw: write_idx(raw / "train-labels-idx1-ubyte", np.arange(7, dtype=np.uint8) + 4),
    ],
    ids=["missing", "empty", "cut", "one-image-less", "label-10"],
)
def test_damaged_mnist_names_the_folder_and_is_not_downloaded_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object
) -> None:
    write_mnist(tmp_path)
    damage(tmp_path / "MNIST" / "raw")  # type: ignore[operator]
    monkeypatch.setattr(datasets.MNIST, "download", lambda _: pytest.fail("downloaded"))
    with pytest.raises(DataError, match=f"'mnist'.* incomplete or damaged .*remove {tmp_path / 'MNIST'}"):
        load("mnist", root=str(tmp_path))


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in ("digits", "imagefolder")])
def test_a_set_that_is_not_there_off_the_network_is_one_line_and_no_attempt(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt(*args: object, **settings: object) -> None:
        raise AssertionError("a download was begun")

    monkeypatch.setenv("ONESHOT_OFFLINE", "1")
    monkeypatch.setattr("urllib.request.urlopen", attempt)

    left_out = next(iter(GROUPS[name].domains)) if name in GROUPS else ""
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        open_split(name, "train", root=str(tmp_path), left_out=left_out, image_size=8 * (name == "pacs"))


# A folder of images as a data set.


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for half, names in (("train", ("a.png", "b.png", "c.png")), ("test", ("d.png",))):
        for seed, label in enumerate(("cat", "ant")):
            folder = tmp_path / half / label
            folder.mkdir(parents=True)
            for name in names:
                Image.fromarray(pixels(9, 7, 3, seed=seed)).save(folder / name)
    return tmp_path


def test_a_class_folder_of_another_encoding_has_a_name_that_messages_can_hold(images: Path) -> None:
    first = sorted((images / "train").iterdir())[0].name
    for half in ("train", "test"):
        (images / half / first).rename(images / half / os.fsdecode(b"caf\xe9"))
    split = open_data(DataConfig(name="imagefolder", root=str(images), image_size=8), "train")
    assert r"caf\udce9" in split.classes
    assert len(split.take().images) == len(split.labels) > 0


def test_imagefolder_is_read_in_the_order_of_names(images: Path) -> None:
    source = load("imagefolder", root=str(images), image_size=8)
    assert source.input_shape == (3, 8, 8)
    assert source.num_classes == 2
    assert source.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.test.labels.tolist() == [0, 1]
    ant = torch.from_numpy(pixels(9, 7, 3, seed=1)).permute(2, 0, 1)[None]
    assert torch.equal(source.test.images[:1], resize(ant, 8))


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "it is empty"), (b"version https://git-lfs", "git lfs pull"), (b"<!DOCTYPE html>", "web page")],
)
def test_what_only_has_the_name_of_an_image_is_named(images: Path, content: bytes, what: str) -> None:
    (images / "train" / "ant" / "d.jpg").write_bytes(content)
    with pytest.raises(DataError, match=rf"ant/d.jpg under data.root cannot be decoded: .*{what}"):
        load("imagefolder", root=str(images), image_size=8)


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


def test_every_file_of_an_image_folder_is_taken_or_said_to_be_left_out(images: Path, said: list[str]) -> None:
    train, picture = images / "train", Image.fromarray(pixels(9, 7, 3))
    for name in ("e.gif", "f.JFIF", "g.PNG", "h.webp", "i.tif", "sub/j.png"):
        (train / "cat" / name).parent.mkdir(exist_ok=True)
        picture.save(train / "cat" / name, format="JPEG" if name.endswith("JFIF") else None)
    picture.save(train / "cat" / "no-suffix", format="PNG")
    picture.save(train / "loose.png")
    hidden = ("cat/.hidden.png", "cat/@eaDir/a.png", "ant/.ipynb_checkpoints/a.png", "__MACOSX/a.png")
    for left in ("cat/notes.txt", *hidden):
        (train / left).parent.mkdir(exist_ok=True)
        picture.save(train / left, format="PNG")

    split = open_folders(images, "train", 8)

    assert split.classes == ("ant", "cat")
    assert split.labels.tolist() == [0] * 3 + [1] * 10
    assert len(split.take().images) == 13
    assert said == [
        f"{train}: 13 images of 2 classes; left out are 2 files (1 .png, 1 .txt): loose.png, cat/notes.txt; 4 files "
        "that are hidden or a tool's: __MACOSX/a.png, ant/.ipynb_checkpoints/a.png, cat/.hidden.png, cat/@eaDir/a.png"
    ]


def test_an_image_is_read_upright_and_its_further_pages_are_said(images: Path, said: list[str]) -> None:
    square = Image.new("L", (8, 8))
    square.paste(255, (0, 0, 8, 4))  # white above
    for orientation, name in ((1, "x1.png"), (6, "x6.png"), (3, "x3.png")):
        exif = Image.Exif()
        exif[0x0112] = orientation
        square.save(images / "train" / "cat" / name, exif=exif)
    square.save(images / "train" / "cat" / "y.tif", save_all=True, append_images=[square] * 2)

    split = open_folders(images, "train", 8)

    plain, over, turned, _ = split.take(torch.arange(6, 10)).images[:, 0].float().div(255)
    assert (plain[:4].mean(), plain[4:].mean()) == (1, 0)
    assert (turned[:, 4:].mean(), turned[:, :4].mean()) == (1, 0)  # a quarter to the right
    assert (over[4:].mean(), over[:4].mean()) == (1, 0)
    assert said[1:] == ["1 of 4 images have several pages, of which the first is read: y.tif"]


@pytest.mark.parametrize(
    "data",
    [
        DataConfig(image_size=8),
        DataConfig(name="mnist", normalization="data-set"),
        DataConfig(name="imagefolder", image_size=8),
        DataConfig(name="imagefolder", image_size=8, classes="cat,ant,bee"),
    ],
    ids=lambda data: f"{data.name}-{data.classes}",
)
def test_a_server_without_examples_knows_what_all_parties_share(images: Path, data: DataConfig) -> None:
    write_mnist(images)
    mine, clients = replace(data, root=str(images / "nowhere")), replace(data, root=str(images))
    train = open_data(clients, "train")

    if data.name == "imagefolder" and not data.classes:  # nothing but the clients' folders names the classes
        with pytest.raises(OptionError, match=r"'data.classes' is '': must name the classes"):
            open_facts(mine, absent=True)
        mine = clients
    bare = open_facts(mine, absent=True)

    assert (len(bare.labels), bare.take().images.shape) == (0, (0, *train.input_shape))
    assert (bare.agreement, bare.classes, bare.num_classes) == (train.agreement, train.classes, train.num_classes)
    assert (bare.normalization, bare.augmentation) == (train.normalization, train.augmentation)


def test_links_between_images_and_class_folders_alike_are_never_counted_twice(images: Path, said: list[str]) -> None:
    cat, ant = images / "train" / "cat", images / "train" / "ant"
    (cat / "link.png").symlink_to(cat / "a.png")
    (cat / "hard.png").hardlink_to(cat / "b.png")
    assert open_folders(images, "train", 8).labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert any("2 links to other images of their class are left out" in line for line in said)
    (link := ant / "z.png").symlink_to(cat / "a.png")
    with pytest.raises(DataError, match=r"are one file: must be in one class"):
        open_folders(images, "train", 8)
    link.unlink()
    for name in ("Cat", "cat "):
        (images / "train" / name).mkdir()
        with pytest.raises(DataError, match="whose names differ in case or spaces alone"):
            open_images(images, "train", 8)
        (images / "train" / name).rmdir()
    (images / "train" / "feline").symlink_to(cat, target_is_directory=True)
    with pytest.raises(DataError, match="are one folder, by a link: must be one class"):
        open_images(images, "train", 8, ("ant", "cat", "feline"))


def test_images_of_one_patient_are_found_by_their_names(images: Path, said: list[str]) -> None:
    (images / "train/cat/a.png").rename(images / "train/cat/b_2.png")
    data = DataConfig(name="imagefolder", image_size=8, root=str(images), group=r"^(.)")

    split = open_data(data, "train")

    assert list(split.files) == ["a.png", "b.png", "c.png", "b.png", "b_2.png", "c.png"]
    assert split.groups.tolist() == [0, 1, 2, 1, 1, 2]
    assert open_data(data, "test").groups.tolist() == [0, 0]
    assert open_data(replace(data, group="(.)_"), "test").groups is None  # a server may name its files otherwise
    assert said[-1] == (
        f"{images}/test has no name that '(.)_' fits (data.group): intervals of scores count its images"
    )
    (images / "test/cat/d.png").rename(images / "test/cat/d_2.png")
    for half, names in (("test", "d.png"), ("train", "a.png, b.png, c.png, b.png and 1")):
        with pytest.raises(DataError, match=rf"'data.group' is '\(.\)_', which does not fit {names}"):
            open_data(replace(data, group="(.)_"), half)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "imagefolder", "group": "x"}, "has 0 groups in parentheses: must have one"),
        ({"name": "imagefolder", "group": "(x"}, "must be a regular expression"),
        ({"name": "digits", "group": "(x)"}, "must be '' unless 'data.name' is one of 'csv', 'parquet', 'imagefolder'"),
    ],
)
def test_a_wrong_group_is_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        DataConfig(**given)  # type: ignore[arg-type]
