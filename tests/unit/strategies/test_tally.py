from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from method_fakes import SHAPE, UPLOADS, Book, run, telling, tiny_job, train, upload
from torch import Tensor, nn

from strategies.combiners.noise import noise_batches
from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.outcomes import build_ensemble, load_model
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator
from strategies.distillation.pool import quantize
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.tally import METHOD, TallyConfig, fit
from strategies.teacher.augment import Standardize
from strategies.teacher.average import LARGEST
from strategies.teacher.student import fresh_student

SMALL = TallyConfig(
    epochs=3, batch_size=5, images=12, layers=0, probes=7, counts="tempered", student_lr=0.01,
    start="average", rule="linear", sharpness=1.0,
    calibrated=True, temperature=1.0, smoothing=0.02,
)  # fmt: skip
# So slow that the student stays where it starts.
STILL = replace(SMALL, epochs=1, student_lr=1e-12, counts="auto", start="class-weighted")
STATISTICS = ("1.running_mean", "1.running_var", "1.num_batches_tracked", "6.running_mean", "6.running_var")
# 10, 20 and 30 examples; the one between is of another architecture.
FIRST, LAST = UPLOADS[0].read(), UPLOADS[2].read()


def student_of(config: TallyConfig, uploads: tuple[Upload, ...] = UPLOADS, **also: Any) -> dict[str, Tensor]:
    student = fit(replace(tiny_job(config, uploads=uploads), **also), Silent()).student
    assert student is not None
    return student


def test_outcome_has_the_student_the_ensemble_and_the_first_images() -> None:
    usual, job = run(METHOD, SMALL), tiny_job(SMALL)
    assert usual.ensemble.clients == ("c0", "c1", "c2")
    assert torch.equal(usual.images, quantize(next(noise_batches(12, SHAPE, generator(0, "tally", "noise")))))
    many = fit(tiny_job(replace(STILL, images=70)), Silent()).images
    assert many.shape == (64, *SHAPE)
    combiner = build_ensemble(job, usual.ensemble).combiner
    assert isinstance(combiner, OpinionPool)
    assert combiner.rule == "linear"
    assert torch.equal(combiner.counts, usual.ensemble.weights["counts"])


def test_ensemble_s_counts_are_those_that_clients_tell_and_estimates_of_the_others() -> None:
    told = run(METHOD, STILL).ensemble
    silent = fit(tiny_job(STILL, uploads=(telling(UPLOADS[0], label_counts=None), *UPLOADS[1:])), Silent()).ensemble
    assert (told.combiner, silent.combiner) == ("linear-pool", "linear-pool")
    assert told.weights["counts"].tolist() == [pytest.approx(list(one.label_counts or ())) for one in UPLOADS]
    torch.testing.assert_close(silent.weights["counts"].sum(1), torch.tensor([10.0, 20.0, 30.0]))
    torch.testing.assert_close(silent.weights["counts"][1:], told.weights["counts"][1:])
    assert not torch.allclose(silent.weights["counts"][0], told.weights["counts"][0], atol=0.1)


def test_student_comes_closer_to_the_ensemble_on_noise_that_it_has_not_seen() -> None:
    config = replace(SMALL, epochs=15, images=200, batch_size=20, student_lr=0.03, start="fresh")
    job = tiny_job(config)
    outcome = fit(job, Silent())
    assert outcome.ensemble is not None
    teacher = build_ensemble(job, outcome.ensemble)
    inputs = Standardize(job.normalization)(next(noise_batches(60, SHAPE, generator(5, "test"))))

    def distance(student: nn.Module) -> float:
        with torch.no_grad():
            return float((student.eval()(inputs).softmax(1) - teacher(inputs).softmax(1)).abs().mean())

    assert distance(load_model(outcome, job)) < 0.7 * distance(fresh_student(job))


def test_class_weighted_start_is_the_average_with_a_last_layer_class_by_class() -> None:
    student = student_of(STILL)
    for name in ("0.weight", "5.bias", "6.weight"):
        torch.testing.assert_close(student[name], (FIRST[name] + 3 * LAST[name]) / 4, msg=name)
    # Of class 0 the two have 4 and 6 examples, of class 1 none and 12, of class 2 6 and 12.
    shares = torch.tensor([[0.4, 0.0, 1 / 3], [0.6, 1.0, 2 / 3]])
    for name in ("7.weight", "7.bias"):
        one, other = (shares.view(2, 3, *[1] * (FIRST[name].dim() - 1))[k] for k in range(2))
        torch.testing.assert_close(student[name], one * FIRST[name] + other * LAST[name], msg=name)


@pytest.mark.parametrize("start", ["fresh", "class-weighted", "average"])
def test_student_starts_fresh_if_set_or_if_no_client_has_its_architecture(start: str) -> None:
    uploads = UPLOADS if start == "fresh" else (upload(1, "wide"), upload(3, "wide"))
    job = tiny_job(replace(STILL, start=start), uploads=uploads)
    student = fit(job, Silent()).student
    for name, value in fresh_student(job).named_parameters():
        torch.testing.assert_close(student[name], value.detach(), msg=name)


