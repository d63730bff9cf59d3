import math
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import BUILDERS, OTHER, SHAPE, TINY, UPLOADS, Book, telling, tiny_job, upload

from strategies.combiners.expert_gate import expert_mixture
from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError
from strategies.distillation.losses import cross_entropy
from strategies.distillation.synthesis import View
from strategies.intactofl import METHOD, IntactOflConfig, experts_cross_entropy, fit
from strategies.method import Job, Outcome, Silent, Upload
from strategies.teacher.augment import Standardize, dequantize
from strategies.teacher.ensemble import Ensemble

SMALL = IntactOflConfig(**{key: value for key, value in TINY.items() if key != "student_lr"} | {"generator_lr": 1e-3})
PLAIN = (upload(0, "wide"), upload(1, "wide"))


def run(config: Any, **also: Any) -> Outcome:
    return fit(replace(tiny_job(config), **also), Silent())


def same(one: Outcome, other: Outcome) -> bool:
    assert one.ensemble is not None
    assert other.ensemble is not None
    assert one.images is not None
    assert other.images is not None
    gates = one.ensemble.weights, other.ensemble.weights
    alike = gates[0].keys() == gates[1].keys() and all(
        torch.equal(value, gates[1][key]) for key, value in gates[0].items()
    )
    return alike and one.ensemble.combiner == other.ensemble.combiner and torch.equal(one.images, other.images)


@pytest.fixture(scope="module")
def usual() -> tuple[Outcome, Book]:
    book = Book(keep=True)
    return fit(tiny_job(SMALL), book), book


def test_outcome_is_the_ensemble_of_all_uploads_under_the_gate(usual: tuple[Outcome, Book]) -> None:
    outcome = usual[0]
    assert outcome.student is None
    assert outcome.ensemble is not None
    assert (outcome.ensemble.combiner, outcome.ensemble.clients) == ("expert-gate", ("c0", "c1", "c2"))
    assert outcome.ensemble.weights["weight"].shape == (3, 9)
    model = load_model(outcome, tiny_job(SMALL))
    predictions = model(torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(predictions.exp().sum(1), torch.ones(5))


def test_cross_entropy_of_the_experts_is_the_mean_over_experts_and_images() -> None:
    logits = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 0, 1, 1, 2])
    shares = np.exp(logits.double().numpy())
    shares /= shares.sum(-1, keepdims=True)
    expected = -np.mean([np.log(shares[k, i, labels[i]]) for k in range(3) for i in range(5)])
    nothing = torch.zeros(())
    assert float(experts_cross_entropy(View(nothing, nothing, labels, logits))) == pytest.approx(expected, rel=1e-5)


def test_losses_of_a_row_add_up_and_divergence_counts_as_a_gain(usual: tuple[Outcome, Book]) -> None:
    assert usual[1].notes == []
    for row in usual[1].epochs:
        assert row.keys() == {"epoch", "ce", "bn", "distinct", "generator", "gate"}
        assert row["generator"] == pytest.approx(row["ce"] + row["bn"] + row["distinct"], rel=1e-5)
        assert -math.log(3) <= row["distinct"] < 0
        assert row["bn"] > 0


def test_clients_without_batch_normalisation_have_a_loss_of_zero_and_one_note_says_so() -> None:
    book = Book()
    fit(tiny_job(replace(SMALL, epochs=1), uploads=PLAIN), book)
    assert len(book.notes) == 1
    assert book.epochs[0]["bn"] == 0


def test_first_step_of_the_gate_is_adam_s_on_the_cross_entropy_of_the_mixture(usual: tuple[Outcome, Book]) -> None:
    snapshot = usual[1].snapshots[0]
    rows = snapshot.appended
    assert len(rows["labels"]) == 6 == SMALL.batch_size + 1  # one batch: the last image joins it
    model = Ensemble.from_uploads(UPLOADS, BUILDERS, torch.nn.Identity(), fold=False)
    opinions = model(Standardize(tiny_job(SMALL).normalization)(dequantize(rows["images"]))).log_softmax(2)
    torch.testing.assert_close(rows["members"].transpose(0, 1).log_softmax(2), opinions)
    gate = torch.nn.Linear(9, 3)
    for part in gate.parameters():
        torch.nn.init.zeros_(part)
    optimizer = torch.optim.Adam(gate.parameters(), SMALL.gate_lr)
    shares = gate(torch.cat([*opinions.exp()], dim=1)).softmax(1)
    mixed = torch.einsum("bm,mbc->bc", shares, opinions.exp())
    torch.nn.functional.nll_loss(mixed.log(), rows["labels"]).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for name, value in gate.state_dict().items():
        torch.testing.assert_close(snapshot.state["modules"]["student"][name], value, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("wide_generators")
def test_gate_is_surer_of_the_intended_class_than_the_plain_mean_of_experts() -> None:
    config = replace(SMALL, epochs=8, generator_steps=4, synthesis_batch_size=24, batch_size=8, gate_lr=0.05)
    book = Book(keep=True)
    outcome = fit(tiny_job(config), book)
    assert outcome.ensemble is not None
    rows, trained = book.snapshots[-1].appended, outcome.ensemble.weights
    logits, labels = rows["members"].transpose(0, 1), rows["labels"]
    plain = {name: torch.zeros_like(value) for name, value in trained.items()}
    learned, before = (float(cross_entropy(expert_mixture(weights, logits), labels)) for weights in (trained, plain))
    assert learned < 0.9 * before


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "bounded": {"pool_cap": 9, "steps_per_epoch": 1},
    "augmented": {"pool_augmentation": "flip", "bn_weight": 0.0},
}


