"""Tally: count the classes that each client knows, combine the clients by the counts, and distil that teacher on noise.

A method of this library, published nowhere else.

Symbols: z_k -> member logits; n_k^c -> tally_pool.examples_per_class; pi_k, q_k, l_k -> opinion_pools; P_T -> the
    pool's softmax; X -> noise.noise_batches, overlay_shapes.
Where: the counts -> combiners.tally_pool; the teacher -> opinion_pools.OpinionPool, with ``gate``
    update_gate.GatedPool; the start -> class_weighted; the student ``min_S mean_X KL(P_T(X) || S(X))`` ->
    learner.Learner; X of heads on one backbone, which are noise features -> noise.generate_noise; with ``spanned``,
    more X -> spanned.move_into_spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..combiners.combiners import name_of
from ..combiners.noise import generate_noise, noise_batches, overlay_shapes, to_feature_space, to_image_space
from ..combiners.opinion_pools import OpinionPool, class_shares
from ..combiners.tally_pool import FROM_LAST_LAYER, TallyPoolOptions, build_tally_teacher
from ..combiners.update_gate import check_gate, find_spans, gate_pool, merge_uploads
from ..core.errors import OptionError
from ..core.facts import holds_images
from ..core.names import is_adapter_state
from ..core.options import config_class, option
from ..core.seeds import build_module, generator
from ..distillation.epochs import copy_weights, sample_images
from ..distillation.inverted import invert_images
from ..distillation.learner import Learner, learn_from_table
from ..distillation.pool import quantize
from ..distillation.settings import DistillOptions, shared
from ..distillation.spanned import DIRECTIONS, move_into_spans
from ..method import EnsembleSpec, Job, Method, Need, Outcome, Progress, State, Upload
from ..teacher.average import (
    LARGEST,
    find_shrink_factors,
    repeat_tied_weights,
    shrink_tensors,
    tensor_norms,
    weighted_mean,
)
from ..teacher.heads import head_keys
from ..uploads.needs import check_gradients

# Every published figure of Tally was measured with these values, without weight decay and clipping.
OPTIMIZER = "adam"
SCHEDULE = "one-cycle"
INVERSION_STEPS = 16  # per image that is inverted beside the noise
SPAN_STEPS = 60  # per image that is moved into a client's span
BY_CLASS = ("class-weighted", "merged")  # the starts whose last layer is weighed class by class


@config_class("tally")
class TallyConfig(TallyPoolOptions, DistillOptions):
    """Options of Tally."""

    epochs: int = shared("epochs", 12)
    images: int = option(16384, "noise images", low=2, main=True)
    layers: int = option(3, "times that shapes of other noise, or of one colour, are laid over them", low=0)
    inverted: int = option(0, "images inverted from the clients' models beside the noise, each read twice", low=0)
    kd_temperature: float = shared("kd_temperature", 1.0)
    student_lr: float = shared("student_lr", 3e-3)
    teacher_precision: str = shared("teacher_precision", "auto")
    spanned: int = option(
        0, "noise images moved into the spans of the clients' updates of a linear layer, beside the noise", low=0
    )
    gate: str = option(
        "none",
        "what else weighs a client for an image; updates: how much of the image lies in the span of the client's "
        "update of a linear layer",
        choices=("none", "updates"),
    )
    start: str = option(
        "class-weighted",
        "the student before its first step: the average of the uploads of its architecture, its last layer class by "
        "class as the counts say; the same with its other linear layers merged by the clients' updates; the plain "
        "average; or fresh weights",
        choices=("class-weighted", "merged", "average", "fresh"),
    )


def fit(job: Job, progress: Progress) -> Outcome:
    """Combine the uploads, and distil them; the results are the last epoch's student and the ensemble."""
    config: TallyConfig = job.config
    job = to_feature_space(job)
    teacher, pool = build_tally_teacher(job, config, precision=config.teacher_precision)
    if left_out := [one.client for one, weight in zip(job.uploads, pool.weights.tolist(), strict=True) if not weight]:
        why = "they do not agree with the others on noise, or their logits on it are not finite, or too large"
        progress.record({"note": f"left out are {', '.join(left_out)}: {why}"})
    if config.gate == "updates":
        pool = teacher.combiner = _gate(job, pool, progress)
    start = build_start(job, pool, progress)
    learner = Learner(
        replace(job, start=start),
        teacher,
        config.distill_recipe(optimizer=OPTIMIZER, schedule=SCHEDULE),
        frozen_statistics=start is not None,  # the statistics of noise differ from those of the clients' images
    )
    images = make_noise(job)
    shown = [images]  # the images that the outcome keeps

    def table() -> dict[str, Tensor]:
        tick = partial(progress.report, 0, config.epochs)
        moved = _move_into_spans(job, pool, images, progress, tick) if config.spanned else images[:0]
        if len(moved):  # else they are not copied: large ones take gigabytes
            shown[0] = torch.cat([images, moved])
        noise = learner.with_logits({"images": shown[0]}, tick=tick)
        made = _invert(job, learner, pool, tick) if config.inverted else {}
        return {name: torch.cat([column, *2 * [made[name]]]) if made else column for name, column in noise.items()}

    outcome = learn_from_table(job, progress, learner, table)
    spec = EnsembleSpec.of(job, name_of(pool), copy_weights(pool))
    if not holds_images(job.input_shape):
        return replace(outcome, student=to_image_space(outcome.student or {}), ensemble=spec)
    return replace(outcome, ensemble=spec, images=sample_images(shown[0], job.store_images))


