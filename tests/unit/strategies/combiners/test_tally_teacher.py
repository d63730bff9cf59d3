"""Tally's pool as the teacher of a job: whose logits it gives, and what the methods that take it do with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import TINY, UPLOADS, same, telling, tiny_job

from strategies import dense, fed_et
from strategies.combiners.combiners import Mean, Weighted, name_of, weighted_mean_gradient, weights_gradient
from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.tally_pool import TallyPoolOptions, fitted_pool
from strategies.combiners.tally_teacher import tally_teacher
from strategies.core.errors import OptionError
from strategies.distillation.learner import teacher_of
from strategies.method import Job, Silent
from strategies.teacher.ensemble import Ensemble
from strategies.uploads.needs import check_needs

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


def test_same_seed_gives_the_same_teacher_and_another_seed_other_probes() -> None:
    first, again, other = (tally_teacher(taught(uploads=MUTE, seed=seed))[1].counts for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_teacher_has_the_arithmetic_that_the_options_ask_for() -> None:
    teacher = teacher_of(taught(uploads=MUTE), Mean(), precision="bfloat16")
    assert {parameter.dtype for parameter in teacher.members.parameters()} >= {torch.bfloat16}
    assert teacher(INPUTS).dtype == torch.float32


def test_dense_learns_from_the_pool_and_from_estimates_where_clients_are_silent() -> None:
    config = dense.DenseConfig(**TINY, bn_weight=0.0)
    job = tiny_job(config)
    jobs = (job, replace(job, teacher="tally"), replace(job, teacher="tally", uploads=MUTE))
    plain, told, silent = (dense.fit(one, Silent()) for one in jobs)
    assert same(dense.fit(jobs[2], Silent()), silent)
    assert not same(plain, told)
    assert not same(told, silent)


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


def test_gradient_by_autograd_of_a_weighted_mean_is_the_closed_form() -> None:
    combiner, labels = Weighted([0.2, 0.5, 0.3]), torch.tensor([0, 1, 2, 0])
    logits = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(3))
    closed = weighted_mean_gradient(combiner.weights, logits, labels)
    torch.testing.assert_close(weights_gradient(combiner, logits, labels), closed, rtol=1e-4, atol=1e-6)


def test_names_of_combiners_are_those_they_are_rebuilt_by() -> None:
    pools = (OpinionPool("linear", COUNTS), OpinionPool("log", COUNTS))
    names = [name_of(one) for one in (Mean(), Weighted([1.0]), *pools)]
    assert names == ["mean", "weighted", "linear-pool", "log-pool"]


def test_a_teacher_of_another_name_is_refused() -> None:
    with pytest.raises(OptionError, match="teacher is 'telly': must be 'tally', 'dw-fedens' or None"):
        check_needs(dense.METHOD, replace(tiny_job(dense.DenseConfig()), teacher="telly"))  # type: ignore[arg-type]
