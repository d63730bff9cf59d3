"""The server's half of FuseFL: its questions, the checks of answers, the mean and the calibration of the classifier."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fusefl_fakes import Answering, First
from method_fakes import Book
from torch import nn

from strategies.core.clients import Answer
from strategies.core.errors import QuorumError
from strategies.core.facts import UploadFacts
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.fusefl import FuseFlConfig, calibrate, fit_with_clients
from strategies.statistics.gaussians import Gaussians

BUILDERS = {"net": nn.Identity, "net+block": First}


def upload(k: int) -> Upload:
    state = {key: torch.full(value.shape, k + 1.0) for key, value in First().state_dict().items()}
    return Upload(UploadFacts(f"c{k}", "net+block", 20, (5, 5, 5, 5)), lambda: state)


def job(*, builders: Any = None, **options: Any) -> Job:
    config, space = FuseFlConfig(draws=40, **options), Normalization((0.5,), (0.5,))
    return Job(tuple(map(upload, range(3))), builders or BUILDERS, "net", 4, (1, 8, 8), space, config)


def test_questions_hold_every_client_s_block_in_order_and_the_last_ones_go_out_for_the_calibration() -> None:
    clients = Answering(job())

    outcome = fit_with_clients(clients.job, Silent(), clients)

    assert [(phase, question.facts["stage"]) for phase, question in clients.asked] == [
        ("block 2", 2),
        ("calibration", 3),
    ]
    first, last = (question.arrays for _, question in clients.asked)
    assert first["weight"].shape == (3, 3, 1, 3, 3)
    assert [float(part.mean()) for part in first["weight"]] == [1.0, 2.0, 3.0]
    assert set(last) == {"adapter.weight", "adapter.bias", "block.2.weight", "block.2.bias"}
    for k in range(3):
        sent = clients.answer(f"c{k}", 2).arrays["block.2.weight"]
        np.testing.assert_array_equal(last["block.2.weight"][k], sent)
        np.testing.assert_array_equal(outcome.ensemble.weights[f"stages.0.{k}.block.2.weight"], sent)


def test_calibration_is_an_epoch_of_steps_on_draws_of_the_classes_that_there_are() -> None:
    means = torch.tensor([[3.0, 0, 0], [0, 3.0, 0], [0, 0, 0], [0, 0, 3.0]])
    told = Gaussians(torch.tensor([5, 9, 0, 2]), means, 0.1 * torch.eye(3).expand(4, 3, 3))
    classifier, one = nn.Linear(3, 4), replace(job(), config=FuseFlConfig(draws=2000))
    nn.init.zeros_(classifier.weight)
    nn.init.zeros_(classifier.bias)

    calibrate(classifier, told, one)

    predicted = classifier(means[[0, 1, 3]]).argmax(1)
    assert predicted.tolist() == [0, 1, 3]
    # By hand, in one step of all draws: the gradient of the bias is the mean of softmax less one-hot.
    step = nn.Linear(3, 4)
    nn.init.zeros_(step.weight)
    nn.init.zeros_(step.bias)
    calibrate(step, told, replace(job(), config=FuseFlConfig(draws=20)))
    assert step.bias.tolist() == pytest.approx(
        [-0.01 * (1 / 4 - share) for share in (1 / 3, 1 / 3, 0, 1 / 3)], abs=1e-6
    )


def changed(answer: Answer, **arrays: Any) -> Answer:
    return replace(answer, arrays={**answer.arrays, **arrays})


def counted(*counts: int) -> Any:
    return lambda a: changed(a, counts=np.array(counts))


def told(what: str, change: Callable[[Any], Any]) -> Any:
    return lambda a: changed(a, **{what: change(a.arrays[what])})


@pytest.mark.parametrize(("stage", "spoil", "reason"), [
    (2, lambda a: replace(a, facts={"stage": 7}), "of 'c2' for stage 7: must be of a client that .*, for stage 2"),
    (2, lambda a: replace(a, client="other"), "of 'other' for stage 2: must be of a client that uploaded"),
    (2, lambda a: changed(a, more=np.zeros(2, np.float32)), "not expected more"),
    (2, told("adapter.bias", lambda a: np.zeros(4, np.float32)), r"adapter.bias is float32\[4\], expected is"),
    (2, told("classifier.bias", lambda a: np.full(4, np.nan, np.float32)), "holds NaN or Inf"),
    (3, counted(-40, -40, -40, -40), r"counts are \[-40, -40, -40, -40\]: must be from 0, with a sum of 1 to 20"),
    (3, counted(2**63 - 1, 2**63 - 1, 1, 1), "must be from 0, with a sum of 1 to 20"),
    (3, counted(6, 5, 5, 5), "must be from 0, with a sum of 1 to 20"),
    (3, counted(0, 0, 0, 0), "must be from 0, with a sum of 1 to 20"),
    (3, counted(5, 5, 5, 1), "covariances of less than two examples, or means of none, are not 0"),
    (3, told("means", lambda a: np.full_like(a, 3e38)), r"means or variances exceed 1e\+09"),
    (3, told("covariances", lambda a: np.full_like(a, 3e38)), r"means or variances exceed 1e\+09"),
    (3, told("covariances", lambda a: a + 3e38 * (1 - np.eye(5, dtype=a.dtype))), "no entry above the root"),
    (3, told("covariances", np.triu), "covariances are not those of features: must be symmetric"),
    (3, told("covariances", np.negative), "with variances from 0"),
    (2, told("classifier.weight", lambda a: np.full_like(a, 3e38)), "outputs are at most 1e"),
    (2, told("classifier.bias", lambda a: np.full_like(a, -3e38)), "outputs are at most 1e"),
    (2, told("adapter.weight", lambda a: np.full_like(a, 3e38)), "outputs are at most 1e"),
])  # fmt: skip
def test_answer_that_does_not_fit_or_would_ruin_others_work_is_refused_and_nobody_may_miss(
    stage: int, spoil: Any, reason: str
) -> None:
    def spoilt(answer: Answer) -> Answer:
        return spoil(answer) if answer.client == "c2" and answer.facts["stage"] == stage else answer

    clients = Answering(job(), spoil=spoilt)

    with pytest.raises(QuorumError, match=f"{'block 2: ' * (stage == 2)}2 usable answers, needs 3"):
        fit_with_clients(clients.job, Silent(), clients)

    ((_, found),) = clients.refused
    assert re.search(reason, found)


def test_interrupted_run_resumes_after_the_last_exchange_with_the_same_bits() -> None:
    book, whole = Book(keep=True), Answering(job())
    expected = fit_with_clients(whole.job, book, whole)
    rest = Answering(job())

    found = fit_with_clients(rest.job, Book(book.snapshots[0]), rest)

    assert [row["epoch"] for row in book.epochs] == [1, 2]
    assert [phase for phase, _ in rest.asked] == ["calibration"]
    assert all(torch.equal(value, expected.ensemble.weights[k]) for k, value in found.ensemble.weights.items())


def test_counts_of_an_upload_that_claims_too_many_examples_do_not_overflow() -> None:
    one = job()
    liar = replace(one.uploads[2], facts=replace(one.uploads[2].facts, num_examples=2**63 - 1))
    clients = Answering(
        replace(one, uploads=(*one.uploads[:2], liar)),
        spoil=lambda a: counted(2**62, 0, 0, 0)(a) if a.client == "c2" and a.facts["stage"] == 3 else a,
    )

    with pytest.raises(QuorumError, match="calibration: 2 usable answers, needs 3"):
        fit_with_clients(clients.job, Silent(), clients)
