"""Both halves of a data set, decoded; and files in the layouts of MNIST and SVHN."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.io

from fl_app.data import open_split


def load(name: str, **how: Any) -> SimpleNamespace:
    train, test = (open_split(name, half, **how) for half in ("train", "test"))
    facts = {key: getattr(train, key) for key in ("num_classes", "input_shape", "augmentation")}
    return SimpleNamespace(train=train.take(), test=test.take(), **facts)


def write_idx(file: Path, values: np.ndarray[Any, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    file.write_bytes(head + values.tobytes())


def pixels(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_mnist(root: Path, folder: str = "MNIST", counts: tuple[int, int] = (7, 4), first: int = 3) -> None:
    """Write both halves; the labels count up from the first."""
    for half, count, seed in zip(("train", "t10k"), counts, (1, 2), strict=True):
        write_idx(root / folder / "raw" / f"{half}-images-idx3-ubyte", pixels(count, 28, 28, seed=seed))
        write_idx(root / folder / "raw" / f"{half}-labels-idx1-ubyte", (np.arange(count) + first).astype(np.uint8) % 10)


def write_matlab(file: Path, labels: np.ndarray[Any, Any]) -> None:
    """Write SVHN's layout."""
    scipy.io.savemat(file, {"X": pixels(32, 32, 3, len(labels)), "y": labels.astype(np.uint8)[:, None]})
