"""Noise moved into the spans of the clients' updates: the blur, the objective, the clients and the classes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from torch import Tensor, nn

from strategies.combiners.update_gate import Spans, lower_part, residual, spans_of
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator
from strategies.core.work import Work, counted
from strategies.distillation import spanned
from strategies.distillation.spanned import Objective, moved, spanned_images
from strategies.method import Job, Normalization, Upload

SHAPE, CLASSES, CLIENTS = (2, 6, 5), 3, 3
EXAMPLES = torch.tensor([[9.0, 0, 4], [0, 0, 0], [0, 25, 1]])


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
    found = spans_of(job, [True] * CLIENTS)
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


def test_the_client_reads_the_same_pixels_as_the_start(noise: Tensor) -> None:
    def small(*, inplace: bool) -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Flatten(), nn.Linear(60, 7), nn.ReLU(), nn.Linear(7, CLASSES))
        return nn.Sequential(nn.LeakyReLU(0.1, inplace=inplace), *layers)

    found = []
    for inplace in (True, False):
        job = make_job()
        uploads = tuple(Upload(one.facts, small(inplace=False).state_dict) for one in job.uploads)
        job = replace(job, uploads=uploads, builders={"net": partial(small, inplace=inplace)}, start=None)
        bases = torch.linalg.qr(torch.randn(60, 5, generator=generator(0, "basis")))[0].T.expand(CLIENTS, 5, 60)
        spans = Spans(lower_part(small(inplace=inplace))[1], bases, 1.0)  # type: ignore[arg-type]
        found.append(float(Objective(job, spans, 0)(noise[:4] / 255, torch.tensor([0, 1, 2, 0]))))
    assert found[0] == pytest.approx(found[1])


def test_images_move_into_the_span_of_their_client(noise: Tensor) -> None:
    job = make_job()
    spans, labels = make_spans(job), torch.zeros(len(noise), dtype=torch.long)
    objective = Objective(job, spans, 0)

    def outside(images: Tensor) -> float:
        inputs = objective.standardize(images / 255)
        both = [residual(layers(inputs), objective.basis) for layers in (objective.start, objective.below)]
        return float(torch.stack(both).mean())

    found = moved(noise, labels, objective, steps=40)
    assert found.dtype == torch.uint8
    assert found.shape == noise.shape
    assert outside(found) < 0.6 * outside(noise)


def test_a_client_without_examples_gets_no_image_and_seeds_decide(
    noise: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spanned, "BATCH", 4)
    job = make_job()
    spans, asked = make_spans(job), []
    objectives = {k: Objective(job, spans, k) for k in (0, 2)}
    monkeypatch.setattr(spanned, "Objective", lambda _, __, k: asked.append(k) or objectives[k])

    def make(seed: int) -> Tensor:
        torch.manual_seed(len(asked))  # the global generator decides nothing
        return spanned_images(job, spans, EXAMPLES, noise, steps=2, rng=generator(seed, "test"))

    with counted(Work()) as work:
        first = make(1)
    assert torch.equal(first, make(1))
    assert not torch.equal(first, make(2))
    assert not torch.equal(first, noise)
    assert {*asked} == {0, 2}
    assert work.teacher_forward == work.teacher_backward == 2 * len(noise)
