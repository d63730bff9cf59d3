"""Tally's start where a client's weights are larger than all others': what it may cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from method_fakes import Book
from torch import Tensor, nn

from strategies.combiners.outcomes import load_model
from strategies.core.facts import UploadFacts
from strategies.method import Job, Normalization, Upload
from strategies.tally import METHOD, TallyConfig
from strategies.teacher.average import LARGEST

SHAPE, CLASSES, CLIENTS = (1, 6, 6), 3, 5
SIDES = torch.randn(CLASSES, *SHAPE, generator=torch.Generator().manual_seed(3))  # what images of a class share
# So slow that the student stays where it starts.
STILL = TallyConfig(epochs=1, images=8, batch_size=4, probes=50, student_lr=1e-12)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.ReLU(),
        nn.Linear(12, CLASSES),
    )  # fmt: skip


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, CLASSES)
    )


BUILDERS = {"net": net, "plain": plain}


def examples(count: int, seed: int, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=rng)
    return 0.5 + 0.1 * (SIDES[labels] + torch.randn(count, *SHAPE, generator=rng)), labels


def held(k: int) -> tuple[Tensor, Tensor]:
    """Client k's examples; client 1 has two of the three classes."""
    return examples(40 + 10 * k, k, CLASSES - (k == 1))


@cache
def trained(k: int, kind: str = "net") -> dict[str, Tensor]:
    """Train client k, from weights that all clients start from."""
    images, labels = held(k)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BUILDERS[kind]()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def upload(k: int, factor: float = 1.0, kind: str = "net") -> Upload:
    state = {name: factor * value if value.is_floating_point() else value for name, value in trained(k, kind).items()}
    counts = tuple(torch.bincount(held(k)[1], minlength=CLASSES).tolist())
    return Upload(UploadFacts(f"c{k}", kind, sum(counts), counts), lambda: dict(state))


def job(factor: float = 1.0, attacker: int = 1, clients: int = CLIENTS, kind: str = "net", **options: Any) -> Job:
    uploads = tuple(upload(k, factor if k == attacker else 1.0, kind) for k in range(clients))
    space = Normalization((0.5,), (0.1,))
    return Job(uploads, BUILDERS, kind, CLASSES, SHAPE, space, replace(STILL, **options))


@cache
def started(factor: float = 1.0, **how: Any) -> dict[str, Tensor]:
    student = METHOD.fit(job(factor, **how), Book()).student
    assert student is not None
    return student


@pytest.mark.parametrize("start", ["average", "class-weighted"])
@pytest.mark.parametrize("attacker", [0, 1, CLIENTS - 1])
@pytest.mark.parametrize("factor", [10.0, 1e6])
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
    assert student is not None
    assert book.notes == []
    states = [one.read() for one in job(factor, clients=clients).uploads]
    sizes = [float(40 + 10 * k) for k in range(clients)]
    name = "1.running_var"  # which stays as it is: weights make steps, if tiny ones
    mean = sum(size * state[name].double() for size, state in zip(sizes, states, strict=True)) / sum(sizes)
    assert torch.equal(student[name], mean.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_have_no_part_in_the_start(bad: float) -> None:
    """Also where the model has no use for them, so that its answers are finite and the pool keeps it."""
    honest = tuple(upload(k) for k in range(CLIENTS))
    broken = dict(trained(2))
    broken["spare"] = torch.tensor([bad])
    spare = {k: {**trained(k), "spare": torch.ones(1)} for k in range(CLIENTS)} | {2: broken}

    class Spare(nn.Module):
        """A net with a weight that it has no use for."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = net(), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    def read(k: int) -> dict[str, Tensor]:
        return {name if name == "spare" else f"net.{name}": value for name, value in spare[k].items()}

    uploads = tuple(replace(one, read=lambda k=k: read(k)) for k, one in enumerate(honest))  # type: ignore[misc]
    made, book = replace(job(start="average"), uploads=uploads, builders={"net": Spare}), Book()
    student = METHOD.fit(made, book).student
    assert book.notes == ["the student's start leaves out c2: their weights are not finite"]
    without = replace(job(start="average"), uploads=tuple(one for k, one in enumerate(honest) if k != 2))
    expected = METHOD.fit(without, Book()).student
    assert student is not None
    assert expected is not None
    assert torch.equal(student["net.1.running_mean"], expected["1.running_mean"])
    assert bool(student["spare"].isfinite().all())


def test_student_survives_a_client_that_multiplies_its_weights() -> None:
    images, labels = examples(500, 99)
    inputs = (images - 0.5) / 0.1

    def accuracy(factor: float) -> float:
        made = job(factor, kind="plain", epochs=2, images=256, batch_size=32, student_lr=1e-3)
        model = load_model(METHOD.fit(made, Book()), made).eval()
        with torch.no_grad():
            return float((model(inputs).argmax(1) == labels).float().mean())

    usual = accuracy(1.0)
    assert usual > 0.75
    assert accuracy(10.0) > usual - 0.03