def _gate(job: Job, pool: OpinionPool, progress: Progress) -> OpinionPool:
    """Return the pool with the gate of the clients' updates, or the pool itself and a note why there is none."""
    gated = gate_pool(job, pool)
    if not isinstance(gated, str):
        return gated
    progress.record({"note": f"the clients' updates do not gate: {gated}"})
    return pool


def make_noise(job: Job) -> Tensor:
    """Return the noise images as bytes [N, ch, H, W], or noise features [N, d, 1, 1]."""
    config: TallyConfig = job.config
    if not holds_images(job.input_shape):
        return torch.cat(list(generate_noise(job, config.images, generator(job.seed, "tally", "noise"))))
    shapes = generator(job.seed, "tally", "shapes")
    made, first = torch.empty(config.images, *job.input_shape, dtype=torch.uint8), 0
    for batch in noise_batches(config.images, job.input_shape, generator(job.seed, "tally", "noise")):
        made[first : first + len(batch)] = quantize(overlay_shapes(batch, config.layers, shapes))
        first += len(batch)
    return made


def _move_into_spans(
    job: Job, pool: OpinionPool, images: Tensor, progress: Progress, tick: Callable[[], None]
) -> Tensor:
    """Return noise images in the spans of the clients' updates; none, and a note why, if there are no spans."""
    spans = find_spans(job, (pool.weights > 0).tolist(), share=DIRECTIONS)
    if isinstance(spans, str):
        progress.record({"note": f"no images in the spans of updates: {spans}"})
        return images[:0]
    first = images[torch.arange(job.config.spanned) % len(images)]
    rng = generator(job.seed, "tally", "spanned")
    return move_into_spans(job, spans, pool.examples().cpu(), first, steps=SPAN_STEPS, rng=rng, tick=tick)


def _invert(job: Job, learner: Learner, pool: OpinionPool, tick: Callable[[], None]) -> dict[str, Tensor]:
    """Return inverted images and the logarithms of their targets: half their class, half the teacher's prediction."""
    config: TallyConfig = job.config
    held = pool.examples().sum(0).cpu()
    rng = generator(job.seed, "tally", "inverted")
    labels = torch.multinomial(held, config.inverted, replacement=True, generator=rng)
    images = invert_images(job, learner.teacher, pool.shares(), labels, steps=INVERSION_STEPS, rng=rng, tick=tick)
    rows = learner.with_logits({"images": images}, tick=tick)
    wanted = torch.nn.functional.one_hot(labels, job.num_classes).to(rows["logits"])
    rows["logits"] = (0.5 * wanted + 0.5 * torch.softmax(rows["logits"], dim=1)).clamp_min(1e-8).log()
    return rows


