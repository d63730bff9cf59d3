"""The methods that distil: how they resume, what their options change, and what each has of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import (
    OTHER,
    PROXY,
    TINY,
    UPLOADS,
    Array,
    Book,
    check_resume,
    close,
    logits_of,
    options_to_try,
    run,
    same,
    softmax,
    tiny_job,
    upload,
)
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.core.work import Work, count_work
from strategies.distillation.losses import jensen_shannon
from strategies.distillation.synthesis import Recipe, View
from strategies.method import METHODS, EnsembleSpec, Job, Normalization, Silent, Snapshot, Upload
from strategies.methods.f_adi import FAdiServer
from strategies.methods.fed_et import Judgement, transfer_loss
from strategies.teacher.augment import AUGMENTATIONS
from strategies.teacher.student import fresh_student
from strategies.uploads.needs import check_needs

DENSE, DAFL = METHODS["dense"].fit, METHODS["f-dafl"].fit


@dataclass(frozen=True)
class Case:
    """A method as small as it gets.

    Attributes:
        options: What differs from its usual config.
        resumed: What is changed in it for a run that is cut off, each a run.
        other: Another value of its own options, each of which must make a difference.
        epochs: In which a difference shows.
        elsewhere: Options that decide nothing here, or are tried in other tests.
        recipes: Whether the options of shared recipes are tried too.
    """

    options: dict[str, Any]
    resumed: tuple[dict[str, Any], ...]
    other: dict[str, Any]
    epochs: int = 2
    elsewhere: tuple[str, ...] = ()
    recipes: bool = False


AUGMENTED = {"pool_cap": 9, "pool_augmentation": "flip"}
CASES: dict[str, Case] = {
    "dense": Case(
        TINY | {"generator_lr": 1e-3},
        ({"distillation_data": "fresh", "keep_images": "last", "generator_reset": "never"},
         {"pool_cap": 10, "pool_augmentation": "crop-flip", "synthesis_augmentation": "flip"},
         {"schedule": "cosine", "steps_per_epoch": 2, "weight_decay": 0.01, "generator_clip": 1.0}),
        {"bn_weight": 0.0, "adversarial_weight": 0.0, "adversarial_temperature": 3.0, "distillation_data": "fresh",
         "schedule": "cosine"},
        epochs=3, elsewhere=("rounds",), recipes=True,
    ),
    "co-boosting": Case(
        TINY | {"schedule": "constant", "reweighting_step": 0.05},
        ({"perturbation": "l2", "reweighting_data": "perturbed", "keep_images": "last", "optimize_noise": False,
          "generator_reset": "never", "pool_precision": "float32", "difficulty": "differentiated", "ensemble": "sum"},
         {"perturbation": "none", "pool_cap": 9, "student_lr": 0.01, "pool_augmentation": "flip"}),
        {"schedule": "cosine", "hard_exponent": 0.0, "adversarial_weight": 0.0, "adversarial_temperature": 1.0,
         "difficulty": "differentiated", "ensemble": "sum", "perturbation": "l2", "perturbation_size": 0.5,
         "reweighting": False, "reweighting_step": 0.01, "reweighting_decay": 0.5, "reweighting_data": "all"},
    ),
    "f-adi": Case(
        {"epochs": 3, "inversion_steps": 3, "synthesis_batch_size": 6, "batch_size": 5, "student_lr": 0.1},
        ({}, AUGMENTED),
        {"inversion_steps": 2, "inversion_lr": 0.5, "synthesis_batch_size": 8, "tv_weight": 5.0, "bn_weight": 0.0,
         "competition_weight": 0.0},
    ),
    "f-dafl": Case(
        TINY, ({}, AUGMENTED),
        {"one_hot_weight": 0.1, "information_weight": 0.0}, elsewhere=("activation_weight",),
    ),
    "fed-et": Case(
        {"epochs": 3, "batch_size": 5, "student_lr": 0.01}, ({}, {"augmentation": "crop-flip"}),
        {"augmentation": "flip", "diversity_weight": 1.0},
    ),
    "feddf": Case(
        {"epochs": 3, "batch_size": 5, "student_lr": 0.1},
        ({}, {"start": "average", "augmentation": "crop-flip", "optimizer": "adam"}),
        {"start": "average", "augmentation": "flip"},
    ),
    "fedkd": Case(
        {"epochs": 3, "batch_size": 5, "student_lr": 0.01}, ({}, {"augmentation": "crop-flip", "loss": "kl"}),
        {"augmentation": "flip", "loss": "kl"},
    ),
    "tally": Case(
        {"epochs": 3, "batch_size": 5, "images": 12, "layers": 0, "probes": 7, "counts": "tempered", "student_lr": 0.01,
         "start": "average", "rule": "linear", "sharpness": 1.0, "calibrated": True, "temperature": 1.0,
         "smoothing": 0.02},
        ({"student_lr": 0.01, "start": "class-weighted", "layers": 2}, {"counts": "noise-rows", "start": "fresh"},
         {"counts": "auto", "rule": "log", "inverted": 6}),
        {"counts": "rows", "rule": "log", "temperature": 3.0, "smoothing": 0.5, "probes": 8, "cap_examples": True,
         "images": 13, "layers": 1, "sharpness": 2.0, "calibrated": False, "inverted": 4, "start": "class-weighted"},
        # Random models do not agree, and have no common start: see test_tally_left_out.py and test_update_gate.py.
        elsewhere=("agreement", "gate", "spanned"),
    ),
    "distill": Case(  # three passes of 11 images, the last one of a single step
        {"steps": 5, "batch_size": 5, "student_lr": 0.1, "optimizer": "sgd", "schedule": "constant"}, ({},),
        {"steps": 4, "kd_temperature": 2.0, "schedule": "one-cycle", "start": "average"}, recipes=True,
    ),
}  # fmt: skip
CONFIGS = {name: METHODS[name].config(**case.options) for name, case in CASES.items()}
RESUMED = [(name, changes) for name, case in CASES.items() for changes in case.resumed]


@pytest.mark.parametrize(("name", "changes"), RESUMED, ids=[f"{name} {'+'.join(more)}" for name, more in RESUMED])
def test_fit_resumed_after_a_crash_ends_with_the_same_bits(name: str, changes: dict[str, Any]) -> None:
    check_resume(METHODS[name], tiny_job(replace(CONFIGS[name], **changes)))


@cache
def usual(name: str, epochs: int) -> Any:
    return run(METHODS[name], at(name, epochs))


def at(name: str, epochs: int, /, **changes: Any) -> Any:
    """Return a method's config, so many epochs long where it has epochs."""
    length = {"epochs": epochs} if hasattr(CONFIGS[name], "epochs") else {}
    return replace(CONFIGS[name], **length | changes)


