"""The one place that imports torchvision; use ``from fl_app.vision import torchvision`` everywhere else.

A CPU build of torch beside a torchvision built for CUDA cannot load torchvision's compiled operators, and then
``import torchvision`` itself fails: it attaches shape rules to two of them that do not exist. Nothing here detects
objects, so declaring these two, without a kernel, is all that is missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

__all__ = ["torchvision"]


def _declare_missing_operators() -> None:
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _import_torchvision() -> ModuleType:
    """Import torchvision, declaring the operators it misses if, and only if, that is why its import fails.

    Raises:
        RuntimeError: The import fails for another reason, or beside a CUDA build of torch, where the versions of
            the two packages do not belong together.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if torch.version.cuda is not None or "operator torchvision::nms does not exist" not in str(error):
            raise
    _declare_missing_operators()
    return importlib.import_module("torchvision")


torchvision: Any = _import_torchvision()
