"""Who knows which class: as told, or read off the models of small clients that were trained here."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from method_fakes import UPLOADS, model_of, telling, tiny_job, train
from torch import Tensor, nn

from strategies.combiners.combiners import Mean, weights_gradient
from strategies.combiners.noise import noise_batches
from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.tally_pool import (
    TallyPoolOptions,
    examples_per_class,
    fit_pool,
    geometric_mean,
    response_shares,
    row_shares,
)
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator
from strategies.distillation.learner import build_teacher
from strategies.method import TEACHERS, Job, Normalization, Upload
from strategies.teacher.ensemble import Ensemble

SHAPE, CLASSES = (1, 6, 6), 4
# What each client has of each class, the third by far the most of all.
HELD = ((40, 38, 1, 1), (2, 30, 8, 40), (2, 4, 194, 0))
SPACE = Normalization((0.4,), (0.3,))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))


def deep() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, CLASSES), nn.Identity())


BUILDERS = {"linear": linear, "deep": deep}
SIDES = torch.randn(CLASSES, *SHAPE, generator=torch.Generator().manual_seed(3))  # what images of a class share


@cache
def trained(k: int, architecture: str) -> dict[str, Tensor]:
    """Train client k on images of its classes, from weights that all clients start from."""
    rng = torch.Generator().manual_seed(k)
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(HELD[k]))
    images = 0.7 * SIDES[labels] + torch.randn(len(labels), *SHAPE, generator=rng)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BUILDERS[architecture]()
    return train(model, images, labels, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), 60)


def upload(k: int, architecture: str = "linear", **facts: Any) -> Upload:
    told = {"num_examples": sum(HELD[k]), "label_counts": HELD[k]}
    return Upload(UploadFacts(f"c{k}", architecture, **{**told, **facts}), lambda: trained(k, architecture))


TOLD = tuple(upload(k) for k in range(3))
SILENT = tuple(upload(k, architecture, label_counts=None) for k, architecture in enumerate(("linear", "deep", "deep")))
MIXED = (TOLD[0], SILENT[1], upload(2, label_counts=(0, 0, 0, 0)))


def job(uploads: tuple[Upload, ...], seed: int = 0) -> Job:
    return Job(uploads, BUILDERS, "linear", CLASSES, SHAPE, SPACE, None, seed=seed)


def ensemble(uploads: tuple[Upload, ...]) -> Ensemble:
    return Ensemble.from_uploads(uploads, BUILDERS, Mean())


def counted(uploads: tuple[Upload, ...], *, sharpness: float = 1.0, **options: Any) -> Tensor:
    given = TallyPoolOptions(sharpness=sharpness, **options)
    return examples_per_class(job(uploads), noise_answers(uploads, given.probes), uploads, given)


def noise_answers(uploads: tuple[Upload, ...], count: int, seed: int = 0) -> Tensor:
    images = (next(noise_batches(count, SHAPE, generator(seed, "tally", "probes"))) - 0.4) / 0.3
    return torch.stack([model_of(one, BUILDERS)(images).detach() for one in uploads])


def estimate_counts(uploads: tuple[Upload, ...], counts: str, probes: int = 1024) -> Tensor:
    """Return what an estimator finds, out of its parts."""
    names = {"linear": "1.weight", "deep": "3.weight"}
    noise = response_shares(noise_answers(uploads, probes))
    rows = row_shares(torch.stack([one.read()[names[one.architecture]].norm(dim=1) for one in uploads]))
    return {"noise": noise, "rows": rows, "noise-rows": geometric_mean(noise, rows)}[counts]


@pytest.mark.parametrize("counts", ["noise", "rows", "noise-rows"])
def test_counts_of_silent_clients_are_estimated_from_their_models(counts: str) -> None:
    found = counted(SILENT, counts=counts, probes=300)
    sizes = torch.tensor([[80.0], [80.0], [200.0]])
    torch.testing.assert_close(found, (sizes * estimate_counts(SILENT, counts, 300)).float(), rtol=1e-4, atol=1e-4)
    assert found.dtype == torch.float32
    # What clients tell is not looked at.
    talkers = tuple(telling(one, label_counts=(1, 2, 3, 4)) for one in SILENT)
    assert torch.equal(counted(talkers, counts=counts, probes=300), found)
    # Sharper shares are squared, and in sum 1 again.
    shares = (found / found.sum(1, keepdim=True)).square()
    expected = sizes * shares / shares.sum(1, keepdim=True)
    torch.testing.assert_close(
        counted(SILENT, counts=counts, probes=300, sharpness=2.0), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("counts", ["noise", "rows", "noise-rows"])
@pytest.mark.parametrize("architecture", ["linear", "deep"])
def test_estimated_shares_match_the_clients_classes(counts: str, architecture: str) -> None:
    uploads = tuple(upload(k, architecture, label_counts=None) for k in range(3))
    found = counted(uploads, counts=counts)
    shares, true = found / found.sum(1, keepdim=True), torch.tensor(HELD) / torch.tensor(HELD).sum(1, keepdim=True)
    for mine, theirs in zip(shares, true, strict=True):
        # A class that a client has got counts for more than one of which it has next to nothing.
        assert float(mine[theirs > 0.3].min()) > float(mine[theirs < 0.03].max())
    assert shares[2].argmax() == 2
    assert float((shares - true).abs().sum(1).mean()) < float((0.25 - true).abs().sum(1).mean())


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("rule", ["linear", "log"])
def test_pool_is_the_one_that_is_asked_for_with_the_members_counts(rule: str, calibrated: bool) -> None:
    members = ensemble(MIXED)
    options = TallyPoolOptions(
        rule=rule, temperature=1.5, smoothing=0.2, sharpness=1.0, probes=300, calibrated=calibrated
    )
    fitted = fit_pool(job(MIXED), members, options)
    pool = OpinionPool(rule, counted(MIXED, probes=300), None, torch.full((3,), 1.5), torch.tensor([0.2]))
    if calibrated:
        pool.calibrate(noise_answers(MIXED, 300))
    assert fitted.rule == rule
    assert not fitted.training
    found = fitted.state_dict()
    assert found.keys() == pool.state_dict().keys()
    for name, value in pool.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)
    assert bool(found["scales"].any()) is calibrated


# Tally's pool as the teacher of a job: whose logits it gives, and what the methods that take it do with them.


INPUTS = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(1))
MUTE = tuple(telling(upload, label_counts=None) for upload in UPLOADS)
HALF_MUTE = (*UPLOADS[:2], MUTE[2])
COUNTS = torch.tensor([upload.label_counts for upload in UPLOADS], dtype=torch.float32)


def taught(**changes: Any) -> Job:
    return replace(tiny_job(None), **{"teacher": "tally", **changes})


@pytest.mark.parametrize("uploads", [UPLOADS, MUTE, HALF_MUTE], ids=["told", "silent", "one silent"])
def test_teacher_of_a_job_is_its_uploads_under_tallys_pool(uploads: Any) -> None:
    job = taught(uploads=uploads)
    by_hand = Ensemble.from_uploads(uploads, job.builders, Mean())
    pool = fit_pool(job, by_hand, TallyPoolOptions())

    teacher = build_teacher(job, Mean())

    torch.testing.assert_close(teacher(INPUTS), pool(by_hand.member_logits(INPUTS)))
    assert not torch.allclose(teacher(INPUTS), teacher.member_logits(INPUTS).mean(0))
    told = [upload.label_counts is not None for upload in uploads]
    for found, wanted, known in zip(pool.counts, COUNTS, told, strict=True):
        assert float(found.sum()) == pytest.approx(float(wanted.sum()))  # the numbers of examples are known
        assert torch.allclose(found, wanted) == known


@pytest.mark.parametrize("uploads", [UPLOADS, MUTE], ids=["told", "silent"])
@pytest.mark.parametrize("watched", [False, True])
def test_gradient_of_the_teacher_reaches_the_images(uploads: Any, watched: bool) -> None:
    images = INPUTS.clone().requires_grad_()
    teacher = build_teacher(taught(uploads=uploads), Mean(), watched=watched)
    torch.nn.functional.cross_entropy(teacher(images), torch.tensor([0, 1, 2, 0, 1])).backward()  # type: ignore[no-untyped-call]
    assert bool((images.grad.abs().amax((1, 2, 3)) > 0).all())
    assert all(parameter.grad is None for parameter in teacher.members.parameters())


@pytest.mark.parametrize("rule", ["linear", "log"])
def test_gradient_by_the_weights_of_a_pool_is_that_of_small_changes(rule: str) -> None:
    combiner = OpinionPool(rule, COUNTS, torch.tensor([0.2, 0.5, 0.3])).double()
    logits = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = weights_gradient(combiner, logits, labels)
    for k in range(3):
        losses = []
        for change in (1e-6, -1e-6):
            moved = combiner.weights.clone()
            moved[k] += change
            answer = torch.func.functional_call(combiner, {"weights": moved}, (logits,))
            losses.append(torch.nn.functional.cross_entropy(answer, labels))
        assert float(found[k]) == pytest.approx(float(losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-8)
    assert combiner.weights.tolist() == pytest.approx([0.2, 0.5, 0.3])
    assert float(found.abs().min()) > 1e-6


def test_teacher_by_examples_is_the_mean_of_logits_weighted_by_them() -> None:
    ensemble, _ = TEACHERS["dw-fedens"].build(taught(teacher="dw-fedens"))

    wanted = sum((one.num_examples or 0) * model_of(one)(INPUTS) for one in UPLOADS) / (10 + 20 + 30)
    torch.testing.assert_close(ensemble(INPUTS), wanted, rtol=1e-4, atol=1e-5)