def check_resume(job: Job) -> None:
    whole = Book(keep=True)
    expected = fit(job, whole)
    for snapshot in whole.snapshots:
        resumed = Book(snapshot)
        assert same(fit(job, resumed), expected), f"resumed after epoch {snapshot.step}"
        assert resumed.epochs == whole.epochs[snapshot.step :]


@pytest.mark.parametrize("name", VARIANTS)
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(name: str) -> None:
    check_resume(tiny_job(replace(SMALL, **VARIANTS[name])))


def large_job(config: IntactOflConfig) -> Job:
    """The gate that looks at images needs 16 x 16."""
    job = tiny_job(config, uploads=tuple(map(renamed, PLAIN)))
    return replace(job, input_shape=(2, 16, 16), builders={"pooled": pooled}, student="pooled")


def pooled() -> torch.nn.Module:
    whole = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Conv2d(2, 6, 5), torch.nn.ReLU(), torch.nn.Flatten())
    whole.append(torch.nn.Linear(96, 3))
    return whole


def renamed(one: Upload) -> Upload:
    """The model of "wide" behind a layer without weights."""
    state = {f"{int(name[0]) + 1}{name[1:]}": value for name, value in one.read().items()}
    return replace(telling(one, architecture="pooled"), read=lambda: state)


def test_gate_that_looks_at_images_is_fens_s_and_resumes_with_its_dropout() -> None:
    job = large_job(replace(SMALL, gate="image"))
    check_resume(job)
    outcome = fit(job, Silent())
    assert outcome.ensemble is not None
    assert outcome.ensemble.combiner == "moe"
    assert load_model(outcome, job)(torch.zeros(2, 2, 16, 16)).shape == (2, 3)


def test_gate_that_looks_at_images_refuses_small_ones_before_the_clients_work() -> None:
    assert METHOD.check is not None
    METHOD.check(replace(tiny_job(SMALL), uploads=()))
    said = "setting 'intactofl.gate' is 'image', which looks at images, and the input is 2 x 8 x 8: must be at least 16"
    with pytest.raises(OptionError, match=said):
        METHOD.check(replace(tiny_job(replace(SMALL, gate="image")), uploads=()))


def test_checkpoints_carry_the_gate_and_new_images_but_no_member(usual: tuple[Outcome, Book]) -> None:
    first = usual[1].snapshots[0]
    assert first.state["modules"].keys() == {"student"}
    assert first.state["modules"]["student"].keys() == {"weight", "bias"}
    assert first.appended["images"].dtype == torch.uint8
    assert first.appended["members"].shape == (6, 3, 3)


def test_observer_scores_the_mixture_and_does_not_change_the_result(usual: tuple[Outcome, Book]) -> None:
    images = torch.rand(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []

    def observer(epoch: int, model: torch.nn.Module) -> dict[str, float]:
        seen.append(model(images))
        return {"accuracy": 0.5}

    watched = run(SMALL, observer=observer)
    assert same(watched, usual[0])
    torch.testing.assert_close(seen[-1], load_model(watched, tiny_job(SMALL))(images))


INTACT_OTHER: dict[str, Any] = OTHER | {
    "gate_lr": 0.1, "bn_weight": 0.0, "distinct_weight": 0.0,
}  # fmt: skip


@pytest.fixture
def keep_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the images of the last step, because the best of two is the first, which looks at few options."""
    recipe = IntactOflConfig.recipe
    monkeypatch.setattr(IntactOflConfig, "recipe", lambda config: replace(recipe(config), keep="last"))


@cache
def usual_with_last_images() -> Outcome:
    return run(SMALL)


@pytest.mark.usefixtures("keep_last")
@pytest.mark.parametrize("name", [field.name for field in fields(IntactOflConfig) if field.name != "gate"])
def test_every_option_changes_the_result(name: str) -> None:
    assert getattr(SMALL, name) != INTACT_OTHER[name]
    assert not same(run(replace(SMALL, **{name: INTACT_OTHER[name]})), usual_with_last_images())


def test_seed_gives_the_bits(usual: tuple[Outcome, Book]) -> None:
    assert same(run(SMALL), usual[0])
    assert not same(run(SMALL, seed=1), usual[0])


def test_generator_s_defaults_are_the_other_methods() -> None:
    values = asdict(IntactOflConfig())
    shared = {"generator_steps": 30, "generator_lr": 1e-3, "synthesis_batch_size": 128, "latent": 256, "epochs": 200}
    assert {key: values[key] for key in shared} == shared


@pytest.mark.parametrize(("field", "value"), [("gate", "logits"), ("gate_lr", 0.0), ("pool_cap", 1), ("epochs", 0)])
def test_config_out_of_range_names_its_key(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"intactofl.{field.replace('_', '-')}"):
        IntactOflConfig(**{field: value})  # type: ignore[arg-type]
