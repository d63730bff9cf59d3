"""The bounds that sums of features of norm 1 satisfy, whatever the examples are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core import refusals
from .moments import FeatureMoments
from .privacy import COUNT_WEIGHT, SUM_WEIGHT
from .sums import Statistics

SIX = 6.0  # deviations that honest noise does not exceed
ROUNDING = 1e-5  # per example; honest uploads in float32 have at most 2.4e-7


def check_counts(counts: Tensor) -> None:
    """Refuse counts [C] that are no numbers of examples.

    Raises:
        UploadError: One is negative or not whole, or all are zero.
    """
    if bool((counts < 0).any() or (counts != counts.round()).any()) or not float(counts.sum()) > 0:
        raise refusals.broken_rule(f"counts are {counts.tolist()!s:.80}", "whole numbers from 0 with a positive sum")


def check_sums(counts: Tensor, sums: Tensor) -> None:
    """Refuse sums [C, d] that are longer than their counts permit, or shorter than one example.

    Raises:
        UploadError: Names the class.
    """
    norms = sums.norm(dim=1)
    wrong = (norms > counts * (1 + ROUNDING)) | ((counts == 1) & ((norms - 1).abs() > ROUNDING))
    if bool(wrong.any()):
        raise refusals.broken_rule(
            f"sums of class {int(wrong.nonzero()[0])} have norm {float(norms[wrong][0]):.6g} for "
            f"{float(counts[wrong][0]):.0f} examples",
            "at most their number, and 1 for one example",
        )


def check_gram(found: Statistics) -> None:
    """Refuse a Gram matrix that no examples with these counts and sums have.

    The trace is N. No diagonal entry is negative. ``|G_ij| <= min(sqrt(G_ii G_jj), N / 2)``, because two features of a
    vector of norm 1 have a product of at most 1/2. The scatter within classes has no negative eigenvalue, and the rank
    is at most N.

    Raises:
        UploadError: Names the bound.
    """
    slack, diagonal = ROUNDING * found.examples, found.gram.diagonal()
    if abs(float(diagonal.sum()) - found.examples) > slack:
        raise refusals.broken_rule(
            f"gram has trace {float(diagonal.sum()):.6g} for {found.examples:.0f} examples",
            "their number, because every feature vector has norm 1",
        )
    if float(diagonal.min()) < -slack:
        raise refusals.broken_rule(
            f"gram has {float(diagonal.min()):.6g} on its diagonal, a sum of squares", "at least 0"
        )
    roots = diagonal.clamp_min(0.0).sqrt()
    over = found.gram.abs() - torch.outer(roots, roots).clamp_max(found.examples / 2.0)
    if float(over.fill_diagonal_(0.0).max()) > slack:
        row, column = divmod(int(over.argmax()), found.features)
        raise refusals.broken_rule(
            f"gram has {float(found.gram[row, column]):.6g} for features {row} and {column}",
            "at most half the number of examples, and the root of the product of their squares",
        )
    _check_spectrum(found, slack)


def check_squares(found: FeatureMoments) -> None:
    """Refuse squares that no examples with these counts and sums have.

    The squares of a class sum to n_c. By Cauchy and Schwarz ``Q_cj >= S_cj^2 / n_c``.

    Raises:
        UploadError: Names the class.
    """
    totals = found.squares.sum(1)
    off = (totals - found.counts).abs() - ROUNDING * found.counts
    if float(off.max()) > 0:
        wrong = int(off.argmax())
        raise refusals.broken_rule(
            f"squares of class {wrong} sum to {float(totals[wrong]):.6g} for {float(found.counts[wrong]):.0f} examples",
            "their number, because every feature vector has norm 1",
        )
    least = found.sums * found.means
    below = (least - found.squares).amax(1) - ROUNDING * found.counts
    if float(below.max()) > 0:
        raise refusals.broken_rule(
            f"squares of class {int(below.argmax())} are below the squared sums over the number of examples",
            "at least these for real examples",
        )


def check_diagonal(found: FeatureMoments, gram: Statistics) -> None:
    """Refuse squares that are not the diagonal of the Gram matrix of the same examples.

    Raises:
        UploadError: They differ.
    """
    apart = float((found.squares.sum(0) - gram.gram.diagonal()).abs().max())
    if apart > ROUNDING * gram.examples:
        raise refusals.broken_rule(f"squares differ from the diagonal of gram by {apart:.6g}", "of the same examples")


def check_non_negative(counts: Tensor, *sums: Tensor) -> None:
    """Refuse negative sums of features that a backbone's last activation keeps from being negative.

    Raises:
        UploadError: An entry is negative.
    """
    if min(float(part.min()) for part in sums) < -ROUNDING * float(counts.sum()):
        raise refusals.broken_rule(
            "sums or gram have negative entries", "at least 0, as every feature of this backbone is"
        )


def check_noisy(found: Statistics, sigma: float) -> None:
    """Refuse sums that the noise of a budget explains with a probability below 1e-8 per bound.

    A Gaussian number stays within six deviations, and the norm of d numbers within ``sqrt(d) + 6`` of them.
    The spectral norm of the noise on G stays within ``(sqrt(2 d) + 6) sigma``. Both follow from the concentration of
    Lipschitz functions.

    Raises:
        UploadError: Names the bound.
    """
    root, count = math.sqrt(found.features), sigma / COUNT_WEIGHT
    if float(found.counts.min()) < -SIX * count:
        raise refusals.beyond_noise(f"a count is {float(found.counts.min()):.6g}", f"at least {-SIX * count:.6g}")
    examples = found.examples + SIX * count * math.sqrt(found.classes)
    trace, slack = float(found.gram.diagonal().sum()), SIX * sigma * root
    if trace > examples + slack:
        raise refusals.beyond_noise(f"gram has trace {trace:.6g}", f"at most {examples + slack:.6g}")
    norms = found.sums.norm(dim=1)
    most = found.counts + SIX * count + (root + SIX) * sigma / SUM_WEIGHT
    if bool((norms > most).any()):
        wrong = int((norms - most).argmax())
        norm, bound = float(norms[wrong]), float(most[wrong])
        raise refusals.beyond_noise(f"sums of class {wrong} have norm {norm:.6g}", f"at most {bound:.6g}")
    edge = (math.sqrt(2.0) * root + SIX) * sigma
    least, *_, largest = torch.linalg.eigvalsh(found.gram).tolist()
    if least < -edge or largest > examples + edge:
        raise refusals.beyond_noise(
            f"gram has eigenvalues from {least:.6g} to {largest:.6g}", f"{-edge:.6g} to {examples + edge:.6g}"
        )


def _check_spectrum(found: Statistics, slack: float) -> None:
    # Rounding of d^2 entries to float32 moves an eigenvalue by at most the Frobenius norm of its errors.
    within = found.scatter_within
    # No eigenvalue is below -slack if the sum with slack I has a Cholesky factor, which takes a tenth of their time.
    if int(torch.linalg.cholesky_ex(within + slack * torch.eye(len(within), dtype=within.dtype)).info):
        least = float(torch.linalg.eigvalsh(within)[0])
        raise refusals.broken_rule(f"gram has eigenvalue {least:.6g} within classes", "at least 0 for real examples")
    if found.examples < found.features:
        extra = float(torch.linalg.eigvalsh(found.gram)[: found.features - int(found.examples)].clamp_min(0).sum())
        if extra > slack:
            raise refusals.broken_rule(
                "gram has a higher rank", f"at most {found.examples:.0f}, the number of its examples"
            )
