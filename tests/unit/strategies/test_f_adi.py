from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import OTHER, Book, check_option, check_resume, options_to_try, run, tiny_job, upload

from strategies.distillation.synthesis import Recipe, View
from strategies.methods.f_adi import METHOD, FAdiConfig, FAdiServer, fit

SMALL = FAdiConfig(epochs=3, inversion_steps=3, synthesis_batch_size=6, batch_size=5, student_lr=0.1)
WIDE = (upload(0, "wide"), upload(1, "wide"))


@pytest.mark.parametrize("changes", [{}, {"pool_cap": 9, "pool_augmentation": "flip"}])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resume(METHOD, replace(SMALL, **changes))


@pytest.mark.parametrize(("weight", "notes"), [(10.0, 1), (0.0, 0)])
def test_clients_without_batch_normalisation_leave_the_prior_and_one_note(weight: float, notes: int) -> None:
    book = Book()
    outcome = fit(tiny_job(replace(SMALL, bn_weight=weight), uploads=WIDE), book)
    assert len(book.notes) == notes
    assert [row.get("bn") for row in book.epochs] == [0.0 if weight else None] * 3
    assert outcome.student is not None


def test_competition_is_one_less_the_jensen_shannon_divergence_at_temperature_three() -> None:
    rng = np.random.default_rng(0)
    student, teacher = 4 * rng.standard_normal((2, 5, 3))
    p, q = (np.exp(z / 3) / np.exp(z / 3).sum(1, keepdims=True) for z in (student, teacher))
    p, q, m = (np.clip(one, 0.01, 0.99) for one in (p, q, (p + q) / 2))
    divergence = (m * (np.log(m / p) + np.log(m / q))).sum(1).mean() / 2
    nothing = torch.zeros(5)

    view = View(nothing, nothing, nothing, torch.from_numpy(teacher), torch.from_numpy(student))
    value = FAdiServer(tiny_job(SMALL), Book()).competition(view)

    assert float(value) == pytest.approx(1 - divergence, rel=1e-6)


def test_pixels_are_moved_by_adam_with_the_rates_of_the_published_code(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: list[Recipe] = []

    def spy(pixels: Any, *_: Any, recipe: Recipe, **__: Any) -> tuple[torch.Tensor, dict[str, float]]:
        recipes.append(recipe)
        return pixels(torch.empty(0)).detach(), {}

    monkeypatch.setattr("strategies.methods.f_adi.synthesize", spy)
    run(METHOD, replace(SMALL, epochs=1, inversion_steps=7, inversion_lr=0.2))
    assert recipes == [Recipe(steps=7, lr=0.2, betas=(0.9, 0.999), optimize_noise=False)]


ADI_OTHER: dict[str, Any] = OTHER | {
    "inversion_steps": 2, "inversion_lr": 0.5, "synthesis_batch_size": 8, "tv_weight": 5.0,
    "bn_weight": 0.0, "competition_weight": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", options_to_try(FAdiConfig))
def test_every_option_changes_the_result(name: str) -> None:
    check_option(METHOD, SMALL, name, ADI_OTHER[name])
