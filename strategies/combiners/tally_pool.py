"""Tally's combination of a job's uploads by the classes that each client knows, as counted or estimated.

See :mod:`strategies.methods.tally`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import refusals
from ..core.errors import OptionError
from ..core.facts import holds_images
from ..core.options import option
from ..core.seeds import build_module, generator
from ..method import Job, ModelBuilder, Teacher, Upload
from ..teacher.augment import Standardize
from ..teacher.ensemble import Ensemble
from ..teacher.heads import head_keys
from .combiners import Mean
from .noise import generate_noise
from .opinion_pools import RULES, SMOOTHING, OpinionPool, with_stand_ins

# Estimates of a client's class shares from its model alone.
#
# A network trained on few examples of a class seldom predicts it, whatever the image, and has small weights in that
# class's row of its last layer. Both suffice to weigh an ensemble's clients class by class without their label counts.
# They also reveal a client's class shares to anyone who holds its weights.


def response_shares(logits: Tensor) -> Tensor:
    """Return g_k(c), the normalised root mean square of ``softmax(z_k(x))_c`` over noise images.

    Args:
        logits: z of every member on noise [M, N, C].

    Returns:
        [M, C], rows that sum to 1.
    """
    return normalize_rows(torch.softmax(logits.double(), dim=2).square().mean(1).sqrt())


def row_shares(rows: Tensor) -> Tensor:
    """Return ``||W_k[c]||^4``, normalised over classes [M, C], of the norms of the last layers' rows [M, C]."""
    return normalize_rows(rows.double() ** 4)


def geometric_mean(one: Tensor, other: Tensor) -> Tensor:
    """Return ``sqrt(one * other)`` of two tables of shares [M, C], renormalised."""
    return normalize_rows((one.double() * other.double()).sqrt())


def normalize_rows(shares: Tensor) -> Tensor:
    """Return non-negative rows [M, C] divided by their sums; a row of zeros or with NaN or Inf becomes uniform."""
    shares = torch.where(shares.isfinite().all(1, keepdim=True), shares, torch.zeros_like(shares))
    total = shares.sum(1, keepdim=True)
    return torch.where(total > 0, shares / torch.where(total > 0, total, 1.0), 1 / shares.shape[1])


def cap_at_median(sizes: Tensor) -> Tensor:
    """Return numbers of examples [M], capped at the median of the positive ones: claiming too many gains nothing."""
    some = sizes[sizes > 0]
    return torch.minimum(sizes, some.median()) if len(some) else sizes


# Agreement of the clients' models on noise images, which shows models that learned something else.
#
# Models of one problem answer the same noise alike, class by class, even if their examples differ. A model trained on
# flipped labels, or on nothing, does not. Each pair is compared on the classes that both know. Agreement falls with the
# skew of the clients' examples, so no client is judged unless the others agree among themselves.
#
# It does not detect many attackers who agree with one another, false answers for a single class, or false counts with
# an honest model. Nor does it detect a model trained to answer this noise like the others: the noise follows from the
# run's seed, which clients know.


ENOUGH = 0.3  # median agreement of the others below which no client is judged


def find_agreeing(logits: Tensor, least: float) -> Tensor:
    """Return which members agree with the others.

    Members are removed one at a time, starting with the one that agrees least. Removal needs that the rest agree among
    themselves (median agreement at least :data:`ENOUGH`), and with this member less than ``least`` times that median.
    More than half of the members are kept.

    Args:
        logits: Of every member on noise [M, N, C].
        least: Share of the others' agreement that a member must have, in [0, 1].

    Returns:
        Whether a member is kept, bool [M].
    """
    table = correlations(logits)
    keep = torch.ones(len(table), dtype=torch.bool)
    while 2 * (int(keep.sum()) - 1) > len(table) and int(keep.sum()) > 2:
        members = keep.nonzero().flatten()
        worst = members[mean_correlations(table[members][:, members]).argmin()]
        rest = members[members != worst]
        usual = float(mean_correlations(table[rest][:, rest]).median())
        if usual < ENOUGH or float(table[worst, rest].mean()) >= least * usual:
            break
        keep[worst] = False
    return keep


def mean_correlations(table: Tensor) -> Tensor:
    """Return each member's mean correlation [M] with the others of a table [M, M], M >= 2."""
    return (table.sum(1) - table.diagonal()) / (len(table) - 1)


