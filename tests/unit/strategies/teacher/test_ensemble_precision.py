"""Members in bfloat16 by choice: on processors that compute in it, for large models that stand it."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from strategies.combiners.combiners import Mean
from strategies.core.facts import UploadFacts
from strategies.core.work import Work, count_work
from strategies.method import Job, Normalization, Upload
from strategies.teacher import ensemble
from strategies.teacher.ensemble import Ensemble

SHAPE = (1, 8, 8)


class Mixing(nn.Module):
    """Anybody's model: it adds float32 numbers of its own before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.flatten(1) + torch.ones(64))
        return logits


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


class Digits(nn.Module):
    """A model that needs more digits than bfloat16 has: the difference of two large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.flatten(1) + 1000) - self.head(torch.full_like(x.flatten(1), 1000))
        return logits


def job(builders: dict[str, Any], **changes: Any) -> Job:
    torch.manual_seed(0)
    uploads = tuple(
        Upload(UploadFacts(name, name), partial(dict, builder().state_dict())) for name, builder in builders.items()
    )
    half = Normalization((0.5,), (0.5,))
    return Job(uploads, builders, next(iter(builders)), 3, changes.pop("shape", SHAPE), half, None, **changes)


def precision_of(found: Job) -> torch.dtype:
    """Return the type of the weights that an ensemble by ``auto`` computes with."""
    members = Ensemble.of_job(found, found.uploads, Mean(), precision="auto").members
    (kind,) = {weight.dtype for weight in members.parameters()}  # type: ignore[union-attr]
    return kind


@pytest.fixture(autouse=True)
def large_on_a_processor_with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ensemble, "in_bfloat16", lambda *_: True)
    monkeypatch.setattr(ensemble, "SMALL", 64 * 3)


def test_large_models_of_images_compute_in_bfloat16_and_their_passes_are_counted() -> None:
    found = job({"flat": flat})
    assert precision_of(found) is torch.bfloat16
    images, counts = torch.rand(5, *SHAPE), Work()
    with count_work(counts):
        coarse = Ensemble.of_job(found, found.uploads, Mean(), precision="auto")(images)
        exact = Ensemble.of_job(found, found.uploads, Mean())(images)
    assert (counts.teacher_forward, counts.bfloat16_passes) == (10, 5)
    assert coarse.dtype is torch.float32
    assert 0 < (coarse - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("builder", [Mixing, Digits])
def test_a_model_that_does_not_stand_bfloat16_keeps_all_members_in_float32(builder: Any) -> None:
    assert precision_of(job({"flat": flat, "own": builder})) is torch.float32


def test_small_models_rows_and_other_processors_keep_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert precision_of(job({"flat": flat}, shape=(64, 1, 1))) is torch.float32
    monkeypatch.setattr(ensemble, "SMALL", 64 * 3 + 1)
    assert precision_of(job({"flat": flat})) is torch.float32
    monkeypatch.setattr(ensemble, "SMALL", 1)
    monkeypatch.setattr(ensemble, "in_bfloat16", lambda *_: False)
    assert precision_of(job({"flat": flat})) is torch.float32
