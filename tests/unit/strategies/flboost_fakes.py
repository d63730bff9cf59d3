"""Three small clients for the tests of FLBoost."""

from __future__ import annotations

from dataclasses import replace
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


def other() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 5, 5), nn.ReLU(), nn.Flatten(), nn.Linear(80, C))


BUILDERS = {"net": net, "other": other}


def weights(name: str, seed: int) -> State:
    with seeded_torch(seed, "weights"):
        state: State = BUILDERS[name]().state_dict()
    draw = rng(seed, "moved")
    return {k: v + torch.rand(v.shape, generator=draw) / 2 if v.is_floating_point() else v for k, v in state.items()}


def job(config: FlBoostConfig = SMALL, *, kinds: tuple[str, ...] = ("net",) * 3, **changes: Any) -> Job:
    uploads = []
    for k, kind in enumerate(kinds):
        state = weights(kind, k)
        uploads.append(Upload(UploadFacts(f"c{k}", kind, sum(COUNTS[k]), COUNTS[k]), lambda state=state: state))  # type: ignore[misc]
    made = Job(tuple(uploads), BUILDERS, "net", C, SHAPE, Normalization((0.4,), (0.3,)), config)
    return replace(made, **{"start": weights("net", 9), **changes})


def student(outcome: Outcome) -> State:
    assert outcome.student is not None
    return outcome.student