def correlations(logits: Tensor) -> Tensor:
    """Return how alike members answer noise, ``sum_c v_c corr_x(z_j(x)_c, z_k(x)_c)``.

    The weights of a pair are ``v_c ~ sqrt(g_j(c) g_k(c))``, with the shares g of :func:`.tally_pool.response_shares`:
    a model's answers for classes that it never saw do not count.

    Args:
        logits: z of every member [M, N, C]; NaN and Inf count as 0, which agrees with nothing.

    Returns:
        Symmetric [M, M] float64, in [-1, 1].
    """
    z = torch.nan_to_num(logits.double(), nan=0.0, posinf=0.0, neginf=0.0)
    z = z - z.mean(1, keepdim=True)
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    known = response_shares(logits).sqrt()
    pairs = torch.einsum("jnc,knc,jc,kc->jk", z, z, known, known)
    return pairs / (known @ known.T).clamp_min(torch.finfo(torch.float64).tiny)


COUNTS = ("auto", "noise-rows", "noise", "rows", "tempered", "uniform")
FROM_LAST_LAYER = ("noise-rows", "rows", "tempered")  # estimated from the last layer, even with uploaded label counts
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
    sharpness: float = option(2.0, "power applied to a client's estimated class shares", above=0.0, setting=False)
    rule: str = option("log", "opinion pool: logarithmic or linear", choices=tuple(RULES), setting=False)
    calibrated: bool = option(True, "add to the pool the clients' logits, scaled to equal size on noise")
    temperature: float = option(1.0, "temperature T of a client's opinion", above=0.0)
    smoothing: float = option(
        SMOOTHING, "a: examples added to every class of a client, as a share of all its examples", above=0.0,
        setting=False,
    )  # fmt: skip
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
        ensemble: Of all its uploads, in their order, with any combiner.

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
        answers: The members' logits on noise [M, P, C].
    """
    sizes = fill_sizes(uploads)
    sizes = cap_at_median(sizes) if options.cap_examples else sizes
    reported = [upload.label_counts for upload in uploads]
    if options.counts == "uniform":
        shares = torch.full((len(uploads), job.num_classes), 1 / job.num_classes)
        return sizes[:, None] * shares
    claimed = normalize_rows(torch.tensor([row or (0,) * job.num_classes for row in reported]).double())
    silent = torch.tensor([not row or not sum(row) for row in reported])
    if options.counts == "auto" and not bool(silent.any()):
        return (sizes[:, None] * claimed).float()
    # With "auto" only clients without label counts are estimated.
    asked = silent if options.counts == "auto" else torch.ones_like(silent)
    found = claimed.clone()
    found[asked] = estimate_shares(
        job, answers[asked], [u for u, one in zip(uploads, asked, strict=True) if one], options
    )
    if options.counts == "tempered":
        found = torch.where(silent[:, None], found, geometric_mean(claimed, found))
    return (sizes[:, None] * found).float()


def estimate_shares(job: Job, answers: Tensor, uploads: Sequence[Upload], options: TallyPoolOptions) -> Tensor:
    """Return the share of each class among a client's examples, estimated from its model [M, C]."""
    shares = response_shares(answers)
    if options.counts != "noise":
        rows = row_shares(row_norms(uploads, job.builders, job.num_classes))
        shares = rows if options.counts == "rows" else geometric_mean(shares, rows)
    # Divided by the largest, so that a high power does not underflow for all classes.
    return normalize_rows((shares / shares.amax(1, keepdim=True)) ** options.sharpness)


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
            model = build_module(builders[upload.architecture])
            try:
                keys[upload.architecture], _ = head_keys(model, classes)
            except OptionError as error:
                raise OptionError(
                    f"class counts of {upload.client!r} ({upload.architecture}) are estimated from its last layer, and "
                    f"{error}; or have the client upload label counts, or set tally.counts=noise"
                ) from error
        norms.append(torch.linalg.vector_norm(upload.read()[keys[upload.architecture]].double(), dim=1))
    return torch.stack(norms)


def fill_sizes(uploads: Sequence[Upload]) -> Tensor:
    """Return the clients' numbers of examples [M]; one that is not reported counts as the median of the others."""
    sizes = [sum(u.label_counts or ()) or None if u.num_examples is None else u.num_examples for u in uploads]
    known = [float(size) for size in sizes if size]
    usual = float(torch.tensor(known).median()) if known else 1.0
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

    Raises:
        OptionError: The examples are no images.
    """
    if not holds_images(job.input_shape):
        raise OptionError(
            f"{key} is {TEACHER.name!r}, and the examples' shape is {tuple(job.input_shape)}: must be "
            "images, because it runs the clients' models on noise"
        )


TEACHER = Teacher("tally", build_tally_teacher, check_images)
