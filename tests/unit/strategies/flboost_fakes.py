"""Three small clients for the tests of FLBoost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator as rng
from strategies.core.seeds import seeded_torch
from strategies.method import Job, Normalization, Outcome, Upload
from strategies.methods.flboost import FlBoostConfig

State = dict[str, Tensor]
SHAPE, C, Z, B = (1, 8, 8), 4, 5, 6
COUNTS = ((5, 0, 5, 0), (0, 6, 5, 9), (2, 1, 0, 18))
SMALL = FlBoostConfig(iterations=2, batch_size=B, latent=Z, generator_precision="float32")


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 7), nn.ReLU(), nn.Linear(7, C)
    )


def weights(seed: int) -> State:
    with seeded_torch(seed, "weights"):
        state: State = net().state_dict()
    draw = rng(seed, "moved")
    return {k: v + torch.rand(v.shape, generator=draw) / 2 if v.is_floating_point() else v for k, v in state.items()}


def job(config: FlBoostConfig = SMALL, **changes: Any) -> Job:
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", "net", sum(counts), counts), partial(weights, k)) for k, counts in enumerate(COUNTS)
    )
    made = Job(uploads, {"net": net}, "net", C, SHAPE, Normalization((0.4,), (0.3,)), config)
    return replace(made, **{"start": weights(9), **changes})


def student(outcome: Outcome) -> State:
    assert outcome.student is not None
    return outcome.student
