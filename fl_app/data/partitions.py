"""The division of a training set among clients: the settings, their checks, and one call.

The partitioners, with their sources, are in :mod:`fl_app.data.partitioners`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from strategies.core.errors import DataError, OptionError
from strategies.core.options import config_class, option
from strategies.core.seeds import derive_seed

from . import partitioners
from .partitioners import Positions

BY_DOMAIN = "domains"

COPIES = 10.0  # how often IntactOFL's and FAFI's partition hands a class out, as in their published code

# Name -> the partitioner, and the settings that it takes.
PARTITIONERS: Mapping[str, tuple[Callable[..., list[Positions]], tuple[str, ...]]] = {
    "dirichlet-classes": (partitioners.dirichlet_over_classes, ("alpha", "sigma")),
    "dirichlet-clients": (partitioners.dirichlet_over_clients, ("alpha", "min_size")),
    "dirichlet-overlap": (partial(partitioners.overlapping, copies=COPIES), ("alpha",)),
    "dirichlet-shuffled": (partitioners.dirichlet_over_classes_shuffled, ("alpha", "sigma")),
    "fedftg-weighted": (partitioners.weighted_draws, ("alpha",)),
    "lognormal": (partitioners.dirichlet_over_classes, ("alpha", "sigma")),
    "classes": (partitioners.some_classes, ("classes_per_client",)),
    "classes-equal-size": (partitioners.some_classes_equal_sizes, ("classes_per_client",)),
    "iid": (partitioners.iid, ()),
    # Co-Boosting's feature shift (Tables 13 and 14), and FLamby's natural centres: client k holds domain k. It gets the
    # positions of each domain, not of each class.
    BY_DOMAIN: (lambda by_domain, num_clients, rng: list(by_domain), ()),  # noqa: ARG005  one signature for all
}


@config_class("data")
class PartitionSpec:
    """The partitioner with its settings; it ignores those that it does not use."""

    partition: str = option(
        "dirichlet-classes",
        "how the training set is divided: Dirichlet over a client's classes or a class's clients, IntactOFL's "
        "overlapping clients, FLBoost's two variants, log-normal sizes, classes per client (FedOV's or Co-Boosting's), "
        "IID, or one domain per client",
        choices=tuple(PARTITIONERS),
    )
    alpha: float = option(0.3, "concentration of the Dirichlet partitioners; smaller is more skewed", above=0.0)
    classes_per_client: int = option(2, "classes per client of 'classes' and 'classes-equal-size'", low=1)
    sigma: float = option(
        0.0,
        "sigma of the log-normal sizes of 'dirichlet-classes', 'dirichlet-shuffled' and 'lognormal'; 0 = equal sizes",
        low=0.0,
        high=20.0,
    )
    min_size: int = option(10, "examples of the smallest client under 'dirichlet-clients' (DENSE: 10)", low=1)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            OptionError: A value is out of range.
        """
        if self.partition == "lognormal" and self.sigma == 0:
            raise OptionError(
                "setting 'data.sigma' is 0.0: must be greater than 0 where 'data.partition' is 'lognormal'"
            )


def partition(
    labels: npt.NDArray[np.integer],
    spec: PartitionSpec,
    *,
    num_clients: int,
    num_classes: int,
    seed: int,
    domains: npt.NDArray[np.integer] | None = None,
) -> list[Positions]:
    """Divide a training set among clients.

    Args:
        labels: The class of each example [N], in 0 .. C - 1.
        num_clients: n, at least 1.
        seed: The run's seed; equal arguments give equal parts.
        domains: The domain of each example [N], from 0; None for a set without domains.

    Returns:
        The positions of each client's examples, n arrays of int64, never empty; they share no position but under the
        partitioner 'dirichlet-overlap'.

    Raises:
        DataError: The examples cannot be divided so, or a label is not a class.
        OptionError: A setting does not fit the number of classes, clients or examples.
    """
    labels = np.asarray(labels)
    check_request(labels, spec, num_clients=num_clients, num_classes=num_classes, domains=domains)
    rng = np.random.default_rng(derive_seed(seed, "partition"))
    kinds, count = (labels, num_classes) if spec.partition != BY_DOMAIN or domains is None else (domains, num_clients)
    groups = [np.flatnonzero(kinds == kind) for kind in range(count)]
    divide, settings = PARTITIONERS[spec.partition]
    parts = divide(groups, num_clients, rng, **{name: getattr(spec, name) for name in settings})
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(
                f"partition {client} of {num_clients} has no example under 'data.partition' {spec.partition!r}: set "
                "fewer clients or a less skewed division"
            )
    return parts


def check_request(
    labels: npt.NDArray[np.integer],
    spec: PartitionSpec,
    *,
    num_clients: int,
    num_classes: int,
    domains: npt.NDArray[np.integer] | None = None,
) -> None:
    """Check the arguments of :func:`partition` without drawing; the errors are the same."""
    total = len(labels)
    if not 1 <= num_clients <= total:
        raise DataError(f"{total} training examples for {num_clients} clients: must be 1 to {total} clients")
    if labels.min() < 0 or labels.max() >= num_classes:
        wrong = int(np.flatnonzero((labels < 0) | (labels >= num_classes))[0])
        raise DataError(f"label {labels[wrong]} of training example {wrong}: must be 0 to {num_classes - 1}")
    if spec.partition.startswith("classes") and spec.classes_per_client > num_classes:
        raise OptionError(
            f"setting 'data.classes-per-client' is {spec.classes_per_client}: must be at most {num_classes}, the "
            "number of classes"
        )
    if spec.partition == "dirichlet-clients" and spec.min_size * num_clients > total:
        raise OptionError(
            f"setting 'data.min-size' is {spec.min_size}: must be at most {total // num_clients} where "
            f"{num_clients} clients share {total} examples"
        )
    if spec.partition == BY_DOMAIN:
        _check_domains(domains, num_clients)


def _check_domains(domains: npt.NDArray[np.integer] | None, num_clients: int) -> None:
    if domains is None:
        raise OptionError("setting 'data.partition' is 'domains': must be another one for a data set without domains")
    if num_clients != (found := len(np.unique(domains))):
        # A node without others does not tell the server how many holders its examples have.
        count = f"{found}, " if num_clients > 1 else ""
        raise OptionError(
            f"{num_clients} clients where 'data.partition' is 'domains': must be {count}one client for each domain "
            "that is not left out"
        )
