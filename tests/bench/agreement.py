"""From one identical state, what the shipped code computes against what the published loop computes.

The models have kinks: a ReLU's input, or the gap between the two largest of a pooling window, can be within rounding of
zero. Two correct orders of summation then take different sides, and a gradient differs by far more than rounding: by
one part in a thousand, once in some millions of windows. So a gradient is compared for a few small batches: the
median is free of kinks, and the largest error shows one where it occurs.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import published_loops
import torch
from measure import row, say
from published_loops import State
from server_stage import (
    MODELS,
    TARGETS,
    Scale,
    both_sides,
    case_of,
    replay_plain,
    replay_shipped,
    synthesize_plain,
)
from side_by_side import Case, distance
from torch import Tensor, nn

from strategies.combiners.combiners import weighted_mean_gradient

LIMIT, FLIP_LIMIT = 1e-5, 1e-3
COLUMNS = ("logits", "generator loss", "G gradient", "KD loss", "S gradient", "w gradient", "image gradient")
ONE_STEP = {"steps": 1, "generator_clip": 1e9, "student_clip": 1e9, "eight_bits": False, "augment": False}


def agreement(scale: Scale, models: tuple[str, ...] = tuple(MODELS), seeds: int = 5) -> None:
    """Print relative errors ``||a - b|| / ||b||`` and the share of perturbation signs that differ.

    One generator step, one student step; neither gradient is clipped, so that its length counts too.
    """
    say(
        f"Agreement from one identical state, fp32, {scale.clients} teachers, batch {scale.batch}: relative errors "
        f"(limit {LIMIT:g}), medians of {seeds} states, and the largest; signs of the perturbation (limit "
        f"{FLIP_LIMIT:.1%}).\nA largest error of about 1e-3 is one ReLU or pooling window at its kink."
    )
    widths = (13, 8, *(16 for _ in COLUMNS), 9, 12, 6)
    row(["method", "model", *COLUMNS, "largest", "sign flips", ""], widths)
    for method in TARGETS:
        for model in models:
            states = [compare(replace(case_of(method, model, scale, **ONE_STEP), seed=seed)) for seed in range(seeds)]
            found = {name: statistics.median(errors[name] for errors, _ in states) for name in states[0][0]}
            largest = max(error for errors, _ in states for error in errors.values())
            flips = statistics.fmean(share for _, share in states)
            agree = max(found.values()) < LIMIT and flips <= FLIP_LIMIT
            shown = [f"{found[name]:.1e}" if name in found else "-" for name in COLUMNS]
            signs = f"{flips:.4%}" if method == "co-boosting" else "-"
            row([method, model, *shown, f"{largest:.1e}", signs, "agree" if agree else "DIFFER"], widths)


def compare(case: Case) -> tuple[dict[str, float], float]:
    """Return the relative error of each quantity and the share of flipped signs."""
    server, state, _ = both_sides(case, batches=1)
    state.weights = torch.linspace(0.2, 1.0, len(state.weights)) if case.method == "co-boosting" else state.weights
    inputs = published_loops.normalise(state.images)
    found, flips = {}, 0.0
    if case.method == "co-boosting":
        server.combiner.weights.copy_(state.weights)
        found["w gradient"], found["image gradient"], flips = boosting(case, server, state, inputs)
    with torch.no_grad():
        found["logits"] = distance([server.teacher(inputs)], [published_loops.ensemble(state, inputs)])
    made = server.synthesize(1, lambda: None)
    synthesize_plain(case, state)
    found["generator loss"] = relative(made.losses["generator"], state.losses["generator"])
    found["G gradient"] = distance(gradients(server.images.generator), gradients(state.generator))
    state.student.zero_grad()  # drop the gradients that synthesis left
    held = state.weights
    loss = replay_shipped(case.method, server) if case.method == "dense" else distil_shipped(server)
    replay_plain(case, state) if case.method == "dense" else distil_plain(case, state)
    assert torch.equal(held, state.weights)
    found["KD loss"] = relative(loss, state.losses["distillation"])
    found["S gradient"] = distance(gradients(server.learner.student), gradients(state.student))
    return found, flips


def boosting(case: Case, server: Any, state: State, inputs: Tensor) -> tuple[float, float, float]:
    """Compare the gradients with respect to the weights and to the images, and the signs of the latter."""
    rng = torch.Generator().manual_seed(case.seed)
    directions = torch.rand(len(inputs), case.settings.classes, generator=rng) * 2 - 1
    closed = weighted_mean_gradient(state.weights, server.teacher.member_logits(inputs), state.labels)
    graph = published_loops.weights_gradient(state, inputs, state.labels)
    ours = inputs.clone().requires_grad_()
    softened = torch.softmax(server.teacher(ours) / case.settings.perturbation_temperature, dim=1)
    (gradient,) = torch.autograd.grad((directions * softened).sum(), ours)
    theirs = published_loops.images_gradient(state, case.settings, inputs, directions)
    flips = float((gradient.sign() != theirs.sign()).float().mean())
    return distance([closed], [graph]), distance([gradient], [theirs]), flips


def distil_shipped(server: Any) -> float:
    """Pass over the pool without reweighting and perturbation: a flipped sign would be a difference of its own."""
    return float(server.learner.learn(server.stage.pool.columns, 1))


def distil_plain(case: Case, state: State) -> None:
    """Pass over the pool without reweighting and perturbation."""
    replay_plain(replace(case, method="dense"), state)


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients that a module's last step left."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def relative(one: float, other: float) -> float:
    """Return ``|a - b| / |b|``."""
    return abs(one - other) / abs(other)
