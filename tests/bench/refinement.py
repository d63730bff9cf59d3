"""What a round's server stage costs beside its arithmetic: in this process, in a fresh Ray actor, and in a kept one."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from measure import row, say

from fl_app.models import build
from strategies.compute import InProcess, RayActors, ServerCompute
from strategies.core.facts import UploadFacts
from strategies.method import METHODS, Job, Normalization, Outcome, Silent, Upload

CLIENTS, TARGET = 10, 0.1
STEPS = ("per-client", "joint")
WIDTHS = (11, 17, 26, 11, 14, 8)
SHAPES = {"lenet5": (1, 32, 32), "resnet18": (3, 32, 32)}


class Unwritten(Silent):
    """Takes no checkpoints: within a round there are none."""

    interval_s = float("inf")


def round_of(model: str, **changes: Any) -> Job:
    """Return the job of a round of FLBoost: ten untrained models, and the first as the start."""
    shape = SHAPES[model]
    builder = partial(build, model, num_classes=10, input_shape=shape)
    states = []
    for client in range(CLIENTS):
        torch.manual_seed(client)
        states.append({name: value.clone() for name, value in builder().state_dict().items()})
    uploads = tuple(
        Upload(UploadFacts(f"client-{number}", model, 100, (10,) * 10), lambda state=state: state)  # type: ignore[misc]
        for number, state in enumerate(states)
    )
    space = Normalization((0.5,) * shape[0], (0.5,) * shape[0])
    config = METHODS["flboost"].config(**changes)
    return Job(uploads, {model: builder}, model, 10, shape, space, config, device="cpu", start=states[0])


def seconds(place: ServerCompute, job: Job) -> tuple[float, float]:
    """Return the wall seconds of a run beside its arithmetic, and those of the arithmetic."""
    began = time.perf_counter()
    outcome: Outcome = place.run(METHODS["flboost"], job, Unwritten())
    arithmetic = sum(outcome.timings.values())
    return time.perf_counter() - began - arithmetic, arithmetic


def overhead(rounds: int, **changes: Any) -> dict[str, dict[str, float]]:
    """Print what rounds cost beside their arithmetic, wall seconds and share; medians of the rounds after the first.

    Args:
        rounds: At least 2.
        **changes: Of FLBoost's config.

    Returns:
        Place -> model and generator step -> the share.
    """
    iterations = METHODS["flboost"].config(**changes).iterations
    say(f"FLBoost's server stage, {CLIENTS} clients, {iterations} iterations: wall seconds beside its arithmetic")
    say(f"(the set-up is the same for any number of iterations; later rounds: at most {TARGET:.0%})")
    row(["model", "generator step", "place", "beside s", "arithmetic s", "share"], WIDTHS)
    shares: dict[str, dict[str, float]] = {}
    for model, step in itertools.product(SHAPES, STEPS):
        job = round_of(model, generator_step=step, **changes)
        for name, (beside, arithmetic) in measured(job, rounds):
            shares.setdefault(name, {})[f"{model}, {step}"] = round(beside / arithmetic, 3)
            row([model, step, name, f"{beside:.3f}", f"{arithmetic:.2f}", f"{beside / arithmetic:.1%}"], WIDTHS)
    return shares


def measured(job: Job, rounds: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield what :func:`seconds` finds at each place: of the first round, and the medians of those after it."""
    for name, place in [("in process", InProcess()), ("actor", RayActors(fallback=False))]:
        with place.kept() as kept:
            first, *later = [seconds(kept, job) for _ in range(rounds)]
        yield f"{name}, first round", first
        beside, arithmetic = (statistics.median(column) for column in zip(*later, strict=True))
        yield f"{name}, later", (beside, arithmetic)
