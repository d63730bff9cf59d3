import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from strategies.dense import METHOD, DenseConfig, fit
from strategies.distillation.augment import Standardize
from strategies.distillation.combiners import Mean
from strategies.distillation.ensemble import Ensemble
from strategies.errors import OptionError
from strategies.method import Job, Normalization, Outcome, Silent, Snapshot, Upload
from strategies.outcomes import fresh_student, load_model

SMALL = DenseConfig(epochs=4, generator_steps=2, batch_size=5, synthesis_batch_size=8, latent=8, student_lr=0.1)


def narrow() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(108, 16),
        nn.BatchNorm1d(16), nn.Linear(16, 3),
    )  # fmt: skip


def wide() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))


BUILDERS = {"narrow": narrow, "wide": wide}


def job(config: DenseConfig = SMALL, *, seed: int = 0) -> Job:
    def upload(k: int, architecture: str) -> Upload:
        torch.manual_seed(k)
        model = BUILDERS[architecture]()
        model(torch.randn(8, 2, 8, 8))  # in train mode: running statistics that are not the initial ones
        state = {name: 3 * value if name.endswith("weight") else value for name, value in model.state_dict().items()}
        return Upload(f"c{k}", architecture, lambda: {name: value.clone() for name, value in state.items()})

    uploads = (upload(0, "narrow"), upload(1, "wide"), upload(2, "narrow"))
    return Job(uploads, BUILDERS, "narrow", 3, (2, 8, 8), Normalization((0.5, 0.4), (0.5, 0.6)), config, seed=seed)


class InterruptedRunError(Exception):
    """The process dies."""


class Book(Silent):
    """Keeps what a run says; takes a checkpoint at some epochs, and may die after one."""

    def __init__(self, resume: Snapshot | None = None, take_at: tuple[int, ...] = (), die_at: int = 0) -> None:
        self.snapshot, self.take_at, self.die_at = resume, take_at, die_at
        self.rows: list[Mapping[str, Any]] = []
        self.appended: dict[str, torch.Tensor] = dict(resume.appended) if resume else {}
        self.reports = 0
        self.epoch = 0

    def resume(self) -> Snapshot | None:
        return self.snapshot

    def record(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None) -> None:  # noqa: ARG002
        self.reports += 1
        self.epoch = step

    def checkpoint(self, take: Callable[[], Snapshot]) -> None:
        if self.epoch in self.take_at:
            snapshot: Snapshot = pickle.loads(pickle.dumps(take()))  # noqa: S301  our own bytes
            for name, rows in snapshot.appended.items():
                self.appended[name] = torch.cat([self.appended[name], rows]) if name in self.appended else rows
            self.snapshot = replace(snapshot, appended=dict(self.appended))
        if self.epoch == self.die_at:
            raise InterruptedRunError


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.student is not None
    assert other.student is not None
    for name, value in one.student.items():
        assert torch.equal(value, other.student[name]), name
    assert one.images is not None
    assert other.images is not None
    assert torch.equal(one.images, other.images)


