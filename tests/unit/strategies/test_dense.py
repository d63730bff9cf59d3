from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from method_fakes import OTHER, TINY, Book, check_option, check_resume, close, tiny_job, upload

from strategies.method import Silent, Snapshot
from strategies.methods.dense import METHOD, DenseConfig, fit
from strategies.teacher.augment import AUGMENTATIONS
from strategies.teacher.student import fresh_student

SMALL = DenseConfig(**TINY | {"generator_lr": 1e-3})


VARIANTS = {
    "fresh": replace(SMALL, distillation_data="fresh", keep_images="last", generator_reset="never"),
    "capped-augmented": replace(SMALL, pool_cap=10, pool_augmentation="crop-flip", synthesis_augmentation="flip"),
    "budget": replace(SMALL, schedule="cosine", steps_per_epoch=2, weight_decay=0.01, generator_clip=1.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(name: str) -> None:
    check_resume(METHOD, VARIANTS[name])


def test_checkpoints_carry_only_the_images_that_are_new() -> None:
    sizes: list[int] = []

    class Sizes(Silent):
        def checkpoint(self, take: Callable[[], Snapshot]) -> None:
            snapshot = take()
            sizes.append(len(snapshot.appended["images"]))
            assert snapshot.appended["images"].dtype == torch.uint8
            assert len(snapshot.appended["labels"]) == sizes[-1]

    fit(tiny_job(replace(SMALL, epochs=2)), Sizes())
    assert sizes == [6, 6]


@pytest.mark.parametrize(("weight", "notes"), [(1.0, 1), (0.0, 0)])
def test_clients_without_batch_normalisation_have_a_loss_of_zero_and_one_note_says_so(
    weight: float, notes: int
) -> None:
    uploads = (upload(0, "wide"), upload(1, "wide"))
    book = Book()
    fit(tiny_job(replace(SMALL, epochs=2, bn_weight=weight), uploads=uploads), book)
    assert len(book.notes) == notes
    assert [row.get("bn") for row in book.epochs] == [0.0 if weight else None] * 2


def test_fit_starts_from_the_start_weights_of_the_job() -> None:
    start = fresh_student(tiny_job(SMALL, seed=5)).state_dict()
    still = replace(SMALL, epochs=1, student_lr=1e-12)
    student = fit(replace(tiny_job(still), start=start), Silent()).student
    torch.testing.assert_close(student["0.weight"], start["0.weight"])
    assert not torch.equal(student["0.weight"], fresh_student(tiny_job(still)).state_dict()["0.weight"])


def test_cached_teacher_logits_give_the_result_of_a_teacher_that_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL, epochs=1)  # later epochs would amplify the last bit
    cached = fit(tiny_job(config), Silent())
    # "flip" without a flip: read as augmented images, hence without the cache.
    monkeypatch.setattr("strategies.distillation.learner.AUGMENTATIONS", {"flip": AUGMENTATIONS["none"]})
    close(fit(tiny_job(replace(config, pool_augmentation="flip")), Silent()), cached)


DENSE_OTHER: dict[str, Any] = OTHER | {
    "bn_weight": 0.0, "adversarial_weight": 0.0, "adversarial_temperature": 3.0,
    "distillation_data": "fresh", "schedule": "cosine",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(DenseConfig) if field.name != "rounds"])
def test_every_option_changes_the_result(name: str) -> None:
    check_option(METHOD, SMALL, name, DENSE_OTHER[name], epochs=3)
