"""AG-News, on small files that the tests write themselves."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from fl_app.data import open_split
from fl_app.data.text import BUCKETS, LENGTH, PUBLISHED, tokens
from strategies.core.errors import DataError
from strategies.core.vision import torchvision

TRAIN = '"3","Shares ""fell""","Wall St.\\down"\n"1","Peace","talks, at last"\n"4","C++",""\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "ag_news"
    folder.mkdir()
    (folder / "train.csv").write_text(TRAIN)
    (folder / "test.csv").write_text('"2","Cup","final"\n')
    return tmp_path


def numbers(*words: str) -> list[int]:
    return [zlib.crc32(word.encode()) % (BUCKETS - 1) + 1 for word in words]


def test_texts_are_read_with_their_columns_joined(root: Path) -> None:
    split = open_split("ag-news", "train", root=str(root))
    found = split.take()

    assert found.labels.tolist() == [2, 0, 3]
    assert found.images.dtype == torch.int64
    assert found.images.shape == (3, 1, 1, LENGTH)
    assert (split.input_shape, split.num_classes, split.domains) == ((1, 1, LENGTH), 4, None)
    assert found.images[0, 0, 0, :5].tolist() == numbers("shares", "fell", "wall", "st", "down")
    assert found.images[1, 0, 0, :5].tolist() == [*numbers("peace", "talks", "at", "last"), 0]
    assert found.images[2, 0, 0, :2].tolist() == [*numbers("c"), 0]


def test_tokens_of_a_long_an_empty_and_a_foreign_text_fit() -> None:
    found = tokens([" ".join(f"w{number}" for number in range(100)), "", "é café 你好"])[:, 0, 0]
    assert found.shape == (3, LENGTH)
    assert found[0].tolist() == numbers(*(f"w{number}" for number in range(LENGTH)))
    assert not found[1].any()
    assert found[2, :2].tolist() == [*numbers("caf"), 0]
    assert tokens([f"w{number}" for number in range(3000)]).max() < BUCKETS
    assert tokens([f"w{number}" for number in range(3000)])[:, 0, 0, 0].min() > 0


def test_absent_file_is_downloaded_with_its_md5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(_url: str, root: str, filename: str, md5: str) -> None:
        assert md5 == PUBLISHED[filename]
        (Path(root) / filename).write_text(TRAIN)

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", download)
    assert len(open_split("ag-news", "train", root=str(tmp_path)).labels) == 3
    assert [path.name for path in (tmp_path / "ag_news").iterdir()] == ["train.csv"]


@pytest.mark.parametrize(
    "content", ['"5","a"\n', '"0","a"\n', '"x","a"\n', "", "\n", '"1","a"\n\n', "\udcff"], ids=range(7)
)
def test_damaged_file_is_named_in_one_line(root: Path, content: str) -> None:
    (root / "ag_news" / "train.csv").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"train\.csv under data\.root is damaged"):
        open_split("ag-news", "train", root=str(root))
