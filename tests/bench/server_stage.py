"""A server epoch of the published loop against the shipped one, from one identical state, in CPU seconds.

An epoch is T_G generator steps, the storing of one batch, and a pass over the pool (reweighting where the method has
it, perturbation, distillation). With ten CNN5 the published epoch takes minutes; so a few generator steps and a few
pool batches are timed, and the epoch is composed of them: both halves are loops whose turns cost the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import published_loops
import torch
from measure import interleaved, row, say
from published_loops import Settings, State
from published_models import plain_cnn5, plain_lenet5
from side_by_side import Case, plain_state, same_draws, shipped_job, shipped_server

from fl_app.models import build
from strategies.distillation.synthesis import Batch

LOSSES = {"dense": published_loops.dense_loss, "co-boosting": published_loops.co_boosting_loss}
TARGETS = {"dense": 4.0, "co-boosting": 4.0}


@dataclass(frozen=True)
class Scale:
    """How much of an epoch is timed.

    Attributes:
        clients: n.
        batch: b.
        steps: T_G of the epoch that is reported.
        pool: Its pool, in batches.
        timed_steps: Generator steps that are timed.
        timed_batches: Pool batches that are timed.
        repetitions: Of which the median is taken.
        precision: Of the shipped generator and teachers; the published loop's is float32.
    """

    clients: int = 10
    batch: int = 128
    steps: int = 30
    pool: int = 16
    timed_steps: int = 1
    timed_batches: int = 1
    repetitions: int = 3
    precision: str = "auto"


# The models of Co-Boosting's experiments, and whether its code augments their data set.
MODELS: dict[str, tuple[int, Callable[[], torch.nn.Module], bool]] = {
    "cnn5": (3, plain_cnn5, True),
    "lenet5": (1, plain_lenet5, False),
}


def case_of(method: str, model: str, scale: Scale, **changes: Any) -> Case:
    """Return what both sides start from, with the published settings for that model's data sets."""
    channels, plain, augment = MODELS[model]
    shape = (channels, 32, 32)
    settings = Settings(steps=scale.timed_steps, batch=scale.batch, augment=augment)
    shipped = partial(build, model, num_classes=10, input_shape=shape)
    return Case(method, shape, shipped, plain, scale.clients, replace(settings, **changes), precision=scale.precision)


def both_sides(case: Case, batches: int) -> tuple[Any, State, Batch]:
    """Return the shipped server and the published loop's state, with equal weights and pools, and a batch for storing.

    The pool's images are noise, but differently bright: their pixels cost what any pixels cost.
    """
    job = shipped_job(case)
    server = shipped_server(case, job)
    rng = torch.Generator().manual_seed(case.seed)
    for _ in range(batches):
        batch = noise_batch(case, rng)
        store_shipped(case.method, server, batch)
    return server, plain_state(case, server, job), noise_batch(case, rng)


def noise_batch(case: Case, rng: torch.Generator) -> Batch:
    """Return a batch of random images and labels."""
    count = case.settings.batch
    images = torch.rand(count, *case.shape, generator=rng) * torch.rand(count, 1, 1, 1, generator=rng)
    return Batch(images, torch.randint(case.settings.classes, (count,), generator=rng), {})


def store_shipped(method: str, server: Any, batch: Batch) -> None:
    """Add a batch to the shipped server's pool, as its epoch does."""
    server.stage.pool.add(**remembered(method, server, batch))


def remembered(method: str, server: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch as rows of the shipped pool, with its known values."""
    if method == "dense":
        rows: dict[str, torch.Tensor] = server.learner.with_logits(server.config.stored(batch.images, batch.labels))
    else:
        rows = server.remembered(batch)
    return rows


def replay_shipped(method: str, server: Any, epoch: int = 1) -> float:
    """Pass over the shipped server's pool, as its epoch does; return the mean distillation loss."""
    if method == "dense":
        return float(server.learner.learn(server.stage.pool.columns, epoch))
    server.reweight(epoch)
    return float(server.learner.learn(server.table(), epoch, perturb=server.perturb))


def synthesize_plain(case: Case, state: State, epoch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the published generator steps of an epoch."""
    rng = same_draws(case)("synthesis", epoch)
    return published_loops.synthesize(state, case.settings, rng, LOSSES[case.method], sort=case.method == "dense")


def replay_plain(case: Case, state: State, epoch: int = 1) -> None:
    """Pass over the published loop's pool, as its epoch does."""
    rngs, boosts = same_draws(case), case.method == "co-boosting"
    if boosts:
        published_loops.reweight(state, case.settings, epoch, rngs("reweighting", epoch))
    published_loops.distil(state, case.settings, epoch, rngs("distillation", epoch), perturb=boosts)


def epoch_seconds(case: Case, scale: Scale) -> dict[str, tuple[float, float]]:
    """Time both sides.

    Returns:
        Phase -> CPU seconds of the published loop and of the shipped one, for the whole epoch of ``scale``.
    """
    server, state, extra = both_sides(case, scale.timed_batches)
    works: dict[str, Callable[[], object]] = {
        "synthesis published": lambda: synthesize_plain(case, state),
        "synthesis shipped": lambda: server.synthesize(1, lambda: None),
        "storing published": lambda: published_loops.remember(
            replace(state, losses={}), case.settings, extra.images, extra.labels
        ),
        "storing shipped": lambda: remembered(case.method, server, extra),
        "replay published": lambda: replay_plain(case, state),
        "replay shipped": lambda: replay_shipped(case.method, server),
    }
    shipped = [name for name in works if name.endswith("shipped")]
    seconds = interleaved(works, scale.repetitions, in_a_stage=shipped)
    factors = {
        "synthesis": scale.steps / scale.timed_steps,
        "storing": 1.0,
        "replay": scale.pool / scale.timed_batches,
    }
    return {
        phase: (factor * seconds[f"{phase} published"], factor * seconds[f"{phase} shipped"])
        for phase, factor in factors.items()
    }


def speed(scale: Scale, models: tuple[str, ...] = tuple(MODELS)) -> dict[str, dict[str, float]]:
    """Print the times of both methods with both models.

    Returns:
        Method -> model -> how many times less CPU time the shipped epoch takes.
    """
    say(
        f"CPU seconds of one server epoch, published/shipped: {scale.clients} teachers, batch {scale.batch}, "
        f"{scale.steps} generator steps and one pass over {scale.pool} pool batches; one thread; "
        f"shipped generator and teachers: {scale.precision}.\n"
        f"Composed of {scale.timed_steps} step(s) and {scale.timed_batches} batch(es), medians of {scale.repetitions} "
        "interleaved repetition(s). cnn5 reads its pool with crop and flip (CIFAR), lenet5 unchanged, as published."
    )
    widths = (13, 8, 25, 25, 25, 18, 8, 6)
    row(["method", "model", "synthesis", "storing", "replay", "epoch", "ratio", "target"], widths)
    ratios: dict[str, dict[str, float]] = {}
    for method, target in TARGETS.items():
        for model in models:
            times = epoch_seconds(case_of(method, model, scale), scale)
            plain, shipped = (sum(pair[side] for pair in times.values()) for side in (0, 1))
            ratios.setdefault(method, {})[model] = round(plain / shipped, 2)
            parts = [f"{one:.2f}/{other:.2f} = {one / max(other, 1e-9):.2f}x" for one, other in times.values()]
            whole = f"{plain:.1f}/{shipped:.1f}"
            row([method, model, *parts, whole, f"{plain / shipped:.2f}x", f"{target}x"], widths)
    return ratios
