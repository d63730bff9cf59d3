"""Both halves of a data set, decoded; and files in the layout of MNIST."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fl_app.data import open_split


def load(name: str, **how: Any) -> SimpleNamespace:
    train, test = (open_split(name, half, **how) for half in ("train", "test"))
    facts = {key: getattr(train, key) for key in ("num_classes", "input_shape", "augmentation")}
    return SimpleNamespace(train=train.take(), test=test.take(), **facts)


def write_idx(file: Path, values: np.ndarray[Any, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    file.write_bytes(head + values.tobytes())