def build_start(job: Job, pool: OpinionPool, progress: Progress) -> State | None:
    """Return the weights before the first step: those of the job in a round, and where no client has the architecture.

    None stands for fresh ones.
    """
    if job.refines or job.config.start == "fresh":
        return job.start
    # The number of examples that the pool counts: examples that it caps or leaves out stay out of the start, too.
    sizes = pool.examples().sum(1).round().tolist()
    alike = [k for k, upload in enumerate(job.uploads) if upload.architecture == job.student and sizes[k] > 0]
    norms = {k: tensor_norms(job.uploads[k].read()) for k in alike}
    if broken := [k for k in alike if not all(map(math.isfinite, norms[k].values()))]:
        names = ", ".join(job.uploads[k].client for k in broken)
        progress.record({"note": f"the student's start leaves out {names}: their weights are not finite"})
        alike = [k for k in alike if k not in broken]
    if not alike:
        return job.start
    factors = dict(zip(alike, find_shrink_factors([norms[k] for k in alike]), strict=True))
    if large := [job.uploads[k].client for k in alike if factors[k]]:
        why = f"they have tensors more than {LARGEST:g} times as large as the clients' median"
        progress.record({"note": f"the student's start takes {', '.join(large)} for as large as the others: {why}"})
    keys: Sequence[str] = _head_keys(job) if job.config.start in BY_CLASS else ()
    heads: list[State] = []

    def states() -> Iterator[State]:  # one at a time: only the last layer of each is kept
        for k in alike:
            state = _shrunk(job.uploads[k], factors[k])
            heads.append({key: state[key].clone() for key in keys if key in state})
            yield state

    start = weighted_mean(states(), [sizes[k] for k in alike])
    if job.config.start == "merged":
        read = [replace(job.uploads[k], read=partial(_shrunk, job.uploads[k], factors[k])) for k in alike]
        start |= merge_uploads(job, read, [sizes[k] for k in alike], progress, but=keys[0])
    shares = class_shares(pool.examples().cpu()[alike])
    rows = {key: class_weighted([head[key] for head in heads], shares, start[key]) for key in heads[0]}
    return start | repeat_tied_weights(build_module(job.builders[job.student]), rows)


def _shrunk(upload: Upload, factors: Mapping[str, float]) -> State:
    return shrink_tensors(upload.read(), factors)


def check_last_layer(job: Job) -> None:
    """Refuse a model without the last layer, or without the gradient, that is needed, before a client has worked."""
    if job.config.gate == "updates":
        check_gate(job, "setting 'tally.gate'")
    if job.config.spanned:
        check_gate(job, "setting 'tally.spanned'", f"{job.config.spanned}", "0")
    if job.config.inverted:
        check_gradients(job, "setting 'tally.inverted'", "It must be 0")
    # The clients' architectures are not known yet if there are several.
    if job.config.counts in FROM_LAST_LAYER and set(job.builders) == {job.student}:
        _head_keys(job, "counts", "noise")
    if (
        job.config.start != "fresh"
        and not job.refines
        and is_adapter_state(build_module(job.builders[job.student]).state_dict())
    ):
        raise OptionError(
            f"setting 'tally.start' is {job.config.start!r}, and the models are adapters on one base, whose factors A "
            "and B have no average: must be 'fresh', with which the student starts as the base with a new adapter"
        )
    if job.config.start in BY_CLASS and not job.refines:
        _head_keys(job)


def _head_keys(job: Job, setting: str = "start", otherwise: str = "average") -> tuple[str, str]:
    student = build_module(job.builders[job.student])
    try:
        return head_keys(student, job.num_classes)
    except OptionError as error:
        found = getattr(job.config, setting)
        raise OptionError(f"setting 'tally.{setting}' is {found!r}, and {error}; else {otherwise!r}") from error


def class_weighted(rows: list[Tensor], shares: Tensor, otherwise: Tensor) -> Tensor:
    """Return a last layer's weight, or its bias, class by class: ``row_c = sum_k l_k(c) row_k,c``.

    Args:
        rows: One tensor [C, ...] per client.
        shares: l [M, C]; a column sums to 1, or is 0.
        otherwise: The rows [C, ...] of classes that no client holds.
    """
    stacked = torch.stack([row.double().cpu() for row in rows])
    merged = torch.einsum("mc,mc...->c...", shares.double(), stacked)
    held = (shares.sum(0) > 0).view(-1, *[1] * (otherwise.dim() - 1))
    return torch.where(held, merged, otherwise.double()).to(otherwise.dtype)


METHOD = Method(
    name="tally",
    title="Tally",
    source="this library",
    config=TallyConfig,
    fit=fit,
    needs=frozenset({Need.IMAGES}),
    check=check_last_layer,
)
