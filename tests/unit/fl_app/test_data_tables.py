"""Fed-Heart-Disease, on small files that the tests write themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fl_app.data import open_split
from fl_app.data.tables import CENTRES, read_centre
from strategies.core.errors import DataError
from strategies.core.vision import torchvision

SIZES = {"cleveland": 30, "hungarian": 20, "switzerland": 10, "va": 12}


def row(number: int, centre: int) -> str:
    """Return a line of a file; in Switzerland no cholesterol is known, and one person alone is healthy."""
    rng = np.random.default_rng([centre, number])
    chest, ecg = 1 + number % 4, number % 3
    numbers = [rng.integers(30, 80), number % 2, chest, rng.integers(90, 180), 0 if centre == 2 else 200 + number]
    numbers += [0, ecg, rng.integers(90, 180), number % 2, round(float(rng.random()), 1)]
    ill = int(number != 0) if centre == 2 else (number * 7) % 5 % 3
    return ",".join([*map(str, numbers), "?", "?", "3", str(ill)])


def lines_of(centre: int, count: int) -> list[str]:
    return [row(number, centre) for number in range(count)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "heart-disease"
    folder.mkdir()
    for number, (name, count) in enumerate(SIZES.items()):
        (folder / f"processed.{name}.data").write_text("\n".join(lines_of(number, count)) + "\n")
    return tmp_path


def test_centre_is_read_as_features_with_dummies_and_two_classes(tmp_path: Path) -> None:
    file = tmp_path / "one"
    lines = ["63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0", "40,0,4,110,?,0,1,99,1,0,?,?,?,3"]
    lines += ["41,0,3,111,201,0,1,98,1,.5,?,?,?,3", "42,1,2,112,202,0,0,97,0,1,2,?,?,1"]
    lines += ["43,1,4,113,203,1,0,96,0,1,?,1,7,0"]
    file.write_text("\n".join(lines))

    labels, features = read_centre(file)

    assert labels.tolist() == [0, 1, 1, 0]  # the second line misses its cholesterol
    assert features.tolist() == [
        [63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1],
        [41, 0, 111, 201, 0, 98, 1, 0.5, 0, 1, 0, 1, 0],
        [42, 1, 112, 202, 0, 97, 0, 1, 1, 0, 0, 0, 0],
        [43, 1, 113, 203, 1, 96, 0, 1, 0, 0, 1, 0, 0],
    ]


def test_halves_hold_two_thirds_and_one_third_of_every_centre(root: Path) -> None:
    train, test = (open_split("heart-disease", half, root=str(root)) for half in ("train", "test"))
    for half in (train, test):
        assert half.input_shape == (13, 1, 1)
        assert (half.num_classes, half.augmentation) == (2, "none")
        assert half.take().images.shape == (len(half.labels), 13, 1, 1)
        assert half.take().images.dtype == torch.float32
        assert half.labels.dtype == torch.int64
    counts = zip(train.domains.bincount().tolist(), test.domains.bincount().tolist(), strict=True)
    for (for_training, for_testing), size in zip(counts, SIZES.values(), strict=True):
        assert for_training + for_testing == size
        assert for_testing == pytest.approx(0.34 * size, abs=1.0)
    # In the shares of the classes, where a centre has enough of both.
    for centre in (0, 1):
        shares = [half.labels[half.domains == centre].float().mean().item() for half in (train, test)]  # type: ignore[operator]
        assert shares[0] == pytest.approx(shares[1], abs=0.1)


def test_absent_files_are_downloaded_whole_with_their_md5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def download(url: str, root: str, filename: str, md5: str) -> None:
        asked[filename] = md5
        centre = list(CENTRES).index(url.split(".")[-2])
        (Path(root) / filename).write_text("\n".join(lines_of(centre, 12)))

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", download)
    assert len(open_split("heart-disease", "train", root=str(tmp_path)).labels) == 4 * 7
    assert asked == {f"processed.{centre}.data": md5 for centre, md5 in CENTRES.items()}
    assert sorted(path.name for path in (tmp_path / "heart-disease").iterdir()) == sorted(asked)
    asked.clear()
    open_split("heart-disease", "test", root=str(tmp_path))
    assert not asked


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["1,2,3"] * 5, r"rows of shape \(3,\)"),
        (["1,2,3", *lines_of(0, 5)], "damaged"),
        (["a" + line for line in lines_of(0, 5)], "could not convert"),
        ([], "damaged"),
        (lines_of(0, 3), "3 complete rows"),
        ([line.replace(",", ",?", 1) for line in lines_of(0, 9)], "damaged"),
        (["63,1,9,145,233,1,2,150,0,2.3,3,0,6,0"] * 6, "column 2 has other values than 1, 2, 3, 4"),
    ],
    ids=["narrow", "ragged", "letters", "empty", "few", "half-unknown", "level"],
)
def test_damaged_file_is_named_in_one_line(root: Path, lines: list[str], why: str) -> None:
    (root / "heart-disease" / "processed.hungarian.data").write_text("\n".join(lines))
    with pytest.raises(DataError, match=why) as caught:
        open_split("heart-disease", "train", root=str(root))
    assert "processed.hungarian.data under data.root is damaged" in str(caught.value)
