"""Both halves of a data set, decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fl_app.data import open_split


def load(name: str, **how: Any) -> SimpleNamespace:
    train, test = (open_split(name, half, **how) for half in ("train", "test"))
    facts = {key: getattr(train, key) for key in ("num_classes", "input_shape", "augmentation")}
    return SimpleNamespace(train=train.take(), test=test.take(), **facts)
