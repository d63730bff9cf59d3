"""Tally's pool as the teacher of a job: whose logits it gives, and what the methods that take it do with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import UPLOADS, telling, tiny_job

from strategies import fed_et
from strategies.combiners.combiners import Mean, weights_gradient
from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.tally_pool import TallyPoolOptions, fitted_pool
from strategies.distillation.learner import teacher_of
from strategies.method import Job
from strategies.teacher.ensemble import Ensemble

INPUTS = torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(1))
MUTE = tuple(telling(upload, label_counts=None) for upload in UPLOADS)
HALF_MUTE = (*UPLOADS[:2], MUTE[2])
COUNTS = torch.tensor([upload.label_counts for upload in UPLOADS], dtype=torch.float32)


def taught(**changes: Any) -> Job:
    return replace(tiny_job(None), teacher="tally", **changes)


@pytest.mark.parametrize("uploads", [UPLOADS, MUTE, HALF_MUTE], ids=["told", "silent", "one silent"])
def test_teacher_of_a_job_is_its_uploads_under_tallys_pool(uploads: Any) -> None:
    job = taught(uploads=uploads)
    by_hand = Ensemble.from_uploads(uploads, job.builders, Mean())
    pool = fitted_pool(job, by_hand, TallyPoolOptions())

    teacher = teacher_of(job, Mean())

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
    teacher = teacher_of(taught(uploads=uploads), Mean(), watched=watched)
    torch.nn.functional.cross_entropy(teacher(images), torch.tensor([0, 1, 2, 0, 1])).backward()  # type: ignore[no-untyped-call]
    assert images.grad is not None
    assert bool((images.grad.abs().amax((1, 2, 3)) > 0).all())
    assert all(parameter.grad is None for parameter in teacher.members.parameters())


def test_consensus_of_fed_et_is_the_pools_and_other_decisions_dissent() -> None:
    logits = torch.tensor([[[0.0, 3.0, 0.0]], [[0.0, 1.5, 0.0]], [[9.0, 0.0, 0.0]]])
    pool = OpinionPool("linear", torch.tensor([[5.0, 9.0, 0.0], [0.0, 9.0, 1.0], [0.0, 0.0, 9.0]]))
    consensus, dissent = fed_et.Judgement(1.0, pool)(logits).unbind(1)
    torch.testing.assert_close(consensus, torch.softmax(pool(logits), dim=1))
    alone, _ = fed_et.Judgement(1.0)(logits).unbind(1)
    assert int(consensus.argmax()) != int(alone.argmax())
    assert int(dissent.argmax()) == int(alone.argmax())


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
