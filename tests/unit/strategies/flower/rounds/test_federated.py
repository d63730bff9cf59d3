"""FedNova against its formula, and a method as the stage of every round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from strategies.compute import InProcess
from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.flower.rounds.algorithms import add_step, fednova_change
from strategies.flower.rounds.config import REFINERS
from strategies.flower.rounds.refinement import Refinement, Refiner, refines
from strategies.method import METHODS, InRounds, Job, Method, Normalization, Outcome, Progress, Upload


def test_fednova_is_its_formula() -> None:
    rng, shapes = np.random.default_rng(0), {"a": (2, 3), "b": (), "c": (4,)}
    start, *ends = (
        {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(4)
    )
    weights, travels, rate = np.array([3.0, 1.0, 4.0]), np.array([0.5, 2.0, 1.1]), 0.7
    shares = weights / weights.sum()
    change = fednova_change(start, ends, weights=weights.tolist(), travels=travels.tolist(), server_lr=rate)
    found = add_step(start, change)
    for name, value in start.items():
        normalised = sum(p * (value - end[name]) / t for p, end, t in zip(shares, ends, travels, strict=True))
        np.testing.assert_allclose(found[name], value - rate * (shares @ travels) * normalised, rtol=1e-5, atol=1e-6)
        assert found[name].dtype == value.dtype


State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class NudgeConfig:
    """Of a method that adds ``step`` to every weight, and remembers how often it did."""

    step: float = 1.0


def nudge(job: Job, progress: Progress) -> Outcome:
    count = job.memory["count"] + 1 if job.memory else torch.ones(())
    progress.record({"note": "no label counts"})
    progress.record({"epoch": 1, "moved": job.config.step, "clients": len(job.uploads), "said": "words"})
    student = {name: value + job.config.step for name, value in job.start.items()}
    return Outcome(student=student, memory={"count": count}, timings={"work": 0.25, "more": 0.5})


def method(fit: Callable[[Job, Progress], Outcome] = nudge, **changes: Any) -> Method:
    return replace(Method(name="nudge", title="Nudge", source="none", config=NudgeConfig, fit=fit), **changes)


def job() -> Job:
    half = Normalization((0.5,), (0.5,))
    return Job((), {"net": lambda: nn.Linear(2, 2)}, "net", 2, (1, 8, 8), half, config=None, device="cpu")


def state(value: float) -> State:
    return {"weight": torch.full((2, 2), value), "bias": torch.full((2,), value)}


def upload(name: str) -> Upload:
    return Upload(UploadFacts(name, "net", 4), lambda: state(3.0))


def refinement(fit: Callable[[Job, Progress], Outcome] = nudge, **more: Any) -> Refinement:
    return Refinement(Refiner(method(fit), NudgeConfig()), job(), InProcess(), say=more.pop("say", print), **more)


def test_a_round_has_the_numbers_and_the_time_of_its_refinement_and_the_given_model_stays() -> None:
    start = state(0.0)
    first, values = refinement().run(1, [upload("a"), upload("b")], start)
    assert torch.equal(first["bias"], torch.ones(2))
    assert torch.equal(start["bias"], torch.zeros(2))
    assert (values["moved"], values["clients"], values["arithmetic_s"]) == (1.0, 2.0, 0.75)
    assert values["refinement_s"] >= 0
    assert not {"said", "epoch"} & values.keys()


def test_every_round_draws_anew_be_it_by_its_seed_or_by_its_number() -> None:
    seen: list[int] = []

    def watch(given: Job, progress: Progress) -> Outcome:
        seen.append(given.seed)
        return nudge(given, progress)

    for by_round in (False, True):
        stage = Refinement(
            Refiner(method(watch, in_rounds=InRounds(draws_by_round=by_round)), NudgeConfig()),
            job(),
            InProcess(),
            say=print,
        )
        for number in (1, 2, 3, 3):
            stage.run(number, [upload("a")], state(0.0))
    one, two, three, again = seen[:4]
    assert one == job().seed
    assert len({one, two, three}) == 3
    assert again == three
    assert set(seen[4:]) == {job().seed}
    assert [name for name in REFINERS if METHODS[name].in_rounds.draws_by_round] == ["flboost", "fed-gen"]


@pytest.mark.parametrize("broken", ["student", "memory"])
def test_a_refinement_that_is_not_finite_is_not_followed(broken: str) -> None:
    lines: list[str] = []

    def explode(given: Job, progress: Progress) -> Outcome:
        outcome = nudge(given, progress)
        return replace(outcome, **{broken: {"weight": torch.tensor(float("nan"))}})

    stage = refinement(explode, say=lines.append)
    stage.memory = {"count": torch.tensor(4.0)}
    kept, values = stage.run(2, [upload("a")], state(1.0))
    assert torch.equal(kept["weight"], torch.ones(2, 2))
    assert values["moved"] == 1.0
    assert not stage.memory
    assert lines[1:] == [
        "round 2: the model of Nudge holds NaN or Inf, so the clients' combined model is kept; lower its "
        "learning rate (nudge.student-lr)"
    ]


def test_only_methods_that_end_with_one_model_of_the_uploads_alone_refine() -> None:
    assert sorted(REFINERS) == sorted(name for name in METHODS if refines(METHODS[name]))
    assert not {"fedens", "fedavg", "fens", "fedcvae-ens", "iterative"} & set(REFINERS)
    with pytest.raises(OptionError, match=r"^refiner is 'fedens': must be one of .*dense"):
        Refiner.of("fedens")
    with pytest.raises(OptionError, match="refiner is 'nudge'"):
        Refiner(method(uploads="cvae"), NudgeConfig())
    with pytest.raises(OptionError, match="config is a NudgeConfig: with 'dense' it must be a DenseConfig"):
        Refiner(METHODS["dense"], NudgeConfig())
