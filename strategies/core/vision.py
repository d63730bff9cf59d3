"""The one place that imports torchvision; use ``vision.torchvision`` of this module everywhere else.

A CPU build of torch cannot load the compiled operators of a torchvision built for CUDA. Then ``import torchvision``
fails, because it attaches shape rules to two operators that do not exist. These two serve object detection, which this
app does not use, so declaring them without a kernel is enough.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

__all__ = ["torchvision"]


def _import_torchvision() -> ModuleType:
    """Import torchvision; if its import fails for lack of the two operators, declare them and import again."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if torch.version.cuda is not None or "operator torchvision::nms does not exist" not in str(error):
            raise
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision")


torchvision: Any = _import_torchvision()
