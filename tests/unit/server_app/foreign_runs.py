"""Run folders as the strategies of another project leave them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from strategies.core.facts import UploadFacts
from strategies.run.run_folder import RunFolder


def foreign_run(path: Path, uploads: Mapping[str, tuple[str, Mapping[str, torch.Tensor]]], **facts: Any) -> Path:
    """Make a run folder with uploads, client -> (architecture, weights)."""
    info = {
        "method": "fedens",
        "seed": 4,
        "student": "model",
        "num-classes": 3,
        "input-shape": [1, 4, 4],
        "normalization": [[0.5], [0.5]],
        **facts,
    }
    with RunFolder.create(path, info) as folder:
        for client, (architecture, state) in uploads.items():
            folder.round(1).accept(UploadFacts(client, architecture, 5), dict(state))
    return path