def options() -> list[tuple[str, str]]:
    found = []
    for name, case in CASES.items():
        kind = METHODS[name].config
        tried = [field.name for field in fields(kind)] if case.recipes else options_to_try(kind)
        found += [(name, option) for option in tried if option not in case.elsewhere]
    return found


@pytest.mark.parametrize(("name", "option"), options())
def test_every_option_changes_the_result(name: str, option: str) -> None:
    """An epoch, or a few, with another value of an option end with another student, ensemble or images."""
    epochs, value = CASES[name].epochs, (OTHER | CASES[name].other)[option]
    assert getattr(at(name, epochs), option) != value
    lengths = (epochs,) if option == "epochs" else (1, epochs)  # most options show at once
    changed = ((n, run(METHODS[name], at(name, n, **{option: value}))) for n in lengths)
    assert any(not same(outcome, usual(name, n)) for n, outcome in changed)


# DENSE and the others with a generator.


def test_checkpoints_carry_only_the_images_that_are_new() -> None:
    sizes: list[int] = []

    class Sizes(Silent):
        def checkpoint(self, take: Callable[[], Snapshot]) -> None:
            snapshot = take()
            sizes.append(len(snapshot.appended["images"]))
            assert snapshot.appended["images"].dtype == torch.uint8
            assert len(snapshot.appended["labels"]) == sizes[-1]

    DENSE(tiny_job(replace(CONFIGS["dense"], epochs=2)), Sizes())
    assert sizes == [6, 6]


def test_fit_starts_from_the_start_weights_of_the_job() -> None:
    start = fresh_student(tiny_job(CONFIGS["dense"], seed=5)).state_dict()
    still = replace(CONFIGS["dense"], epochs=1, student_lr=1e-12)
    student = DENSE(replace(tiny_job(still), start=start), Silent()).student
    torch.testing.assert_close(student["0.weight"], start["0.weight"])
    assert not torch.equal(student["0.weight"], fresh_student(tiny_job(still)).state_dict()["0.weight"])


