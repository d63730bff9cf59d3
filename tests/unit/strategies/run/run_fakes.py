"""A small run and a client's state on the disk, for the tests of what damages them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client_app.keeping import KeptModel, Trained
from fl_app.ledger import Ledger
from fl_app.node_policy import FREE
from fl_app.privacy import PrivacyConfig
from strategies.client.logits import LogitCache, Logits
from strategies.client.round_state import RoundState
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec, Job, Normalization, Outcome
from strategies.methods.fedens import METHOD
from strategies.run.run_folder import RunFolder
from strategies.run.stage import StageReport

RUN = "0123456789abcdef" * 2
BUILDERS = {"x": lambda: torch.nn.Linear(1, 1)}


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 1), value), "bias": torch.full((1,), value)}


def run_of(root: Path, *clients: str) -> RunFolder:
    run = RunFolder.create(root / "run", {"method": "fedens", "seed": 0})
    for number, client in enumerate(clients):
        ranges = {"layer": (0.0, 1.0 + number)}
        run.round().accept(UploadFacts(client, "x", number, (number, 1), ranges=ranges), weights(number))
    return run


def job_of(run: RunFolder, server_round: int = 1) -> Job:
    return Job(uploads=run.round(server_round).uploads(), builders=BUILDERS, student="x", num_classes=1,
               input_shape=(1, 1, 1), normalization=Normalization((0.0,), (1.0,)), config=METHOD.config())  # fmt: skip


def report_of(run: RunFolder, value: float, server_round: int = 1) -> StageReport:
    uploads = run.round(server_round).uploads()
    spec = EnsembleSpec(tuple(u.client for u in uploads), "weighted", {"weights": torch.full((len(uploads),), value)})
    images = torch.full((1, 1, 2, 2), int(value), dtype=torch.uint8)
    return StageReport(Outcome(weights(value), spec, {"fit": 1.0}, images), job_of(run, server_round), 0, 1.0)


def kept_model(root: Path) -> KeptModel:
    return KeptModel(str(root / "state"), RUN, "a", 1)


def keep_model(root: Path, value: float) -> None:
    facts = UploadFacts("a", "x", 1, (1,), ranges={"layer": (0.0, 1.0)})
    kept_model(root).save(Trained(facts, value, 1.0), weights(value))


def round_state(root: Path) -> RoundState:
    return RoundState(root / "state" / RUN, "a")


def kept_logits(root: Path) -> LogitCache:
    return LogitCache(str(root / "state"), RUN, "a")


def keep_logits(root: Path) -> None:
    values, inputs = np.full((1, 2, 3), 0.5, np.float32), np.ones((2, 4), np.float32)
    kept_logits(root).save("e" * 64, Logits(("m",), values, np.zeros(2, np.int64), inputs))


def ledger(root: Path) -> Ledger:
    return Ledger.of(root / "state", "a")


def spend(root: Path, run: str) -> None:
    ledger(root).enter(PrivacyConfig(epsilon=8.0), FREE, run=run, server_round=1)


def described(value: Any, *, ordered: bool = True) -> str:
    """Return a text that differs where any value, type, bit or, if wanted, order of keys differs."""
    if isinstance(value, dict):
        texts = [f"{key!r}: {described(item, ordered=ordered)}" for key, item in value.items()]
        return "{" + ", ".join(texts if ordered else sorted(texts)) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(described(item, ordered=ordered) for item in value)})"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.tolist()}"
    return struct.pack(">d", value).hex() if isinstance(value, float) else repr(value)