@pytest.mark.parametrize("start", ["class-weighted", "average"])
def test_running_statistics_stay_those_of_the_start_while_the_weights_learn(start: str) -> None:
    config = replace(SMALL, start=start)
    begun, ended = student_of(replace(config, epochs=1, student_lr=1e-12)), student_of(config)
    assert all(torch.equal(begun[name], ended[name]) for name in STATISTICS)
    torch.testing.assert_close(ended["1.running_mean"], (FIRST["1.running_mean"] + 3 * LAST["1.running_mean"]) / 4)
    assert not torch.equal(begun["0.weight"], ended["0.weight"])
    assert not torch.equal(begun["1.weight"], ended["1.weight"])


# Tally's start where a client's weights are larger than all others': what it may cost.


SCALED_SHAPE, CLASSES, CLIENTS = (1, 6, 6), 3, 5
SIDES = torch.randn(CLASSES, *SCALED_SHAPE, generator=torch.Generator().manual_seed(3))  # what images of a class share
# So slow that the student stays where it starts.
SCALED_STILL = TallyConfig(epochs=1, images=8, batch_size=4, probes=50, student_lr=1e-12)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.ReLU(),
        nn.Linear(12, CLASSES),
    )  # fmt: skip


def examples(count: int, seed: int, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=rng)
    return 0.5 + 0.1 * (SIDES[labels] + torch.randn(count, *SCALED_SHAPE, generator=rng)), labels


def held(k: int) -> tuple[Tensor, Tensor]:
    """Client k's examples; client 1 has two of the three classes."""
    return examples(40 + 10 * k, k, CLASSES - (k == 1))


@cache
def trained(k: int) -> dict[str, Tensor]:
    """Train client k, from weights that all clients start from."""
    images, labels = held(k)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = net()
    return train(model, images, labels, torch.optim.Adam(model.parameters(), 0.01), 40)


def upload_scaled(k: int, factor: float = 1.0) -> Upload:
    state = {name: factor * value if value.is_floating_point() else value for name, value in trained(k).items()}
    counts = tuple(torch.bincount(held(k)[1], minlength=CLASSES).tolist())
    return Upload(UploadFacts(f"c{k}", "net", sum(counts), counts), lambda: dict(state))


def job(factor: float = 1.0, attacker: int = 1, clients: int = CLIENTS, **options: Any) -> Job:
    uploads = tuple(upload_scaled(k, factor if k == attacker else 1.0) for k in range(clients))
    space = Normalization((0.5,), (0.1,))
    return Job(uploads, {"net": net}, "net", CLASSES, SCALED_SHAPE, space, replace(SCALED_STILL, **options))


@cache
def started(factor: float = 1.0, **how: Any) -> dict[str, Tensor]:
    student = METHOD.fit(job(factor, **how), Book()).student
    assert student is not None
    return student


@pytest.mark.parametrize(
    ("start", "attacker", "factor"),
    [("average", 0, 1e6), ("class-weighted", 1, 10.0), ("class-weighted", CLIENTS - 1, 1e6)],
)
def test_larger_weights_move_the_start_no_more_than_the_bound(start: str, attacker: int, factor: float) -> None:
    usual, moved = started(start=start), started(factor, attacker=attacker, start=start)
    states = [trained(k) for k in range(CLIENTS)]
    share = (40 + 10 * attacker) / 300
    head = ("6.weight", "6.bias") if start == "class-weighted" else ()  # there a client's share differs by class
    for name in (name for name, value in usual.items() if value.is_floating_point() and name not in head):
        norms = torch.stack([state[name].norm() for state in states])
        # What the client had to say is at most gone, and what it says at most as large as the bound.
        most = share * float(norms[attacker] + LARGEST * norms.median())
        assert float((moved[name] - usual[name]).norm()) <= most + 1e-6, name


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("clients", [2, CLIENTS])
def test_weights_of_usual_size_make_the_plain_average_bit_for_bit(factor: float, clients: int) -> None:
    book = Book()
    student = METHOD.fit(job(factor, clients=clients, start="average"), book).student
    assert book.notes == []
    states = [one.read() for one in job(factor, clients=clients).uploads]
    sizes = [float(40 + 10 * k) for k in range(clients)]
    name = "1.running_var"  # which stays as it is: weights make steps, if tiny ones
    mean = sum(size * state[name].double() for size, state in zip(sizes, states, strict=True)) / sum(sizes)
    assert torch.equal(student[name], mean.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_have_no_part_in_the_start(bad: float) -> None:
    """Also where the model has no use for them, so that its answers are finite and the pool keeps it."""

    class Spare(nn.Sequential):
        """A net with a weight that it has no use for."""

        def __init__(self) -> None:
            super().__init__(*net())  # type: ignore[misc]
            self.spare = nn.Parameter(torch.ones(1))

    honest = tuple(upload_scaled(k) for k in range(CLIENTS))
    spare = [torch.tensor([bad if k == 2 else 1.0]) for k in range(CLIENTS)]
    uploads = tuple(
        replace(one, read=lambda one=one, own=own: {**one.read(), "spare": own})  # type: ignore[misc]
        for one, own in zip(honest, spare, strict=True)
    )
    made, book = replace(job(start="average"), uploads=uploads, builders={"net": Spare}), Book()
    student = METHOD.fit(made, book).student
    assert book.notes == ["the student's start leaves out c2: their weights are not finite"]
    without = replace(job(start="average"), uploads=tuple(one for k, one in enumerate(honest) if k != 2))
    expected = METHOD.fit(without, Book()).student
    assert torch.equal(student["1.running_mean"], expected["1.running_mean"])
    assert bool(student["spare"].isfinite().all())
