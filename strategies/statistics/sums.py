"""Sums over the features of labelled examples: a client uploads them in place of a model.

The sums of a union of disjoint sets are the sum of theirs. So a head that is solved from them does not depend on how
the examples are divided over clients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ..core.seeds import derive_seed

RESIDUE = 1e-12  # of all examples: below this a class's count is rounding error


@dataclass(frozen=True)
class Statistics:
    """Sums over N examples with features f in R^d and labels of C classes, in float64.

    Attributes:
        counts: n_c, examples per class [C].
        sums: S, the sum of features per class [C, d].
        gram: G = sum f f^T [d, d], symmetric and not centred.
        excess: sum w - sum w^2 per class over the examples' weights w [C], by which ``counts`` exceeds the sum of their
            squares; a zero without dimension where every example weighs 1.
    """

    counts: Tensor
    sums: Tensor
    gram: Tensor
    excess: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @classmethod
    def zeros(cls, classes: int, features: int) -> Statistics:
        """Return the statistics of no example."""
        return cls(_zeros(classes), _zeros(classes, features), _zeros(features, features))

    @classmethod
    def of(cls, batches: Iterable[tuple[Tensor, Tensor]], classes: int, features: int) -> Statistics:
        """Add up batches in one pass.

        Args:
            batches: Features [B, d] of any float type and labels [B], int64 from 0 to C - 1.
            classes: C.
            features: d.
        """
        total = cls.zeros(classes, features)
        for rows, labels in batches:
            total.include(rows, labels)
        return total

    def include(self, rows: Tensor, labels: Tensor) -> None:
        """Add a batch in place: features [B, d] of any float type with labels [B]."""
        precise = rows.to(torch.float64)
        self.counts.add_(torch.bincount(labels, minlength=self.classes))
        self.sums.index_add_(0, labels, precise)
        if precise.requires_grad:
            self.gram.addmm_(precise.T, precise)
        else:  # numpy computes one triangle of the product alone, in half the time
            array = precise.numpy()
            self.gram.add_(torch.from_numpy(array.T @ array))

    @classmethod
    def total(cls, parts: Iterable[Statistics]) -> Statistics:
        """Add up at least one part, in the order given, in the memory of two.

        Raises:
            ValueError: There is no part.
        """
        whole: Statistics | None = None
        for part in parts:
            if whole is None:
                whole = cls(part.counts.clone(), part.sums.clone(), part.gram.clone(), part.excess)
                continue
            whole.counts.add_(part.counts)
            whole.sums.add_(part.sums)
            whole.gram.add_(part.gram)
            whole = replace(whole, excess=whole.excess + part.excess)
        if whole is None:
            raise ValueError("no statistics to add up: must be at least one part")
        return whole

    def __sub__(self, other: Statistics) -> Statistics:
        """Return the statistics without those of a subset; exact but for rounding."""
        excess = self.excess - other.excess
        return Statistics(self.counts - other.counts, self.sums - other.sums, self.gram - other.gram, excess)

    def scaled(self, factor: float) -> Statistics:
        """Return the statistics with every example weighted by a factor."""
        excess = factor * self.counts - factor**2 * (self.counts - self.excess)
        return Statistics(self.counts * factor, self.sums * factor, self.gram * factor, excess)

    @property
    def examples(self) -> float:
        """N; a whole number where no noise was added."""
        return float(self.counts.sum())

    @property
    def classes(self) -> int:
        """C."""
        return self.sums.shape[0]

    @property
    def features(self) -> int:
        """The number d of features."""
        return self.sums.shape[1]

    @property
    def seen(self) -> Tensor:
        """Whether there are examples of each class [C], which a weight may make less than one."""
        return self.counts > RESIDUE * self.examples

    @property
    def freedom(self) -> float:
        """The expectation of S_w in units of a class's covariance: N - C, and N - sum_c sum w^2 / n_c with weights."""
        shares = (self.counts - self.excess) / torch.where(self.seen, self.counts, 1.0)
        return self.examples - float(shares[self.seen].sum())

    @property
    def mean(self) -> Tensor:
        """The mean feature m = s / N [d]."""
        return self.sums.sum(0) / self.examples

    @property
    def class_means(self) -> Tensor:
        """The mean feature of every class mu_c [C, d]; the mean feature m for a class without examples."""
        return torch.where(self.seen[:, None], self._means, self.mean)

    @property
    def scatter(self) -> Tensor:
        """The scatter around the mean A = G - N m m^T [d, d]."""
        return self.gram - self.examples * torch.outer(self.mean, self.mean)

    @property
    def scatter_within(self) -> Tensor:
        """The scatter around the class means S_w = G - sum_c n_c mu_c mu_c^T [d, d]."""
        return self.gram - (self.sums.T @ self._means)

    @property
    def _means(self) -> Tensor:
        """The mean feature of every class [C, d]; zero, but for rounding, for a class without examples."""
        return self.sums / torch.where(self.seen, self.counts, 1.0)[:, None]


