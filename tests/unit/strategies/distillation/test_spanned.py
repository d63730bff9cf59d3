"""Noise moved into the spans of the clients' updates: the blur, the objective, the clients and the classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor, nn

from strategies.combiners.update_gate import Spans, find_spans
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator
from strategies.distillation.spanned import Objective
from strategies.method import Job, Normalization, Upload

SHAPE, CLASSES, CLIENTS = (2, 6, 5), 3, 3


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(120, 7), nn.ReLU(), nn.Linear(7, CLASSES)
    )


def state(client: int) -> dict[str, Tensor]:
    """The start, and an update of two directions."""
    model, rng = convolutional(), generator(client, "update")
    found = dict(model.state_dict())
    found["3.weight"] = found["3.weight"] + torch.randn(7, 2, generator=rng) @ torch.randn(2, 120, generator=rng).abs()
    found["0.weight"] = found["0.weight"] + 0.1 * torch.randn(found["0.weight"].shape, generator=rng)
    return found


def make_job() -> Job:
    facts = [UploadFacts(f"c{k}", "net", 9, None) for k in range(CLIENTS)]
    uploads = tuple(Upload(one, lambda k=k: state(k)) for k, one in enumerate(facts))  # type: ignore[misc]
    space = Normalization((0.5, 0.4), (0.5, 0.3))
    return Job(
        uploads,
        {"net": convolutional},
        "net",
        CLASSES,
        SHAPE,
        space,
        None,
        start=convolutional().state_dict(),
        clients_seed=0,
    )


def make_spans(job: Job) -> Spans:
    found = find_spans(job, [True] * CLIENTS)
    assert isinstance(found, Spans), found
    return found


@pytest.fixture(autouse=True)
def no_limit_of_likeness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.teacher.merged.ALIKE", -1.0)


@pytest.fixture
def noise() -> Tensor:
    return torch.randint(0, 256, (24, *SHAPE), dtype=torch.uint8, generator=generator(3, "noise"))


def test_objective_is_the_sum_of_both_residuals_and_the_classes_cross_entropy(noise: Tensor) -> None:
    job = make_job()
    spans = make_spans(job)
    labels = torch.tensor([0, 2, 1, 1])
    pixels = noise[:4] / 255
    with torch.no_grad():
        found = Objective(job, spans, 2)(pixels, labels)
        inputs = (pixels - torch.tensor([0.5, 0.4]).view(1, 2, 1, 1)) / torch.tensor([0.5, 0.3]).view(1, 2, 1, 1)
        client, start = convolutional(), convolutional()
        client.load_state_dict(state(2))
        logits = client(inputs).double().numpy()
        features = [net[:3](inputs).double().numpy() for net in (start, client)]  # type: ignore[index]
    rows = np.linalg.svd((state(2)["3.weight"] - start.state_dict()["3.weight"]).double().numpy())[2][:2]
    ratios = [1 - ((a @ rows.T) ** 2).sum(1) / (a**2).sum(1) for a in features]
    ce = logsumexp(logits, axis=1) - logits[np.arange(4), labels.numpy()]
    expected = np.log(ratios).sum() + 0.1 * ce.sum()
    assert float(found) == pytest.approx(expected, rel=1e-4)
