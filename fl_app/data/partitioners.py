"""The partitioners of the papers: how a training set is divided among clients; plain numpy, no config.

Papers:
    Co-Boosting: Dai et al., Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting, ICLR 2024,
        arXiv:2402.15070.
    DENSE: Zhang et al., DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022, arXiv:2112.12371.
    FLBoost, called FedFTG in its code: Zhang et al., Fine-Tuning Global Model via Data-Free Knowledge Distillation for
        Non-IID Federated Learning, CVPR 2022, arXiv:2203.09249.
    FENS: Allouah et al., Revisiting Ensembling in One-Shot Federated Learning, NeurIPS 2024, arXiv:2411.07182.
    FedOV: Diao et al., Towards Addressing Label Skews in One-Shot Federated Learning, ICLR 2023.
    IntactOFL: Zeng et al., One-shot-but-not-degraded Federated Learning, ACM MM 2024, published code.
Symbols: N examples, n clients, C classes, p_k the class prior of client k, m_k its size.
Common arguments: ``by_class`` holds, for each class, the positions of its examples in data set order. Each
returns the positions of each client's examples; none but :func:`overlapping` gives one twice.
Deviations: the fill loop of Co-Boosting's released code rejects draws and may never end; :func:`fill` draws directly
from the same distribution. Flower Datasets has partitioners of the same family with other minimum, cap and size rules,
so they are written out here.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from strategies.core.errors import DataError

Positions = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

MAX_TRIES = 10_000
_log = logging.getLogger(__name__)


def iid(by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator) -> list[Positions]:
    """Divide a random permutation evenly; sizes differ by at most one."""
    return np.array_split(rng.permutation(np.concatenate(by_class)), num_clients)


def dirichlet_over_classes(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, alpha: float, sigma: float
) -> list[Positions]:
    """Co-Boosting's: every client draws a class prior p_k ~ Dir(alpha 1_C) and is filled up to its size from it.

    The text says otherwise, but its Dirichlet is over the classes of a client, not over the clients of a class. A
    client that is filled late gets the remaining examples, even of classes that its prior hardly holds.

    Args:
        by_class: The positions of each class [C].
        num_clients: n.
        alpha: Concentration; the smaller, the fewer classes per client.
        sigma: Spread of the log-normal sizes; 0 for equal sizes.
    """
    sizes = client_sizes(sum(map(len, by_class)), num_clients, rng, sigma=sigma)
    priors = rng.dirichlet(np.full(len(by_class), alpha), size=num_clients)
    return fill(by_class, sizes, rng, priors=priors)


def dirichlet_over_classes_shuffled(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, alpha: float, sigma: float
) -> list[Positions]:
    """FLBoost's: as Co-Boosting's, but each class is shuffled first, and the first client gets what rounding leaves."""
    shuffled = [rng.permutation(positions) for positions in by_class]
    total = sum(map(len, by_class))
    sizes = client_sizes(total, num_clients, rng, sigma=sigma)
    sizes[0] += total - sizes.sum()
    priors = rng.dirichlet(np.full(len(by_class), alpha), size=num_clients)
    return fill(shuffled, sizes, rng, priors=priors)


def client_sizes(total: int, num_clients: int, rng: np.random.Generator, *, sigma: float) -> Positions:
    """Draw Co-Boosting's client sizes: m_k = int(v_k / sum(v) * N), v_k ~ LogNormal(log(N/n), sigma).

    Returns:
        Sizes [n]; their sum is N or, by rounding, up to n - 1 less.
    """
    if sigma == 0:
        return np.full(num_clients, total // num_clients, dtype=np.int64)
    volumes = rng.lognormal(mean=np.log(total / num_clients), sigma=sigma, size=num_clients)
    shares: Reals = volumes / volumes.sum()
    return (shares * total).astype(np.int64)


def fill(
    by_class: Sequence[Positions], sizes: Positions, rng: np.random.Generator, *, priors: Reals, foreign: bool = True
) -> list[Positions]:
    """Give out examples one by one: draw a client with room, then a class by its prior, and give its last example.

    The released loop draws the class again while the class is exhausted. That equals a draw from the prior
    renormalised over the remaining classes. This function draws from that directly, so a prior with almost no mass
    there costs no time.

    Args:
        by_class: The positions of each class [C].
        sizes: How many examples each client takes [n].
        priors: Class priors [n, C], non-negative.
        foreign: Whether a client whose prior has no mass on the remaining classes takes from them uniformly;
            otherwise it takes no more.
    """
    left = [len(positions) for positions in by_class]
    room = sizes.tolist()
    parts: list[list[int]] = [[] for _ in room]
    waiting = [client for client, places in enumerate(room) if places]
    cumulated = _cumulate(priors, left, foreign)
    # Two uniform numbers per turn. A turn without an example happens only when a client drops out.
    for pick, where in rng.random((sum(room) + len(room), 2)).tolist():
        if not waiting:
            break
        slot = int(pick * len(waiting))
        client = waiting[slot]
        if cumulated[client][-1] == 0:
            waiting[slot] = waiting[-1]
            waiting.pop()
            continue
        label = bisect_right(cumulated[client], where)
        left[label] -= 1
        parts[client].append(int(by_class[label][left[label]]))
        if len(parts[client]) == room[client]:
            waiting[slot] = waiting[-1]
            waiting.pop()
        if left[label] == 0:
            cumulated = _cumulate(priors, left, foreign)
    return [np.array(part, dtype=np.int64) for part in parts]


def _cumulate(priors: Reals, left: Sequence[int], foreign: bool) -> list[list[float]]:
    """Return the cumulated priors over the remaining classes; a row without mass is all zeros, or uniform."""
    open_classes = np.array(left) > 0
    mass = np.where(open_classes, priors, 0.0)
    if foreign:
        mass[mass.sum(axis=1) == 0] = open_classes
    sums = mass.cumsum(axis=1)
    # The last column, divided by itself, is exactly 1, so a number below 1 always falls on a class with mass.
    rows: list[list[float]] = np.divide(sums, sums[:, -1:], out=np.zeros_like(sums), where=sums[:, -1:] > 0).tolist()
    return rows


def dirichlet_over_clients(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, alpha: float, min_size: int
) -> list[Positions]:
    """DENSE's (and FENS's): every class is divided by q ~ Dir(alpha 1_n); clients of average size get no more.

    The division is drawn again until the smallest client holds ``min_size`` examples (10 in DENSE, C in FENS).

    Args:
        by_class: The positions of each class [C].
        num_clients: n.
        alpha: Concentration; the smaller, the more of a class is held by one client.
        min_size: Smallest accepted client.

    Raises:
        DataError: No division of :data:`MAX_TRIES` was accepted.
    """
    class_sizes = [len(positions) for positions in by_class]
    smallest = 0
    for _ in range(MAX_TRIES):
        # Shuffles and proportions are independent, so the examples are shuffled once a division is accepted.
        cuts = class_cuts(class_sizes, num_clients, lambda: rng.dirichlet(np.full(num_clients, alpha)))
        found = int(np.diff(cuts, axis=1).sum(axis=0).min())
        if found >= min_size:
            pieces = [np.split(rng.permutation(p), c[1:-1]) for p, c in zip(by_class, cuts, strict=True)]
            return [rng.permutation(np.concatenate(held)) for held in zip(*pieces, strict=True)]
        smallest = max(smallest, found)
    raise DataError(
        f"setting 'data.min-size' is {min_size}: none of {MAX_TRIES} divisions of {sum(class_sizes)} examples among "
        f"{num_clients} clients with 'data.alpha' {alpha} reached it. The best left a client with {smallest}; set a "
        "smaller minimum, a larger alpha or fewer clients"
    )


def overlapping(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, alpha: float, copies: float
) -> list[Positions]:
    """IntactOFL's: of every class each client draws its share from the whole class, so that clients overlap.

    Its shares are p ~ Dir(alpha 1_n), as in FAFI's code too. Figures under it compare with no others.

    Args:
        by_class: The positions of each class [C].
        num_clients: n.
        alpha: Concentration; the smaller, the fewer clients of a class.
        copies: How often a class is handed out, before shares above 1 / copies are cut at the whole class.
    """
    parts: list[list[Positions]] = [[] for _ in range(num_clients)]
    for positions in by_class:
        sizes = overlapping_sizes(len(positions), rng.dirichlet(np.full(num_clients, alpha)), copies)
        for part, size in zip(parts, sizes, strict=True):
            part.append(rng.choice(positions, size, replace=False))
    return [np.concatenate(part) for part in parts]


def overlapping_sizes(count: int, shares: Reals, copies: float) -> Positions:
    """Return ``min(count, round(copies count p_k))`` [n] for the shares p [n] of a class of ``count`` examples."""
    return np.minimum(count, np.rint(copies * count * shares)).astype(np.int64)


def class_cuts(class_sizes: Sequence[int], num_clients: int, draw: Callable[[], Reals]) -> Positions:
    """Choose where DENSE's partitioner cuts each class.

    Args:
        class_sizes: Examples of each class [C].
        num_clients: n.
        draw: Returns the proportions q [n] of the next class.

    Returns:
        Borders [C, n + 1]: client j gets the examples from border j to border j + 1 of the shuffled class.
    """
    held = np.zeros(num_clients, dtype=np.int64)
    cuts = np.zeros((len(class_sizes), num_clients + 1), dtype=np.int64)
    average = sum(class_sizes) / num_clients
    for row, size in zip(cuts, class_sizes, strict=True):
        below = held < average
        share = np.where(below, draw(), 0.0)
        # All mass on full clients (it underflows at a small alpha): those with room share equally, as Co-Boosting does.
        share = share / share.sum() if share.sum() > 0 else below / max(below.sum(), 1)
        row[1:] = np.floor(share.cumsum() * size)
        row[-1] = size
        held += np.diff(row)
    return cuts


def some_classes(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, classes_per_client: int
) -> list[Positions]:
    """FedOV's ``label_k``, which Co-Boosting cites: client i holds class i mod C and others, without repetition.

    Every class is shuffled and divided evenly among its holders. A class without a holder, possible only for n < C, is
    left out and logged.
    """
    num_classes = len(by_class)
    holders: list[list[int]] = [[] for _ in by_class]
    for client in range(num_clients):
        own = client % num_classes
        others = rng.choice(num_classes - 1, size=classes_per_client - 1, replace=False)
        for label in [own, *(others + (others >= own)).tolist()]:
            holders[label].append(client)
    parts: list[list[Positions]] = [[] for _ in range(num_clients)]
    for positions, clients in zip(by_class, holders, strict=True):
        pieces = np.array_split(rng.permutation(positions), max(len(clients), 1))
        # Not strict: the one piece of a class without a holder is dropped.
        for client, piece in zip(clients, pieces, strict=False):
            parts[client].append(piece)
    if absent := [label for label, clients in enumerate(holders) if not clients]:
        _log.warning("no client holds the classes %s: %d clients do not cover them", absent, num_clients)
    return [np.concatenate(held) for held in parts]


def some_classes_equal_sizes(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, classes_per_client: int
) -> list[Positions]:
    """Co-Boosting's released variant: equal sizes, filled uniformly from each client's own classes.

    The classes of client i are (classes_per_client * i + j) mod C for n <= 5, and random otherwise. A client whose
    classes are used up gets no more (the released loop never ends there). The examples left over are logged.
    """
    num_classes, total = len(by_class), sum(map(len, by_class))
    priors = np.zeros((num_clients, num_classes))
    for client in range(num_clients):
        if num_clients <= 5:
            own = (classes_per_client * client + np.arange(classes_per_client)) % num_classes
        else:
            own = rng.choice(num_classes, size=classes_per_client, replace=False)
        priors[client, own] = 1 / classes_per_client
    sizes = np.full(num_clients, total // num_clients)
    parts = fill(by_class, sizes, rng, priors=priors, foreign=False)
    if rest := total - sum(map(len, parts)):
        _log.warning("%d of %d examples are held by no client", rest, total)
    return parts


def weighted_draws(
    by_class: Sequence[Positions], num_clients: int, rng: np.random.Generator, *, alpha: float
) -> list[Positions]:
    """FedFTG's published preparation: clients draw N/n examples in turn, weighted by p_i[label]; the last has the rest.

    If fewer than N/n examples have a weight, a client takes all of them and draws the others uniformly.
    """
    labels = np.repeat(np.arange(len(by_class)), [len(positions) for positions in by_class])
    positions = np.concatenate(by_class)
    share = len(positions) // num_clients
    parts: list[Positions] = []
    for _ in range(num_clients - 1):
        weights = rng.dirichlet(np.full(len(by_class), alpha))[labels]
        # The examples with the smallest exponential times of rate w are a weighted draw without replacement. Those
        # of weight 0 come last, in uniform order.
        times = rng.exponential(size=len(labels))
        with np.errstate(divide="ignore"):
            keys = np.log(times) - np.log(weights)
        order = np.lexsort((times, keys))
        parts.append(positions[order[:share]])
        kept = np.sort(order[share:])
        labels, positions = labels[kept], positions[kept]
    return [*parts, positions]
