from dataclasses import replace
from typing import Any

import pytest
import torch
from method_fakes import Book
from torch import Tensor, nn

from strategies.combiners.combiners import Mean
from strategies.core.errors import OneShotError
from strategies.core.facts import UploadFacts
from strategies.core.work import Work, count_work
from strategies.distillation.distill import DistillRecipe
from strategies.distillation.epochs import learning_rate
from strategies.distillation.learner import Learner, build_teacher, learn_from_images, learn_from_table
from strategies.distillation.losses import soft_kl
from strategies.method import EnsembleSpec, Job, Normalization, Silent, Upload
from strategies.teacher.ensemble import Ensemble


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def upload(k: int) -> Upload:
    rng = torch.Generator().manual_seed(k)
    state = {"1.weight": torch.randn(3, 16, generator=rng), "1.bias": torch.randn(3, generator=rng)}
    return Upload(UploadFacts(f"c{k}", "net"), lambda: state)


IMAGES = torch.randint(0, 256, (9, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
SPACE = Normalization((0.5,), (0.25,))
JOB = Job((upload(0), upload(1)), {"net": net}, "net", 3, (1, 4, 4), SPACE, None, seed=2, proxy=IMAGES)
INPUTS = (IMAGES / 255 - 0.5) / 0.25
SMALL = DistillRecipe(
    epochs=4, batch_size=4, kd_temperature=4.0, student_lr=0.1, momentum=0.0, schedule="cosine", student_clip=10.0
)


class Counting(Ensemble):
    asked = 0

    def member_logits(self, x: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return super().member_logits(x)


def learner(recipe: DistillRecipe = SMALL, **rest: Any) -> Learner:
    members = [net() for _ in JOB.uploads]
    for member, one in zip(members, JOB.uploads, strict=True):
        member.load_state_dict(one.read())
    return Learner(JOB, Counting(members, Mean()), recipe, **rest)


def asked(one: Learner) -> int:
    assert isinstance(one.teacher, Counting)
    return one.teacher.asked


def weight(one: Learner) -> torch.Tensor:
    found: torch.Tensor = one.student.state_dict()["1.weight"].clone()
    return found


def test_teacher_of_a_job_whose_teacher_has_a_part_of_the_clients_reads_no_others() -> None:
    def unread() -> dict[str, torch.Tensor]:
        raise AssertionError

    one = replace(JOB, uploads=(replace(JOB.uploads[0], read=unread), JOB.uploads[1]))
    teacher = build_teacher(replace(one, teacher=EnsembleSpec(("c1",), "mean")), Mean())
    torch.testing.assert_close(teacher(INPUTS), learner().teacher.members[1](INPUTS))


def test_teacher_of_a_job_whose_teacher_has_an_absent_member_names_it() -> None:
    with pytest.raises(OneShotError, match="without an upload: c7; there are c0, c1"):
        build_teacher(replace(JOB, teacher=EnsembleSpec(("c0", "c7"), "mean")), Mean())


def test_learn_is_one_step_per_batch_with_the_clipped_gradient_of_the_distillation_loss() -> None:
    options = replace(SMALL, batch_size=9, kd_temperature=3.0, student_clip=0.5, momentum=0.9, weight_decay=0.01)
    one, plain = learner(options), learner(options)
    optimizer = torch.optim.SGD(plain.student.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = (0.1, 0.1 * (2 + 2**0.5) / 4)[epoch]  # a quarter of the cosine
        optimizer.zero_grad()
        loss = soft_kl(plain.student(INPUTS), plain.teacher(INPUTS), 3.0)
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(nn.utils.clip_grad_norm_(plain.student.parameters(), 0.5)) > 0.5
        optimizer.step()
        assert one.learn({"images": IMAGES}, epoch) == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(weight(one), weight(plain))


def test_pass_reads_every_image_once_in_an_order_of_its_epoch_and_stops_at_the_limit() -> None:
    def order(epoch: int, recipe: DistillRecipe = SMALL) -> tuple[list[int], int]:
        one, seen, steps = learner(recipe), list[int](), list[int]()

        def spy(inputs: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
            seen.extend(int(torch.isclose(INPUTS, image).flatten(1).all(1).nonzero()) for image in inputs)
            return inputs

        one.learn({"images": IMAGES}, epoch, perturb=spy, tick=lambda: steps.append(1))
        return seen, len(steps)

    first, steps = order(0)
    assert steps == 2  # 4 and 5: a single last image joins the batch before
    assert sorted(first) == list(range(9))
    assert order(0)[0] == first
    assert order(1)[0] != first
    limited = order(0, replace(SMALL, steps_per_epoch=1))
    assert limited == (first[:4], 1)


def test_teacher_asked_once_judges_the_images_as_they_are_while_the_student_sees_changed_ones() -> None:
    seen: list[torch.Tensor] = []
    one = learner(augmentation="crop-flip", asked_once=True, loss=lambda logits, known: spy(logits, known))

    def spy(logits: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        seen.append(known)
        return logits.square().mean()

    table = one.with_logits({"images": IMAGES})
    torch.testing.assert_close(table["logits"], one.teacher(INPUTS))
    before = asked(one)
    (inputs, rows), *_ = one.read(table, torch.Generator().manual_seed(0))
    assert not torch.equal(inputs, (rows["images"] / 255 - 0.5) / 0.25)
    one.learn(table, 0)
    assert asked(one) == before
    torch.testing.assert_close(torch.cat(seen).sort(0).values, table["logits"].sort(0).values)


@pytest.mark.parametrize("limit", [{}, {"steps": 1}, {"steps_per_epoch": 2}])
def test_teacher_asked_for_several_batches_at_once_gives_the_same_lessons(limit: dict[str, int]) -> None:
    def lessons(together: int) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], int]:
        one = learner(replace(SMALL, batch_size=2, **limit))
        one._together = together
        with count_work(Work()) as counts:
            found = list(one._lessons({"images": IMAGES}, 0, lambda inputs, _: inputs + 1))
        return found, counts.teacher_forward

    (alone, once), (at_once, together) = lessons(1), lessons(8)
    assert [len(inputs) for inputs, _ in at_once] == [2, 2, 2, 3][: sum(limit.values()) or 4]
    torch.testing.assert_close(at_once, alone)
    assert together == once  # no batch beyond the limit is asked for


# All epochs on images that stay the same.


RECIPE = replace(SMALL, epochs=3, momentum=0.5)


@pytest.mark.parametrize("done", [0, 2])
def test_table_is_made_once_and_a_run_that_goes_on_ends_with_the_same_bits(done: int) -> None:
    whole = Book(keep=True)
    one = learner(RECIPE)
    expected = learn_from_table(JOB, whole, one, lambda: one.with_logits({"images": IMAGES}))
    made: list[int] = []
    book, two = Book(whole.snapshots[done - 1] if done else None), learner(RECIPE)

    def make() -> dict[str, Tensor]:
        made.append(1)
        return two.with_logits({"images": IMAGES})

    outcome = learn_from_table(JOB, book, two, make)
    assert made == [1]
    assert torch.equal(outcome.student["1.weight"], expected.student["1.weight"])
    assert [row["epoch"] for row in book.rows] == list(range(done + 1, 4))
    assert book.rows == whole.rows[done:]
    assert not whole.snapshots[0].appended  # the table is not in the checkpoint
    # Two batches an epoch, then its end.
    assert whole.reports == [(0, 3), (0, 3), (1, 3), (1, 3), (1, 3), (2, 3), (2, 3), (2, 3), (3, 3)]


def test_student_learns_the_answers_in_the_table() -> None:
    one, two = learner(RECIPE), learner(RECIPE)
    answers = torch.randn(9, 3, generator=torch.Generator().manual_seed(4))
    taught = learn_from_table(JOB, Silent(), one, lambda: {"images": IMAGES, "logits": answers})
    plain = learn_from_images(JOB, Silent(), two)
    assert not torch.allclose(taught.student["1.weight"], plain.student["1.weight"])


# The rates of a schedule, against torch's own.


def test_learning_rate_equals_torch_cosine_annealing() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    for epoch in range(7):
        assert learning_rate("cosine", 0.3, epoch, 7) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("epochs", [1, 8])
def test_learning_rate_on_one_cycle_equals_torch_s_but_for_its_last_steps(epochs: int) -> None:
    steps = 4000
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=steps, pct_start=0.1, anneal_strategy="cos"
    )
    ours, theirs = [], []
    for step in range(steps):
        ours.append(learning_rate("one-cycle", 0.3, epochs * step / steps, epochs))
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    # Torch counts steps from the first to the last, here they are counted to the end of the last.
    assert ours == pytest.approx(theirs, abs=0.3 * 5 / (0.1 * steps))
    assert ours[0] == pytest.approx(0.3 / 25)
    assert max(ours) == ours[steps // 10] == pytest.approx(0.3)
    assert 0 < ours[-1] < 1e-4 * 0.3
    assert ours[: steps // 10] == sorted(ours[: steps // 10])
    assert ours[steps // 10 :] == sorted(ours[steps // 10 :], reverse=True)
