from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import OTHER, Array, Book, check_option, check_resume, logits_of, options_to_try, softmax, tiny_job

from strategies.methods.fed_et import METHOD, FedEtConfig, Judgement, fit, transfer_loss

SMALL = FedEtConfig(epochs=3, batch_size=5, student_lr=0.01)
RNG = torch.Generator().manual_seed(4)
MEMBERS = 2 * torch.randn(1, 40, 3, generator=RNG) + torch.randn(5, 40, 3, generator=RNG)  # M, B, C
STUDENT = torch.randn(40, 3, generator=RNG)


def judged(logits: Array, temperature: float = 1.0) -> tuple[Array, Array, int]:
    """Return consensus [C], dissent [C] and how many dissent, for one image's logits [M, C], client by client."""
    decisions = [softmax(one / temperature) for one in logits]
    sureness = [float(np.mean((one - one.mean()) ** 2)) for one in decisions]
    weights = [one / sum(sureness) for one in sureness]
    consensus: Array = np.sum([a * s for a, s in zip(weights, decisions, strict=True)], axis=0)
    others = [(a, s) for a, s in zip(weights, decisions, strict=True) if s.argmax() != consensus.argmax()]
    whole = sum(a for a, _ in others)
    dissent: Array = sum(((a / whole) * s for a, s in others), np.zeros_like(consensus))
    return consensus, dissent, len(others)


def loss_by_hand(student: Array, members: Array, weight: float, temperature: float = 1.0) -> float:
    total = 0.0
    for image, own in enumerate(student):
        consensus, dissent, others = judged(members[:, image], temperature)
        total -= np.log(softmax(own)[consensus.argmax()])
        if others:
            divergence = (dissent * np.log(dissent / softmax(own / temperature))).sum()
            total += weight * temperature**2 * divergence
    return total / len(student)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_judgement_is_the_consensus_and_the_dissent_counted_client_by_client(temperature: float) -> None:
    found = Judgement(temperature)(MEMBERS).numpy()
    assert found.shape == (40, 2, 3)
    dissenters = set()
    for image in range(40):
        consensus, dissent, others = judged(MEMBERS[:, image].double().numpy(), temperature)
        dissenters.add(others)
        np.testing.assert_allclose(found[image], [consensus, dissent], rtol=1e-4, atol=1e-6)
    assert {0, 1, 2} <= dissenters  # the case without any is among them


@pytest.mark.parametrize(("weight", "temperature"), [(0.05, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_transfer_loss_equals_the_sum_written_out(weight: float, temperature: float) -> None:
    found = transfer_loss(STUDENT, Judgement(temperature)(MEMBERS), weight=weight, temperature=temperature)
    expected = loss_by_hand(STUDENT.double().numpy(), MEMBERS.double().numpy(), weight, temperature)
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_fit_minimises_the_loss_of_the_clients_judgements() -> None:
    config = replace(SMALL, epochs=1, batch_size=11, student_lr=1e-12, diversity_weight=0.7, kd_temperature=3.0)
    job = replace(tiny_job(config), student="wide")  # no dropout
    student, members = logits_of(job)
    book = Book()
    fit(job, book)
    assert book.rows[0]["distillation"] == pytest.approx(loss_by_hand(student, members, 0.7, 3.0), rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"augmentation": "crop-flip"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume(METHOD, replace(SMALL, **changes))


ET_OTHER: dict[str, Any] = OTHER | {
    "augmentation": "flip", "diversity_weight": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", options_to_try(FedEtConfig))
def test_every_option_changes_the_result(name: str) -> None:
    check_option(METHOD, SMALL, name, ET_OTHER[name])
