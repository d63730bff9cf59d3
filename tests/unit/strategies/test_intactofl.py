import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from method_fakes import BUILDERS, OTHER, SHAPE, TINY, UPLOADS, Book, check_resume, options_to_try, run, same, tiny_job

from strategies.combiners.outcomes import load_model
from strategies.core.seeds import generator
from strategies.distillation.losses import draw_directions
from strategies.method import Outcome
from strategies.methods.intactofl import METHOD, ByPixels, IntactOflConfig, fit
from strategies.teacher.augment import Standardize, dequantize
from strategies.teacher.ensemble import Ensemble

SMALL = IntactOflConfig(**{key: value for key, value in TINY.items() if key != "student_lr"} | {"generator_lr": 1e-3})
PREDICTIONS = replace(SMALL, gate="predictions")
SEED = 3  # with it the gate and the plain mean disagree on images of the first epochs


@cache
def usual_of(config: IntactOflConfig) -> tuple[Outcome, Book]:
    book = Book(keep=True)
    return fit(tiny_job(config, seed=SEED), book), book


@pytest.fixture(scope="module")
def usual() -> tuple[Outcome, Book]:
    return usual_of(SMALL)


@pytest.mark.parametrize(("config", "ascending"), [(SMALL, True), (PREDICTIONS, False)])
def test_labels_of_a_batch_ascend_for_the_gate_of_pixels_alone(config: IntactOflConfig, ascending: bool) -> None:
    book = Book(keep=True)
    fit(tiny_job(replace(config, epochs=1, synthesis_batch_size=16), seed=SEED), book)
    labels = book.snapshots[0].appended["labels"].tolist()
    assert (labels == sorted(labels)) is ascending


@pytest.mark.parametrize(
    ("config", "combiner", "inputs"), [(SMALL, "pixel-gate", math.prod(SHAPE)), (PREDICTIONS, "expert-gate", 9)]
)
def test_outcome_is_the_ensemble_of_all_uploads_under_the_gate(
    config: IntactOflConfig, combiner: str, inputs: int
) -> None:
    outcome = usual_of(config)[0]
    assert outcome.student is None
    assert (outcome.ensemble.combiner, outcome.ensemble.clients) == (combiner, ("c0", "c1", "c2"))
    assert outcome.ensemble.weights["weight"].shape == (3, inputs)
    model = load_model(outcome, tiny_job(config, seed=SEED))
    assert model(torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0))).shape == (5, 3)


def test_first_step_of_the_gate_on_predictions_is_adam_s_on_the_cross_entropy_of_the_mixture() -> None:
    snapshot = usual_of(PREDICTIONS)[1].snapshots[0]
    rows = snapshot.appended
    assert len(rows["labels"]) == 6 == SMALL.batch_size + 1  # one batch: the last image joins it
    model = Ensemble.from_uploads(UPLOADS, BUILDERS, torch.nn.Identity(), fold=False)
    opinions = model(Standardize(tiny_job(SMALL, seed=SEED).normalization)(dequantize(rows["images"]))).log_softmax(2)
    torch.testing.assert_close(rows["members"].transpose(0, 1).log_softmax(2), opinions)
    gate = torch.nn.Linear(9, 3)
    for part in gate.parameters():
        torch.nn.init.zeros_(part)
    optimizer = torch.optim.Adam(gate.parameters(), 1e-3)
    shares = gate(torch.cat([*opinions.exp()], dim=1)).softmax(1)
    mixed = torch.einsum("bm,mbc->bc", shares, opinions.exp())
    torch.nn.functional.nll_loss(mixed.log(), rows["labels"]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for name, value in gate.state_dict().items():
        torch.testing.assert_close(snapshot.state["modules"]["student"][name], value, rtol=1e-3, atol=1e-6)


def test_first_step_of_the_gate_on_pixels_is_sgd_s_on_moved_images(usual: tuple[Outcome, Book]) -> None:
    snapshot, job = usual[1].snapshots[0], tiny_job(SMALL, seed=SEED)
    rows, rng = snapshot.appended, generator(job.seed, "gate", 0)
    order = torch.randperm(6, generator=rng)  # one batch: the last image joins it
    members = Ensemble.from_uploads(UPLOADS, BUILDERS, torch.nn.Identity(), fold=False)
    experts = ByPixels(members, ByPixels.start(job))
    inputs = Standardize(job.normalization)(dequantize(rows["images"][order]))
    images = experts.moved(inputs, 8 / 255, draw_directions(len(inputs), job.num_classes, rng))
    optimizer = torch.optim.SGD(experts.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    experts.loss(members(images), images, rows["labels"][order]).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(experts.parameters(), 10.0)
    optimizer.step()
    for name, value in experts.state_dict().items():
        torch.testing.assert_close(snapshot.state["modules"]["student"][name], value, rtol=1e-5, atol=1e-7)


VARIANTS: dict[str, dict[str, Any]] = {
    "bounded": {"pool_cap": 9, "steps_per_epoch": 1},
    "augmented": {"pool_augmentation": "flip", "bn_weight": 0.0},
    "predictions, augmented": {"gate": "predictions", "pool_augmentation": "flip"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(name: str) -> None:
    check_resume(METHOD, tiny_job(replace(SMALL, **VARIANTS[name])))


INTACT_OTHER: dict[str, Any] = OTHER | {
    "gate": "predictions", "gate_lr": 0.1, "perturbation_size": 0.5, "bn_weight": 0.0, "distinct_weight": 0.0,
}  # fmt: skip


@pytest.fixture
def keep_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the images of the last step, because the best of two is the first, which looks at few options."""
    recipe = IntactOflConfig.recipe
    monkeypatch.setattr(IntactOflConfig, "recipe", lambda config: replace(recipe(config), keep="last"))


@cache
def usual_with_last_images() -> Outcome:
    return run(METHOD, SMALL, seed=SEED)


@pytest.mark.usefixtures("keep_last")
@pytest.mark.parametrize("name", options_to_try(IntactOflConfig))
def test_every_option_changes_the_result(name: str) -> None:
    assert getattr(SMALL, name) != INTACT_OTHER[name]
    assert not same(run(METHOD, replace(SMALL, **{name: INTACT_OTHER[name]}), seed=SEED), usual_with_last_images())