VARIANTS = {
    "default": SMALL,
    "fresh": replace(SMALL, distillation_data="fresh", keep_images="last"),
    "persistent-generator": replace(SMALL, generator_reset=False, schedule="cosine"),
    "capped-augmented": replace(SMALL, pool_cap=10, pool_augmentation="crop-flip", synthesis_augmentation="flip"),
    "budget": replace(SMALL, steps_per_epoch=2, weight_decay=0.01, student_clip=1.0, generator_clip=1.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(name: str) -> None:
    config = VARIANTS[name]
    whole = Book()
    expected = fit(job(config), whole)
    crashed = Book(take_at=(1, 2), die_at=3)
    with pytest.raises(InterruptedRunError):
        fit(job(config), crashed)
    assert crashed.snapshot is not None
    assert crashed.snapshot.step == 2
    resumed = Book(resume=crashed.snapshot)
    assert_same(fit(job(config), resumed), expected)
    assert [row["epoch"] for row in resumed.rows] == [3, 4]
    assert resumed.rows == whole.rows[2:]


def test_fit_resumed_when_all_is_done_returns_the_same_result() -> None:
    whole = Book(take_at=(2, 4))
    expected = fit(job(), whole)
    again = Book(resume=whole.snapshot)
    assert_same(fit(job(), again), expected)
    assert again.rows == []


def test_checkpoints_carry_only_the_images_that_are_new() -> None:
    sizes: list[int] = []

    class Sizes(Book):
        def checkpoint(self, take: Callable[[], Snapshot]) -> None:
            if self.epoch % 2 == 0:
                snapshot = take()
                sizes.append(len(snapshot.appended["images"]))
                assert snapshot.appended["images"].dtype == torch.uint8
                assert len(snapshot.appended["labels"]) == sizes[-1]

    fit(job(), Sizes())
    assert sizes == [16, 16]


def test_fit_with_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    first = fit(job(), Silent())
    assert_same(fit(job(), Silent()), first)
    other = fit(job(seed=1), Silent())
    assert first.student is not None
    assert other.student is not None
    assert not torch.equal(first.student["0.weight"], other.student["0.weight"])


def test_fit_reports_at_least_once_per_generator_step_and_records_its_losses() -> None:
    book = Book()
    fit(job(), book)
    assert book.reports >= 4 * 2
    assert [row["epoch"] for row in book.rows] == [1, 2, 3, 4]
    for row in book.rows:
        assert row.keys() == {"epoch", "ce", "bn", "adversarial", "generator", "distillation"}
        total = row["ce"] + row["bn"] + 0.5 * row["adversarial"]
        assert row["generator"] == pytest.approx(total, rel=1e-5)
        assert row["bn"] > 0


def test_observer_scores_are_recorded_and_never_reach_the_result() -> None:
    seen: list[int] = []

    def observer(epoch: int, module: nn.Module) -> dict[str, float]:
        seen.append(epoch)
        module(torch.rand(2, 2, 8, 8))
        return {"accuracy": float(torch.rand(()))}

    book = Book()
    watched = fit(replace(job(), observer=observer), book)
    assert seen == [1, 2, 3, 4]
    assert all("accuracy" in row for row in book.rows)
    assert_same(watched, fit(job(), Silent()))


def test_fit_starts_from_the_start_weights_of_the_job() -> None:
    start = fresh_student(job(seed=5)).state_dict()
    still = replace(SMALL, epochs=1, student_lr=1e-12)
    student = fit(replace(job(still), start=start), Silent()).student
    assert student is not None
    torch.testing.assert_close(student["0.weight"], start["0.weight"])
    assert not torch.equal(student["0.weight"], fresh_student(job(still)).state_dict()["0.weight"])


def test_student_comes_closer_to_the_ensemble_on_images_it_has_not_seen() -> None:
    config = replace(SMALL, epochs=15, generator_steps=5, synthesis_batch_size=32, batch_size=16, student_lr=0.02)
    one = job(config)
    teacher = Ensemble.from_uploads(one.uploads, one.builders, Mean())
    images = torch.rand(256, 2, 8, 8, generator=torch.Generator().manual_seed(3))
    inputs = Standardize(one.normalization)(images)

    def distance(student: nn.Module) -> float:
        with torch.no_grad():
            return float((student.eval()(inputs).softmax(1) - teacher(inputs).softmax(1)).abs().mean())

    assert distance(load_model(fit(one, Silent()), one)) < 0.7 * distance(fresh_student(one))


def test_final_batch_of_one_sample_trains_a_student_with_batch_normalisation() -> None:
    fit(job(replace(SMALL, epochs=1, synthesis_batch_size=6, batch_size=5)), Silent())


def test_images_of_the_outcome_are_bytes_of_the_input_shape() -> None:
    images = fit(job(), Silent()).images
    assert images is not None
    assert images.dtype == torch.uint8
    assert images.shape[1:] == (2, 8, 8)


def test_cached_teacher_logits_give_the_result_of_a_teacher_that_is_asked_anew() -> None:
    from strategies.distillation import augment

    config = replace(SMALL, epochs=1)  # later epochs would amplify the last bit
    cached = fit(job(config), Silent()).student
    names = dict(augment.AUGMENTATIONS)
    assert cached is not None
    with pytest.MonkeyPatch.context() as patch:
        # "flip" without a flip: read as augmented images, hence without the cache.
        patch.setattr("strategies.dense.AUGMENTATIONS", {**names, "flip": names["none"]})
        asked = fit(job(replace(config, pool_augmentation="flip")), Silent()).student
    assert asked is not None
    for name in cached:
        torch.testing.assert_close(cached[name], asked[name], rtol=0, atol=1e-4)


OTHER: dict[str, Any] = {
    "epochs": 2, "generator_steps": 2, "generator_lr": 0.01, "generator_clip": 1e-4, "generator_reset": False,
    "generator_precision": "bfloat16", "latent": 9, "optimize_noise": False, "synthesis_batch_size": 9,
    "keep_images": "last", "synthesis_augmentation": "flip", "ce_weight": 0.5, "bn_weight": 0.0,
    "adversarial_weight": 0.0, "adversarial_temperature": 3.0, "distillation_data": "fresh", "pool_cap": 9,
    "pool_augmentation": "flip", "steps_per_epoch": 1, "batch_size": 4, "kd_temperature": 4.0, "student_lr": 0.2,
    "momentum": 0.5, "weight_decay": 0.1, "schedule": "cosine", "student_clip": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return fit(job(replace(SMALL, epochs=3, generator_steps=3)), Silent())


@pytest.mark.parametrize("name", [field.name for field in fields(DenseConfig) if field.name != "rounds"])
def test_every_option_changes_the_result(name: str, usual: Outcome) -> None:
    config = replace(SMALL, epochs=3, generator_steps=3)
    student = fit(job(replace(config, **{name: OTHER[name]})), Silent()).student
    assert student is not None
    assert usual.student is not None
    assert not torch.equal(student["0.weight"], usual.student["0.weight"])


PUBLISHED = {
    "paper": {
        "epochs": 200, "generator_steps": 30, "generator_lr": 1e-3, "adversarial_weight": 0.5, "bn_weight": 1.0,
        "ce_weight": 1.0, "adversarial_temperature": 1.0, "batch_size": 128, "synthesis_batch_size": 128,
        "student_lr": 0.01, "momentum": 0.9, "weight_decay": 0.0, "kd_temperature": 1.0, "schedule": "constant",
        "distillation_data": "fresh", "latent": 256,
    },
    "published-code": {
        "epochs": 200, "generator_steps": 30, "generator_lr": 1e-3, "adversarial_weight": 1.0, "bn_weight": 0.0,
        "ce_weight": 1.0, "adversarial_temperature": 1.0, "batch_size": 256, "synthesis_batch_size": 256,
        "student_lr": 0.005, "momentum": 0.9, "weight_decay": 0.0, "kd_temperature": 20.0, "schedule": "constant",
        "distillation_data": "pool", "latent": 256, "generator_reset": True, "keep_images": "best",
        "optimize_noise": True, "synthesis_augmentation": "crop-flip", "pool_augmentation": "crop-flip",
        "generator_clip": 0.0, "student_clip": 0.0,
    },
    "co-boosting": {
        "generator_steps": 30, "adversarial_temperature": 3.0, "bn_weight": 0.0, "kd_temperature": 4.0,
        "weight_decay": 1e-4, "schedule": "cosine", "generator_clip": 10.0, "student_clip": 10.0, "batch_size": 128,
        "synthesis_augmentation": "none", "student_lr": 0.01, "momentum": 0.9, "distillation_data": "pool",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_values(name: str) -> None:
    values = asdict(DenseConfig.preset(name))
    assert {key: values[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_preset_takes_changes_and_refuses_unknown_names() -> None:
    assert DenseConfig.preset("paper", epochs=3).epochs == 3
    assert DenseConfig.preset("default") == DenseConfig()
    with pytest.raises(OptionError, match="known are default, paper, published-code, co-boosting"):
        DenseConfig.preset("best")


@pytest.mark.parametrize(
    ("field", "value"), [("epochs", 0), ("pool_cap", 1), ("kd_temperature", 0.0), ("schedule", "step")]
)
def test_config_out_of_range_names_its_key(field: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"dense.{field.replace('_', '-')}"):
        DenseConfig(**{field: value})  # type: ignore[arg-type]


def test_fit_for_images_that_four_does_not_divide_is_refused() -> None:
    with pytest.raises(OptionError, match="multiples of 4"):
        METHOD.fit(replace(job(), input_shape=(2, 9, 9)), Silent())