def to_arrays(statistics: Statistics) -> dict[str, Tensor]:
    """Return statistics as they travel: ``counts``, ``sums`` and the upper triangle of the Gram matrix, ``gram``.

    Returns:
        ``counts`` is float64 [C], exact for whole numbers; ``sums`` float32 [C, d]; ``gram`` float32 [d (d + 1) / 2],
        row by row.
    """
    rows, columns = _upper(statistics.features)
    return {
        "counts": statistics.counts.clone(),
        "sums": statistics.sums.to(torch.float32),
        "gram": statistics.gram[rows, columns].to(torch.float32),
    }


def from_arrays(arrays: Mapping[str, Tensor]) -> Statistics:
    """Return the statistics that :func:`to_arrays` wrote; the shapes have been checked before."""
    features = arrays["sums"].shape[1]
    rows, columns = _upper(features)
    gram = _zeros(features, features)
    gram[rows, columns] = arrays["gram"].to(torch.float64)
    gram[columns, rows] = gram[rows, columns]
    return Statistics(arrays["counts"].to(torch.float64), arrays["sums"].to(torch.float64), gram)


def merge_sums(uploads: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the upload of a node that adds up the uploads of its own clients.

    It passes the checks of an upload and leads to the same head. To the server the node is one client: one fold in the
    choice of the penalty, and one name to forget. Each upload of a private run has its budget's noise, so that a sum of
    several is not one.

    Args:
        uploads: At least one, of the same feature function: ``counts``, ``sums``, ``noise``, ``fingerprint``,
            ``probe``, and ``gram``, ``squares`` or both.

    Returns:
        The same arrays; the probe is the first upload's.

    Raises:
        ValueError: The arrays or the fingerprints differ, there is noise, or there is no upload.
    """
    total, of = dict[str, Tensor](), dict[str, Tensor]()
    for arrays in uploads:
        own = {key: value.double() for key, value in arrays.items() if key not in ("noise", "fingerprint", "probe")}
        total, of = total or dict.fromkeys(own, _zeros(1)), of or {key: arrays[key] for key in ("fingerprint", "probe")}
        if own.keys() != total.keys() or not torch.equal(of["fingerprint"], arrays["fingerprint"]):
            raise ValueError("the uploads differ in arrays or fingerprints: must be sums of one feature function")
        if bool(arrays["noise"].any()):
            raise ValueError(
                f"an upload has noise of {float(arrays['noise']):.6g}: must be 0, for a server refuses more"
            )
        total = {key: total[key] + value for key, value in own.items()}
    if not total:
        raise ValueError("no uploads to add up: must be at least one")
    rounded = {key: value if key == "counts" else value.to(torch.float32) for key, value in total.items()}
    return {**rounded, "noise": torch.zeros(1, dtype=torch.float64), **of}


def projection(features: int, kept: int, seed: int) -> Tensor:
    """Return P [d, e] with orthonormal columns, the same for a seed on every machine.

    A Gaussian matrix of numpy's PCG64 in float64, orthonormalised by QR. R's diagonal is made positive, for QR alone
    is not unique.

    Args:
        features: d.
        kept: e, from 1 to d.

    Raises:
        ValueError: ``kept`` is out of its range.
    """
    if not 1 <= kept <= features:
        raise ValueError(f"features to keep are {kept}: must be 1 to {features}")
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "features", "projection")))
    basis, triangle = np.linalg.qr(rng.standard_normal((features, kept)))
    return torch.from_numpy(basis * np.sign(np.diag(triangle)))


@functools.lru_cache(maxsize=4)
def _upper(features: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the upper triangle; the server reads thousands of uploads of one width."""
    # On the CPU even where only the form of a model is read: on the device "meta" indices have no values to keep.
    rows, columns = torch.triu_indices(features, features, device="cpu")
    return rows, columns


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
