"""All epochs on images that stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.distillation.distill import DistillRecipe
from strategies.distillation.learner import Learner, learn_from_images, learn_from_table
from strategies.method import Job, Normalization, Outcome, Silent, Snapshot
from strategies.teacher.ensemble import Ensemble

RECIPE = DistillRecipe(
    epochs=3, batch_size=4, kd_temperature=4.0, student_lr=0.1, momentum=0.5, schedule="cosine", student_clip=10.0
)
IMAGES = torch.randint(0, 256, (9, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


JOB = Job((), {"net": net}, "net", 3, (1, 4, 4), Normalization((0.5,), (0.25,)), None, seed=2, proxy=IMAGES)


class Notebook(Silent):
    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot, self.kept, self.reports = snapshot, list[Snapshot](), list[tuple[int, int]]()
        self.rows: list[Mapping[str, Any]] = []

    def resume(self) -> Snapshot | None:
        return self.snapshot

    def record(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, *_: object) -> None:  # noqa: ARG002
        self.reports.append((step, total))

    def checkpoint(self, take: Any) -> None:
        self.kept.append(take())


def learner(job: Job = JOB) -> Learner:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        members = [net(), net()]
    return Learner(job, Ensemble(members, Mean()), RECIPE)


def weight(outcome: Outcome) -> Tensor:
    assert outcome.student is not None
    return outcome.student["1.weight"]


@pytest.mark.parametrize("done", [0, 2])
def test_table_is_made_once_and_a_run_that_goes_on_ends_with_the_same_bits(done: int) -> None:
    whole = Notebook()
    one = learner()
    expected = learn_from_table(JOB, whole, one, lambda: one.with_logits({"images": IMAGES}))
    made: list[int] = []
    book, two = Notebook(whole.kept[done - 1] if done else None), learner()

    def make() -> dict[str, Tensor]:
        made.append(1)
        return two.with_logits({"images": IMAGES})

    outcome = learn_from_table(JOB, book, two, make)
    assert made == [1]
    assert torch.equal(weight(outcome), weight(expected))
    assert [row["epoch"] for row in book.rows] == list(range(done + 1, 4))
    assert book.rows == whole.rows[done:]
    assert not whole.kept[0].appended  # the table is not in the checkpoint
    # Two batches an epoch, then its end.
    assert whole.reports == [(0, 3), (0, 3), (1, 3), (1, 3), (1, 3), (2, 3), (2, 3), (2, 3), (3, 3)]


def test_outcome_is_the_student_with_its_times_and_shows_no_images() -> None:
    one = learner()
    outcome = learn_from_table(JOB, Silent(), one, lambda: {"images": IMAGES})
    assert torch.equal(weight(outcome), one.student.state_dict()["1.weight"])
    assert outcome.timings.keys() >= {"teacher", "distillation"}
    assert outcome.images is None
    assert outcome.ensemble is None


def test_student_learns_the_answers_in_the_table() -> None:
    one, two = learner(), learner()
    answers = torch.randn(9, 3, generator=torch.Generator().manual_seed(4))
    taught = learn_from_table(JOB, Silent(), one, lambda: {"images": IMAGES, "logits": answers})
    assert not torch.allclose(weight(taught), weight(learn_from_images(JOB, Silent(), two)))


def test_real_images_are_those_of_the_job() -> None:
    one, two = learner(), learner()
    expected = learn_from_table(JOB, Silent(), one, lambda: one.with_logits({"images": IMAGES}))
    assert torch.equal(weight(learn_from_images(JOB, Silent(), two)), weight(expected))
    other = replace(JOB, proxy=IMAGES.flip(3))
    assert not torch.equal(weight(learn_from_images(other, Silent(), learner(other))), weight(expected))
