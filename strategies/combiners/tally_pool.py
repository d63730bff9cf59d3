"""Tally's combination of a job's uploads: who knows which class is told by label counts, or read off the models.

See :mod:`strategies.tally`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.errors import OptionError, UploadError
from ..core.options import option
from ..core.seeds import generator, seeded_torch
from ..teacher.augment import Standardize
from ..teacher.heads import head_keys
from . import class_counts
from .agreement import agreeing
from .noise import noise_batches
from .opinion_pools import RULES, SMOOTHING, OpinionPool

if TYPE_CHECKING:
    from ..method import Job, ModelBuilder, Upload
    from ..teacher.ensemble import Ensemble

COUNTS = ("auto", "noise-rows", "noise", "rows", "tempered", "uniform")
READ_OFF_ROWS = ("noise-rows", "rows", "tempered")  # whatever a client tells
BATCH = 256  # probes in one forward pass
LARGEST_LOGIT = 1e15  # whose square, and sums of many, are finite in float32


@dataclass(frozen=True)
class TallyPoolOptions:
    """How the uploads are combined."""

    counts: str = option(
        "auto",
        "examples per class of a client: auto: as uploaded, of a silent client noise-rows; noise: from its answers to "
        "noise; rows: from its last layer; noise-rows: from both; tempered: uploaded and noise-rows, their geometric "
        "mean; uniform: alike in all classes",
        choices=COUNTS,
    )
    sharpness: float = option(2.0, "power that a client's estimated class shares are raised to", above=0.0)
    rule: str = option("log", "opinion pool: logarithmic or linear", choices=tuple(RULES))
    calibrated: bool = option(True, "beside the pool count the logits themselves, as large as others' on noise")
    temperature: float = option(1.0, "temperature T of a client's opinion", above=0.0)
    smoothing: float = option(
        SMOOTHING, "a: examples added to every class of a client, as a share of all that it has", above=0.0
    )
    probes: int = option(1024, "noise images that the clients' answers are counted on", low=1)
    cap_examples: bool = option(False, "no client counts for more examples than the median client")
    agreement: float = option(
        0.0,
        "a client is left out that agrees with the others, on noise, less than this share of what they agree among "
        "themselves, where they do; 0: nobody is; 0.3 was measured",
        low=0.0,
        high=1.0,
    )


def fitted_pool(job: Job, ensemble: Ensemble, options: TallyPoolOptions) -> OpinionPool:
    """Return Tally's combiner of a job's uploads.

    Args:
        job: Its uploads, seed, input space, device and builders.
        ensemble: Of all its uploads, in their order, under any combiner.
        options: How.

    Returns:
        The pool, where the job's device is. Clients have weight 0 that are left out, because they do not agree with the
        others, or answer noise with a logit that is not finite or beyond ``LARGEST_LOGIT``; else 1.

    Raises:
        UploadError: That is all of them; or the others have no examples.
    """
    answers = probed(job, ensemble, options.probes)
    keep = (answers.abs() <= LARGEST_LOGIT).all(2).all(1)  # NaN is not
    if not bool(keep.any()):
        raise UploadError(
            f"no client's model answers noise with finite logits up to {LARGEST_LOGIT:.0e}: nothing to combine"
        )
    if options.agreement > 0:
        keep[keep.clone()] = agreeing(answers[keep], options.agreement)
    counts = examples_per_class(job, answers, job.uploads, options)
    if not bool(counts[keep].any()):
        raise UploadError("no client whose model can be asked was trained on an example: nothing to combine")
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
    """Return the examples n_k^c of every class that members are taken to have learned from, float32 [M, C].

    Args:
        job: Its classes and builders.
        answers: The members' logits on noise [M, P, C].
        uploads: The members, in their order.
        options: How.
    """
    sizes = known_sizes(uploads)
    sizes = class_counts.capped(sizes) if options.cap_examples else sizes
    told = [upload.label_counts for upload in uploads]
    if options.counts == "uniform":
        shares = torch.full((len(uploads), job.num_classes), 1 / job.num_classes)
        return sizes[:, None] * shares
    claimed = class_counts.normalised(torch.tensor([row or (0,) * job.num_classes for row in told]).double())
    silent = torch.tensor([not row or not sum(row) for row in told])
    if options.counts == "auto" and not bool(silent.any()):
        return (sizes[:, None] * claimed).float()
    # Nobody's model is asked for what its client has told.
    asked = silent if options.counts == "auto" else torch.ones_like(silent)
    found = claimed.clone()
    found[asked] = estimated_shares(
        job, answers[asked], [u for u, one in zip(uploads, asked, strict=True) if one], options
    )
    if options.counts == "tempered":
        found = torch.where(silent[:, None], found, class_counts.geometric_mean(claimed, found))
    return (sizes[:, None] * found).float()


def estimated_shares(job: Job, answers: Tensor, uploads: Sequence[Upload], options: TallyPoolOptions) -> Tensor:
    """Return the share of each class among a client's examples as its model shows it [M, C]."""
    shares = class_counts.response_shares(answers)
    if options.counts != "noise":
        rows = class_counts.row_shares(row_norms(uploads, job.builders, job.num_classes))
        shares = rows if options.counts == "rows" else class_counts.geometric_mean(shares, rows)
    # By the largest: a great power must not make all of them 0.
    return class_counts.normalised((shares / shares.amax(1, keepdim=True)) ** options.sharpness)


@torch.no_grad()
def probed(job: Job, ensemble: Ensemble, count: int) -> Tensor:
    """Return the members' logits [M, count, C] on noise, on the CPU."""
    standardize = Standardize(job.normalization)
    batches = noise_batches(count, job.input_shape, generator(job.seed, "tally", "probes"))
    parts = (standardize(part) for batch in batches for part in torch.split(batch, BATCH))
    return torch.cat([ensemble.member_logits(part.to(job.device)).float().cpu() for part in parts], dim=1)


def row_norms(uploads: Sequence[Upload], builders: Mapping[str, ModelBuilder], classes: int) -> Tensor:
    """Return the Euclidean norms of the rows of the members' last linear layers [M, C].

    Raises:
        OptionError: A model has no such layer, or one of other than C outputs.
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
                    f"class counts of {upload.client!r} ({upload.architecture}) are read off its last layer, and "
                    f"{error}; else label counts from the client, or tally.counts=noise"
                ) from error
        norms.append(torch.linalg.vector_norm(upload.read()[keys[upload.architecture]].double(), dim=1))
    return torch.stack(norms)


def known_sizes(uploads: Sequence[Upload]) -> Tensor:
    """Return the clients' numbers of examples [M]; a client that does not tell counts as the median of the others."""
    sizes = [sum(u.label_counts or ()) or None if u.num_examples is None else u.num_examples for u in uploads]
    told = [float(size) for size in sizes if size]
    usual = float(torch.tensor(told).median()) if told else 1.0
    return torch.tensor([usual if size is None else float(size) for size in sizes])
