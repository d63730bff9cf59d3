"""Tally's combination of a job's uploads by the classes that each client knows, as counted or estimated.

See :mod:`strategies.methods.tally`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core import refusals
from ..core.errors import OptionError
from ..core.facts import holds_images
from ..core.options import option
from ..core.seeds import generator, seeded_torch
from ..method import Teacher
from ..teacher.augment import Standardize
from ..teacher.ensemble import Ensemble
from ..teacher.heads import head_keys
from . import class_counts
from .class_counts import find_agreeing
from .combiners import Mean
from .feature_noise import generate_noise
from .opinion_pools import RULES, SMOOTHING, OpinionPool, with_stand_ins

if TYPE_CHECKING:
    from ..method import Job, ModelBuilder, Upload
    from ..teacher.ensemble import Ensemble
    from .opinion_pools import OpinionPool


COUNTS = ("auto", "noise-rows", "noise", "rows", "tempered", "uniform")
READ_OFF_ROWS = ("noise-rows", "rows", "tempered")  # estimated from the last layer, even with uploaded label counts
BATCH = 256  # probes in one forward pass
LARGEST_LOGIT = 1e15  # its square, and sums of many such squares, are finite in float32


@dataclass(frozen=True)
class TallyPoolOptions:
    """How the uploads are combined."""

    counts: str = option(
        "auto",
        "examples per class of a client: auto: as uploaded, else noise-rows; noise: from its answers to noise; "
        "rows: from its last layer; noise-rows: from both; tempered: geometric mean of uploaded and noise-rows; "
        "uniform: equal in all classes",
        choices=COUNTS,
    )
    sharpness: float = option(2.0, "power applied to a client's estimated class shares", above=0.0)
    rule: str = option("log", "opinion pool: logarithmic or linear", choices=tuple(RULES))
    calibrated: bool = option(True, "add to the pool the clients' logits, scaled to equal size on noise")
    temperature: float = option(1.0, "temperature T of a client's opinion", above=0.0)
    smoothing: float = option(
        SMOOTHING, "a: examples added to every class of a client, as a share of all its examples", above=0.0
    )
    probes: int = option(1024, "noise images on which the clients' models are evaluated", low=1)
    cap_examples: bool = option(False, "cap a client's number of examples at the clients' median")
    agreement: float = option(
        0.0,
        "leave out a client whose agreement with the others on noise is below this share of their own; 0: keep all; "
        "0.3 was measured",
        low=0.0,
        high=1.0,
    )


def fit_pool(job: Job, ensemble: Ensemble, options: TallyPoolOptions) -> OpinionPool:
    """Return Tally's combiner of a job's uploads.

    Args:
        job: Its uploads, seed, input space, device and builders.
        ensemble: Of all its uploads, in their order, with any combiner.
        options: How to combine the uploads.

    Returns:
        The pool, on the job's device. A client has weight 0 if it does not agree with the others, or if a logit of its
        model on noise is not finite or beyond ``LARGEST_LOGIT``; else 1.

    Raises:
        UploadError: Every client has weight 0, or those with weight 1 have no examples.
    """
    answers = probe_members(job, ensemble, options.probes)
    keep = (answers.abs() <= LARGEST_LOGIT).all(2).all(1)  # false for NaN
    if not bool(keep.any()):
        raise refusals.nothing_to_combine(
            f"no client's model answers noise with finite logits up to {LARGEST_LOGIT:.0e}"
        )
    if options.agreement > 0:
        keep[keep.clone()] = find_agreeing(answers[keep], options.agreement)
    counts = examples_per_class(job, answers, job.uploads, options)
    if not bool(counts[keep].any()):
        raise refusals.nothing_to_combine("no client whose model answers noise with finite logits has examples")
    pool = OpinionPool(
        options.rule,
        counts,
        keep.float(),
        torch.full((len(keep),), options.temperature),
        torch.tensor([options.smoothing]),
    )
    if options.calibrated:
        pool.calibrate(answers)
    return pool.to(job.device).eval()


def examples_per_class(job: Job, answers: Tensor, uploads: Sequence[Upload], options: TallyPoolOptions) -> Tensor:
    """Return the examples n_k^c of every class, counted or estimated, that each member was trained on [M, C] float32.

    Args:
        job: Its classes and builders.
        answers: The members' logits on noise [M, P, C].
        uploads: The members, in their order.
        options: How to count or estimate.
    """
    sizes = known_sizes(uploads)
    sizes = class_counts.cap_at_median(sizes) if options.cap_examples else sizes
    told = [upload.label_counts for upload in uploads]
    if options.counts == "uniform":
        shares = torch.full((len(uploads), job.num_classes), 1 / job.num_classes)
        return sizes[:, None] * shares
    claimed = class_counts.normalize_rows(torch.tensor([row or (0,) * job.num_classes for row in told]).double())
    silent = torch.tensor([not row or not sum(row) for row in told])
    if options.counts == "auto" and not bool(silent.any()):
        return (sizes[:, None] * claimed).float()
    # With "auto" only clients without label counts are estimated.
    asked = silent if options.counts == "auto" else torch.ones_like(silent)
    found = claimed.clone()
    found[asked] = estimate_shares(
        job, answers[asked], [u for u, one in zip(uploads, asked, strict=True) if one], options
    )
    if options.counts == "tempered":
        found = torch.where(silent[:, None], found, class_counts.geometric_mean(claimed, found))
    return (sizes[:, None] * found).float()


def estimate_shares(job: Job, answers: Tensor, uploads: Sequence[Upload], options: TallyPoolOptions) -> Tensor:
    """Return the share of each class among a client's examples, estimated from its model [M, C]."""
    shares = class_counts.response_shares(answers)
    if options.counts != "noise":
        rows = class_counts.row_shares(row_norms(uploads, job.builders, job.num_classes))
        shares = rows if options.counts == "rows" else class_counts.geometric_mean(shares, rows)
    # Divided by the largest, so that a high power does not underflow for all classes.
    return class_counts.normalize_rows((shares / shares.amax(1, keepdim=True)) ** options.sharpness)


