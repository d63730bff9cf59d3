from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import (
    OTHER,
    SHAPE,
    Book,
    check_option,
    check_resume_at_every_border,
    check_teacher_stays,
    run,
    same,
    tiny_job,
    upload,
)

from strategies.core.errors import OptionError
from strategies.core.seeds import generator
from strategies.distillation.synthesis import Recipe, View
from strategies.f_adi import METHOD, FAdiConfig, _Server, fit
from strategies.method import Need, Outcome

SMALL = FAdiConfig(epochs=3, inversion_steps=3, inversion_batch_size=6, batch_size=5, student_lr=0.1)
WIDE = (upload(0, "wide"), upload(1, "wide"))


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return run(METHOD, SMALL)


@pytest.mark.parametrize("changes", [{}, {"pool_cap": 9, "pool_augmentation": "flip"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume_at_every_border(METHOD, replace(SMALL, **changes))


def test_fit_with_another_seed_gives_another_result(usual: Outcome) -> None:
    assert same(run(METHOD, SMALL), usual)
    assert not same(run(METHOD, SMALL, seed=1), usual)


def test_losses_add_up_and_need_no_note() -> None:
    book = Book()
    fit(tiny_job(SMALL), book)
    assert book.notes == []
    for row in book.rows:
        assert row.keys() == {"epoch", "ce", "tv", "bn", "competition", "generator", "distillation"}
        total = row["ce"] + 1e-3 * row["tv"] + 10 * row["bn"] + 10 * row["competition"]
        assert row["generator"] == pytest.approx(total, rel=1e-4)
        assert row["bn"] > 0
        assert 0 <= row["competition"] <= 1


@pytest.mark.parametrize(("weight", "notes"), [(10.0, 1), (0.0, 0)])
def test_clients_without_batch_normalisation_leave_the_prior_and_one_note(weight: float, notes: int) -> None:
    book = Book()
    outcome = fit(tiny_job(replace(SMALL, bn_weight=weight), uploads=WIDE), book)
    assert len(book.notes) == notes
    assert [row.get("bn") for row in book.epochs] == [0.0 if weight else None] * 3
    assert outcome.student is not None


def test_images_begin_as_normal_noise_in_the_models_space_and_end_as_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.distillation.settings.quantize", lambda images: images)
    book = Book(keep=True)
    fit(tiny_job(replace(SMALL, epochs=1, inversion_lr=1e-12)), book)
    images, labels = (book.snapshots[0].appended[name] for name in ("images", "labels"))
    rng = generator(0, "synthesis", 0)
    noise = torch.randn(6, *SHAPE, generator=rng)
    pixels = noise * torch.tensor([0.5, 0.6]).view(2, 1, 1) + torch.tensor([0.5, 0.4]).view(2, 1, 1)
    torch.testing.assert_close(images, pixels.clamp(0, 1))
    assert torch.equal(labels, torch.randint(3, (6,), generator=rng))
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)


def test_competition_is_one_less_the_jensen_shannon_divergence_at_temperature_three() -> None:
    rng = np.random.default_rng(0)
    student, teacher = 4 * rng.standard_normal((2, 5, 3))
    p, q = (np.exp(z / 3) / np.exp(z / 3).sum(1, keepdims=True) for z in (student, teacher))
    p, q, m = (np.clip(one, 0.01, 0.99) for one in (p, q, (p + q) / 2))
    divergence = (m * (np.log(m / p) + np.log(m / q))).sum(1).mean() / 2
    nothing = torch.zeros(5)

    view = View(nothing, nothing, nothing, torch.from_numpy(teacher), torch.from_numpy(student))
    value = _Server(tiny_job(SMALL), Book()).competition(view)

    assert float(value) == pytest.approx(1 - divergence, rel=1e-6)


def test_pixels_are_moved_by_adam_with_the_rates_of_the_published_code(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: list[Recipe] = []

    def spy(pixels: Any, *_: Any, recipe: Recipe, **__: Any) -> tuple[torch.Tensor, dict[str, float]]:
        recipes.append(recipe)
        return pixels(torch.empty(0)).detach(), {}

    monkeypatch.setattr("strategies.f_adi.synthesize", spy)
    run(METHOD, replace(SMALL, epochs=1, inversion_steps=7, inversion_lr=0.2))
    assert recipes == [Recipe(steps=7, lr=0.2, betas=(0.9, 0.999), optimize_noise=False)]


def test_images_of_the_outcome_are_bytes_of_the_input_shape(usual: Outcome) -> None:
    assert usual.images is not None
    assert usual.images.dtype == torch.uint8
    assert usual.images.shape == (6, *SHAPE)  # those of the last epoch


def test_inverted_images_please_the_ensemble_better_than_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.f_adi.JITTER", 0)
    rows = []
    for steps in (1, 25):
        book = Book()
        fit(tiny_job(replace(SMALL, epochs=1, inversion_steps=steps)), book)
        rows.append(book.rows[0])
    assert rows[1]["generator"] < 0.7 * rows[0]["generator"]


def test_fit_for_images_that_four_does_not_divide_is_possible() -> None:
    assert Need.SIDES_OF_FOUR not in METHOD.needs


def test_a_run_leaves_the_teachers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    check_teacher_stays(METHOD, SMALL, monkeypatch)


ADI_OTHER: dict[str, Any] = OTHER | {
    "inversion_steps": 2, "inversion_lr": 0.5, "inversion_batch_size": 8, "tv_weight": 5.0,
    "bn_weight": 0.0, "competition_weight": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(FAdiConfig)])
def test_every_option_changes_the_result(name: str) -> None:
    check_option(METHOD, SMALL, name, ADI_OTHER[name])


def test_defaults_are_the_published_values() -> None:
    values = asdict(FAdiConfig())
    published = {
        "inversion_steps": 30, "inversion_lr": 0.1, "inversion_batch_size": 128,
        "tv_weight": 1e-3, "bn_weight": 10.0, "competition_weight": 10.0,
        "kd_temperature": 4.0, "epochs": 500, "student_lr": 0.01,
        "weight_decay": 1e-4, "schedule": "cosine", "batch_size": 128, "student_clip": 10.0,
    }  # fmt: skip
    assert {key: values[key] for key in published} == published


@pytest.mark.parametrize(("field", "value"), [("tv_weight", -1.0), ("pool_cap", 1), ("inversion_batch_size", 1)])
def test_config_out_of_range_names_its_key(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"f-adi.{field.replace('_', '-')}"):
        FAdiConfig(**{field: value})  # type: ignore[arg-type]
