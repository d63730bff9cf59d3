from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from method_fakes import OTHER, TINY, Book, check_option, check_resume_at_every_border, run, same, tiny_job

import strategies.fedhydra as module
from strategies.combiners.combiners import LabelCount, Mean
from strategies.core.errors import OptionError
from strategies.dense import DenseConfig
from strategies.fedhydra import METHOD, FedHydraConfig, fit, guiding_losses, stratified
from strategies.method import Job, Outcome
from strategies.teacher.ensemble import Ensemble

SMALL = FedHydraConfig(**TINY | {"generator_lr": 1e-3}, stratification_steps=2, stratification_images=2)


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return run(METHOD, SMALL)


def ensemble_of(job: Job) -> Ensemble:
    return Ensemble.from_uploads(job.uploads, job.builders, Mean())


def test_weights_are_the_clients_shares_of_a_class_s_scores() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.3, 0.1, 0.0]])
    expected = torch.tensor([[0.75, 0.5, 1.0], [0.25, 0.5, 0.0]])
    torch.testing.assert_close(stratified(-scores.log()), expected)


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [
        ("clients", [[0.642857, 1 / 6], [0.357143, 5 / 6]]),
        ("classes", [[0.9 / 1.4, 0.1 / 0.6], [0.5 / 1.4, 0.5 / 0.6]]),
        ("both", [[0.764151, 0.038462], [0.235849, 0.961538]]),
    ],
)
def test_scores_are_normalised_over_clients_classes_or_both(normalise: str, expected: list[list[float]]) -> None:
    # U is [[9/14, 1/6], [5/14, 5/6]], V is [[0.9, 0.1], [0.5, 0.5]].
    losses = -torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    torch.testing.assert_close(stratified(losses, normalise), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_shares_of_its_own_scores_make_up_for_a_client_that_guides_badly_to_all_classes() -> None:
    losses = torch.tensor([[1.0, 2.0], [1.0, 2.0]]) + torch.tensor([[0.0], [50.0]])
    torch.testing.assert_close(stratified(losses, "classes"), torch.full((2, 2), 0.5))
    assert float(stratified(losses, "clients")[1].max()) < 1e-20


def test_a_class_that_no_model_guides_to_still_has_weights_that_sum_to_one() -> None:
    weights = stratified(torch.tensor([[800.0], [801.0]]))
    torch.testing.assert_close(weights[:, 0], torch.tensor([1.0, -0.0]).softmax(0).flip(0).roll(1))
    assert float(weights.sum()) == pytest.approx(1)


class Biased(torch.nn.Module):
    """Says the same of every image: logits 0, -1 and -2, of the first class and those after it."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(-torch.arange(3.0).roll(first))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits + 0 * x.mean((1, 2, 3))[:, None]


def test_guiding_loss_is_the_cross_entropy_of_one_member_on_one_class() -> None:
    teacher = Ensemble([Biased(0), Biased(1), Biased(2)], Mean())
    found = guiding_losses(tiny_job(SMALL), teacher)
    total = torch.tensor([0.0, -1, -2]).logsumexp(0)
    expected = torch.stack([total + torch.arange(3.0).roll(first) for first in range(3)])
    torch.testing.assert_close(found, expected)


def test_guiding_losses_fall_with_the_steps_and_are_the_least_of_them() -> None:
    job = tiny_job(SMALL)
    few, many = (
        guiding_losses(replace(job, config=replace(SMALL, stratification_steps=steps)), ensemble_of(job))
        for steps in (1, 12)
    )
    assert few.shape == many.shape == (3, 3)
    assert bool((many <= few).all())
    assert float(many.mean()) < 0.8 * float(few.mean())


@pytest.mark.parametrize(
    ("batch", "images", "groups"), [(6, 2, [3]), (4, 2, [2, 1]), (5, 2, [2, 1]), (2, 2, [1, 1, 1]), (2, 9, [1, 1, 1])]
)
def test_one_generator_makes_as_many_classes_as_a_batch_holds(batch: int, images: int, groups: list[int]) -> None:
    config = replace(SMALL, synthesis_batch_size=batch, stratification_images=images)
    assert [len(group) for group in module._groups(tiny_job(config))] == groups


def test_ensemble_of_the_outcome_weighs_by_the_guiding_losses(usual: Outcome) -> None:
    job = tiny_job(SMALL)
    assert usual.ensemble is not None
    assert usual.ensemble.combiner == "label-count"
    assert usual.ensemble.clients == ("c0", "c1", "c2")
    expected = stratified(guiding_losses(job, Ensemble.from_uploads(job.uploads, job.builders, Mean(), fold=False)))
    torch.testing.assert_close(usual.ensemble.weights["weights"], expected)
    assert set(usual.timings) >= {"stratification", "synthesis", "distillation"}


def test_student_learns_from_the_stratified_ensemble(monkeypatch: pytest.MonkeyPatch, usual: Outcome) -> None:
    assert usual.ensemble is not None
    weights = usual.ensemble.weights["weights"]
    seen: list[torch.Tensor] = []
    combine = LabelCount.forward

    def spy(self: LabelCount, logits: torch.Tensor) -> torch.Tensor:
        seen.append(self.weights.clone())
        return combine(self, logits)

    monkeypatch.setattr(LabelCount, "forward", spy)
    assert same(run(METHOD, SMALL), usual)
    assert seen
    assert all(torch.equal(each, weights) for each in seen)


def test_fit_resumed_after_a_crash_ends_with_the_same_bits() -> None:
    check_resume_at_every_border(METHOD, SMALL)


def test_a_resumed_run_does_not_stratify_again(monkeypatch: pytest.MonkeyPatch, usual: Outcome) -> None:
    book = Book(keep=True)
    fit(tiny_job(SMALL), book)
    monkeypatch.setattr(module, "guiding_losses", None)
    assert same(fit(tiny_job(SMALL), Book(book.snapshots[0])), usual)


def test_fit_with_another_seed_gives_another_result(usual: Outcome) -> None:
    assert not same(run(METHOD, SMALL, seed=1), usual)


def test_fit_reports_in_every_step_of_the_stratification_and_leaves_the_teacher_alone() -> None:
    book = Book()
    job = tiny_job(SMALL)
    fit(replace(job, config=replace(SMALL, epochs=1)), book)
    assert book.reports >= 3 * 2
    assert book.rows[-1].keys() == {"epoch", "ce", "bn", "adversarial", "generator", "distillation"}


HYDRA_OTHER: dict[str, Any] = OTHER | {
    "schedule": "cosine", "bn_weight": 0.0, "adversarial_weight": 20.0,
    "adversarial_temperature": 9.0, "stratification_steps": 3,
    "stratification_images": 3, "normalise": "both",
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(FedHydraConfig)])
def test_every_option_changes_the_result(name: str) -> None:
    start = replace(SMALL, adversarial_weight=5.0) if name == "adversarial_temperature" else SMALL
    check_option(METHOD, start, name, HYDRA_OTHER[name], epochs=3)


def test_defaults_are_those_of_dense() -> None:
    values, dense = asdict(FedHydraConfig()), asdict(DenseConfig())
    assert values.keys() - dense.keys() == {"stratification_steps", "stratification_images", "normalise"}
    assert {key: values[key] for key in values.keys() & dense.keys()}.items() <= dense.items()


@pytest.mark.parametrize(
    ("field", "value"), [("stratification_images", 1), ("stratification_steps", 0), ("pool_cap", 1)]
)
def test_config_out_of_range_names_its_key(field: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"fedhydra.{field.replace('_', '-')}"):
        FedHydraConfig(**{field: value})  # type: ignore[arg-type]