@torch.no_grad()
def probe_members(job: Job, ensemble: Ensemble, count: int) -> Tensor:
    """Return the members' logits [M, count, C] on noise images or features, on the CPU."""
    standardize = Standardize(job.normalization)
    batches = generate_noise(job, count, generator(job.seed, "tally", "probes"))
    parts = (standardize(part) for batch in batches for part in torch.split(batch, BATCH))
    return torch.cat([ensemble.member_logits(part.to(job.device)).float().cpu() for part in parts], dim=1)


def row_norms(uploads: Sequence[Upload], builders: Mapping[str, ModelBuilder], classes: int) -> Tensor:
    """Return the Euclidean norms of the rows of the members' last linear layers [M, C].

    Raises:
        OptionError: A model has no such layer, or one with another number of outputs than C.
    """
    keys: dict[str, str] = {}
    norms = []
    for upload in uploads:
        if upload.architecture not in keys:
            with seeded_torch(0, "row-norms"):
                model = builders[upload.architecture]()
            try:
                keys[upload.architecture], _ = head_keys(model, classes)
            except OptionError as error:
                raise OptionError(
                    f"class counts of {upload.client!r} ({upload.architecture}) are estimated from its last layer, and "
                    f"{error}; or have the client upload label counts, or set tally.counts=noise"
                ) from error
        norms.append(torch.linalg.vector_norm(upload.read()[keys[upload.architecture]].double(), dim=1))
    return torch.stack(norms)


def known_sizes(uploads: Sequence[Upload]) -> Tensor:
    """Return the clients' numbers of examples [M]; one that is not reported counts as the median of the others."""
    sizes = [sum(u.label_counts or ()) or None if u.num_examples is None else u.num_examples for u in uploads]
    told = [float(size) for size in sizes if size]
    usual = float(torch.tensor(told).median()) if told else 1.0
    return torch.tensor([usual if size is None else float(size) for size in sizes])


# A job's uploads combined by Tally's pool: Tally's teacher, and the teacher or class shares of other methods.


def build_tally_teacher(
    job: Job, options: TallyPoolOptions | None = None, *, fold: bool = True, precision: str = "float32"
) -> tuple[Ensemble, OpinionPool]:
    """Return the ensemble of a job's uploads under Tally's pool, and that pool, which is the ensemble's combiner.

    If the pool leaves a client out, another client's model takes its place: :func:`.opinion_pools.with_stand_ins`.

    Args:
        job: Its uploads, builders, seed, input space and device. Label counts may be missing.
        options: Of the pool; None for the defaults.
        fold: See :meth:`.ensemble.Ensemble.from_uploads`.
        precision: See :meth:`.ensemble.Ensemble.from_uploads`.

    Raises:
        OneShotError: An upload's weights do not fit its architecture, its model does not end with a linear layer of
            C outputs, or no model answers noise with finite logits.
    """
    ensemble = Ensemble.of_job(job, job.uploads, Mean(), fold=fold, precision=precision)
    pool = fit_pool(job, ensemble, options or TallyPoolOptions())
    if not bool((pool.weights > 0).all()):
        del ensemble  # two ensembles may not fit in memory
        ensemble = Ensemble.of_job(job, with_stand_ins(job.uploads, pool), Mean(), fold=fold, precision=precision)
    ensemble.combiner = pool
    return ensemble, pool


def check_images(job: Job, key: str) -> None:
    """Refuse a job whose clients' models cannot take noise images.

    Args:
        job: Its uploads may be missing.
        key: The setting that names the teacher.

    Raises:
        OptionError: The examples are no images.
    """
    if not holds_images(job.input_shape):
        raise OptionError(
            f"{key} is {TEACHER.name!r}, and the examples' shape is {tuple(job.input_shape)}: must be "
            "images, because it runs the clients' models on noise"
        )


TEACHER = Teacher("tally", build_tally_teacher, check_images)