@pytest.mark.parametrize(
    ("name", "epochs", "changes"),
    [
        ("dense", 1, {}),  # later epochs would amplify the last bit
        ("co-boosting", 2, {"perturbation": "none", "student_lr": 1e-3}),
        ("co-boosting", 2, {"perturbation": "sign", "student_lr": 1e-3}),
    ],
)
def test_cached_teacher_logits_give_the_result_of_a_teacher_that_is_asked_anew(
    name: str, epochs: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, method = at(name, epochs, pool_augmentation="none", **changes), METHODS[name]
    cached = run(method, config)
    # "flip" without a flip: read as augmented images, hence without the cache.
    monkeypatch.setattr("strategies.distillation.learner.AUGMENTATIONS", {"flip": AUGMENTATIONS["none"]})
    asked = run(method, replace(config, pool_augmentation="flip"))
    close(asked, cached)
    if name == "co-boosting":
        assert torch.equal(asked.ensemble.weights["weights"], cached.ensemble.weights["weights"])
        assert not torch.equal(cached.ensemble.weights["weights"], torch.full((3,), 1 / 3))


WIDE = (upload(0, "wide"), upload(1, "wide"))


@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("name", ["dense", "f-adi"])
def test_clients_without_batch_normalisation_have_a_loss_of_zero_and_one_note_says_so(name: str, weight: float) -> None:
    book = Book()
    METHODS[name].fit(tiny_job(at(name, 2, bn_weight=weight), uploads=WIDE), book)
    assert len(book.notes) == (weight > 0)
    assert [row.get("bn") for row in book.epochs] == [0.0 if weight else None] * 2


def test_competition_is_one_less_the_jensen_shannon_divergence_at_temperature_three() -> None:
    student, teacher = 4 * torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    view = View(torch.zeros(5), torch.zeros(5), torch.zeros(5), teacher, student)
    value = FAdiServer(tiny_job(CONFIGS["f-adi"]), Book()).competition(view)
    assert float(value) == pytest.approx(1 - float(jensen_shannon(student, teacher, 3.0)), rel=1e-6)


def test_pixels_are_moved_by_adam_with_the_rates_of_the_published_code(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes: list[Recipe] = []

    def spy(pixels: Any, *_: Any, recipe: Recipe, **__: Any) -> tuple[torch.Tensor, dict[str, float]]:
        recipes.append(recipe)
        return pixels(torch.empty(0)).detach(), {}

    monkeypatch.setattr("strategies.methods.f_adi.synthesize", spy)
    run(METHODS["f-adi"], at("f-adi", 1, inversion_steps=7, inversion_lr=0.2))
    assert recipes == [Recipe(steps=7, lr=0.2, betas=(0.9, 0.999), optimize_noise=False)]


ALIKE = (upload(0, "narrow"), upload(1, "narrow"))


def test_losses_of_clients_with_equal_features_add_up_and_need_no_note() -> None:
    book = Book()
    DAFL(tiny_job(CONFIGS["f-dafl"], uploads=ALIKE), book)
    assert book.notes == []
    for row in book.rows:
        assert row.keys() == {"epoch", "one-hot", "information", "activation", "generator", "distillation"}
        total = row["one-hot"] + 5 * row["information"] + 0.1 * row["activation"]
        assert row["generator"] == pytest.approx(total, rel=1e-4)
        assert row["activation"] < 0
        assert -torch.tensor(3.0).log10() - 1e-6 <= row["information"] < 0


def test_activation_weight_changes_the_result_where_features_are_alike() -> None:
    configs = (at("f-dafl", 1, activation_weight=weight) for weight in (0, 20))
    assert not same(*(DAFL(tiny_job(config, uploads=ALIKE), Book()) for config in configs))


def test_a_generator_with_nothing_to_learn_from_is_refused_before_a_client_works() -> None:
    weights = {"one_hot_weight": 0.0, "information_weight": 0.0, "activation_weight": 0.0}
    with pytest.raises(OptionError, match="activation_weight are all 0: must be at least one"):
        METHODS["f-dafl"].config(**weights)
    for name in weights:
        METHODS["f-dafl"].config(**{**weights, name: 1.0})


# FedET, FedKD and FedDF.


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


def still_job(name: str, **changes: Any) -> Job:
    """One step on all images, after which the student, which has no dropout, has hardly moved."""
    config = at(name, 1, batch_size=11, student_lr=1e-12, **changes)
    return replace(tiny_job(config), student="wide")


def recorded(name: str, job: Job) -> float:
    book = Book()
    METHODS[name].fit(job, book)
    return float(book.rows[0]["distillation"])


def weighted(members: Array) -> Array:
    counts = np.array([upload.label_counts for upload in UPLOADS], dtype=float)
    combined: Array = np.einsum("mc,mbc->bc", counts / counts.sum(0), members)
    return combined


def kl(student: Array, teacher: Array, temperature: float) -> float:
    p, q = softmax(teacher / temperature), softmax(student / temperature)
    return float(temperature**2 * (p * np.log(p / q)).sum(1).mean())


@pytest.mark.parametrize(
    ("name", "changes", "loss"),
    [
        ("fed-et", {"diversity_weight": 0.7, "kd_temperature": 3.0}, lambda s, m: loss_by_hand(s, m, 0.7, 3.0)),
        ("fedkd", {}, lambda s, m: np.abs(s - weighted(m)).mean()),
        ("fedkd", {"loss": "kl", "kd_temperature": 3.0}, lambda s, m: kl(s, weighted(m), 3.0)),
    ],
)
def test_fit_minimises_its_loss_of_the_clients_logits(name: str, changes: dict[str, Any], loss: Any) -> None:
    job = still_job(name, **changes)
    assert recorded(name, job) == pytest.approx(loss(*logits_of(job)), rel=1e-4)


def test_start_at_the_average_weighs_uploads_of_the_students_architecture_by_their_examples() -> None:
    student = run(METHODS["feddf"], at("feddf", 1, student_lr=1e-12, start="average")).student
    first, last = UPLOADS[0].read(), UPLOADS[2].read()  # 10 and 30 examples; the one between is another architecture
    for name in ("0.weight", "5.weight", "7.bias"):
        torch.testing.assert_close(student[name], (first[name] + 3 * last[name]) / 4, msg=name)


@pytest.mark.parametrize(
    ("proxy", "found"),
    [
        (None, "holds none"),
        (PROXY[:, :1], r"shape \(11, 1, 8, 8\)"),
        (PROXY.float(), "float32"),
        (PROXY[:1], r"shape \(1, 2, 8, 8\)"),
    ],
)
def test_job_without_fitting_images_is_refused(proxy: torch.Tensor | None, found: str) -> None:
    check_needs(METHODS["feddf"], tiny_job(CONFIGS["feddf"]))
    with pytest.raises(OptionError, match=f"'feddf' needs .*{found}.*Choose another method: .*dense"):
        check_needs(METHODS["feddf"], replace(tiny_job(CONFIGS["feddf"]), proxy=proxy))


# Distillation of an ensemble on stored images.


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def test_the_first_step_is_the_one_computed_by_hand() -> None:
    rng = np.random.default_rng(0)
    weights, biases = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3))
    pixels = rng.uniform(size=(6, 4))
    states = [{"1.weight": torch.tensor(w), "1.bias": torch.tensor(b)} for w, b in zip(weights, biases, strict=True)]
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", "linear", 10, None), lambda k=k: {n: v.float() for n, v in states[k].items()})  # type: ignore[misc]
        for k in range(2)
    )
    teacher = EnsembleSpec(("c0", "c1"), "weighted", {"weights": torch.tensor([0.75, 0.25])})
    images = torch.tensor(pixels, dtype=torch.float32).view(6, 1, 2, 2)
    config = replace(CONFIGS["distill"], steps=1, batch_size=6, student_lr=0.5, start="average", kd_temperature=2.0)
    space = Normalization((0.5,), (0.25,))
    job = Job(uploads, {"linear": linear}, "linear", 3, (1, 2, 2), space, config, proxy=images, teacher=teacher)

    student = METHODS["distill"].fit(job, Silent()).student

    inputs = (pixels - 0.5) / 0.25
    wanted = softmax((inputs @ (0.75 * weights[0] + 0.25 * weights[1]).T + 0.75 * biases[0] + 0.25 * biases[1]) / 2)
    weight, bias = weights.mean(0), biases.mean(0)
    error = 2 * (softmax((inputs @ weight.T + bias) / 2) - wanted) / 6  # T^2 d/ds KL(p_T || q_T) = T (q_T - p_T)
    np.testing.assert_allclose(student["1.weight"], weight - 0.5 * error.T @ inputs, atol=1e-5)
    np.testing.assert_allclose(student["1.bias"], bias - 0.5 * error.sum(0), atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_the_student_takes_the_steps_and_the_teacher_sees_each_image_once(steps: int) -> None:
    counts = Work()
    with count_work(counts):
        METHODS["distill"].fit(tiny_job(replace(CONFIGS["distill"], steps=steps)), Silent())
    assert counts.as_dict() == {
        "teacher_forward": len(PROXY) * len(UPLOADS), "teacher_backward": 0, "student_steps": steps,
        "generator_steps": 0, "bfloat16_passes": 0, "bfloat16_steps": 0, "exchanges": 0,
    }  # fmt: skip


@pytest.mark.parametrize("proxy", [None, 2 * PROXY.float() / 255, -PROXY.float() / 255, PROXY.float() * torch.nan])
def test_job_without_images_or_with_numbers_that_are_no_pixels_is_refused(proxy: torch.Tensor | None) -> None:
    with pytest.raises(OptionError, match=r"'distill' needs that the server holds images without labels; .*\[0, 1\]"):
        check_needs(METHODS["distill"], replace(tiny_job(CONFIGS["distill"]), proxy=proxy))
