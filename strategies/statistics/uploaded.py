"""An upload of feature sums as a module of buffers, and the checks that it passes before it is stored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ..core import refusals
from ..core.errors import OptionError
from ..core.facts import GRAM, SQUARES, STATISTICS, State, UploadFacts, backbone_in, is_head, kind_of
from ..core.fingerprint import PROBE, check_fingerprint, probe_warning, short_fingerprint
from ..core.seeds import seeded_torch
from ..method import Job, ModelBuilder, Upload
from .bounds import check_counts, check_diagonal, check_gram, check_noisy, check_non_negative, check_squares, check_sums
from .choice import choose_penalty
from .heads import Head, Ridge
from .moments import FeatureMoments, moments_from_arrays, moments_to_arrays
from .sums import Statistics, from_arrays, to_arrays

MOST = 2**63  # examples; the sum of larger counts may be infinite


class FeatureSums(nn.Module):
    """The sums of one client as buffers: ``counts``, ``sums``, ``gram``, ``squares``, and those of every upload.

    Every upload has ``noise``, ``fingerprint`` and ``probe``, and ``gram`` or ``squares`` or both.

    Args:
        classes: C.
        features: d.
        fingerprint: The fields of the feature function, see :func:`..core.fingerprint.encode_fingerprint`.
        probe: Features of a fixed input [16], float32.
        non_negative: Whether no feature is negative.
        noise: sigma, the deviation of the noise that the run's budget demands on the diagonal of ``gram``; 0: none.
        second: The second moments that it holds: ``gram``, ``squares``, or both.
    """

    counts: Tensor
    fingerprint: Tensor
    probe: Tensor

    def __init__(
        self,
        classes: int,
        features: int,
        fingerprint: Tensor,
        probe: Tensor | None = None,
        *,
        non_negative: bool = False,
        noise: float = 0.0,
        second: Sequence[str] = (GRAM,),
    ) -> None:
        super().__init__()
        self.second = tuple(second)
        self._shape = classes, features
        for name, value in _arrays(self.empty()).items():
            self.register_buffer(name, value)
        self.register_buffer("noise", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("fingerprint", fingerprint.clone())
        self.register_buffer("probe", torch.zeros(PROBE) if probe is None else probe.clone())
        self._non_negative, self._noise = non_negative, noise

    def empty(self) -> list[Statistics | FeatureMoments]:
        """Return sums over no example, of each kind that :attr:`second` needs."""
        kinds: dict[str, type[Statistics] | type[FeatureMoments]] = {GRAM: Statistics, SQUARES: FeatureMoments}
        return [kinds[name].zeros(*self._shape) for name in self.second]

    def fill(self, *sums: Statistics | FeatureMoments, noise: float = 0.0) -> None:
        """Take sums over the same examples, one of each kind, and the deviation of the noise in them."""
        state = {**_arrays(sums), "noise": torch.tensor([noise], dtype=torch.float64)}
        self.load_state_dict({**state, "fingerprint": self.fingerprint, "probe": self.probe})

    def check_upload(self, state: Mapping[str, Tensor], num_examples: int | None = None) -> str:
        """Refuse sums of other features, and sums that no examples with features of norm 1 can have.

        Noisy sums keep the same bounds up to the noise that a run's budget demands, see :func:`.bounds.check_noisy`.

        Args:
            state: An upload whose names, shapes and types fit, and whose numbers are finite.
            num_examples: As the client reports them; None if it does not.

        Returns:
            A warning if its probe belongs to another function, else an empty text.

        Raises:
            UploadError: Names the bound that is broken.
        """
        check_fingerprint(state["fingerprint"], self.fingerprint)
        self._check_sums(state, num_examples)
        return probe_warning(state, self.probe)

    def _check_sums(self, state: Mapping[str, Tensor], num_examples: int | None) -> None:
        if not math.isclose(float(state["noise"]), self._noise, rel_tol=1e-9):
            reported = float(state["noise"])
            raise refusals.broken_rule(f"noise is {reported:.6g}", f"{self._noise:.6g}, that of the run's budget")
        _check_claim(state["counts"], num_examples)
        if self._noise and SQUARES in self.second:
            raise refusals.broken_rule(
                "squares carry no noise", "an upload of Gram matrices alone with a privacy budget"
            )
        if self._noise:
            check_noisy(from_arrays(state), self._noise)
            return
        counts, sums = state["counts"], state["sums"].double()
        check_counts(counts)
        check_sums(counts, sums)
        gram = from_arrays(state) if GRAM in self.second else None
        moments = moments_from_arrays(state) if SQUARES in self.second else None
        if gram is not None:
            check_gram(gram)
        if moments is not None:
            check_squares(moments)
        if gram is not None and moments is not None:
            check_diagonal(moments, gram)
        if self._non_negative:
            check_non_negative(counts, sums, *(() if gram is None else (gram.gram,)))


@dataclass(frozen=True)
class ClientSumsOnServer(Mapping[str, Statistics]):
    """The statistics of uploads by client, read anew at each access, so that one is in memory at a time.

    Attributes:
        uploads: In the order of client names.
        max_share: The largest share of all examples that one client may claim; 0: any.
    """

    uploads: Sequence[Upload]
    max_share: float = 0.0

    def __getitem__(self, client: str) -> Statistics:
        return from_arrays(self.arrays(client)).scaled(self.factors.get(client, 1.0))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(upload.client for upload in self.uploads))

    def __len__(self) -> int:
        return len(self.uploads)

    def arrays(self, client: str) -> State:
        """Return a client's upload as it was sent."""
        return self._by_client[client].read()

    @cached_property
    def _by_client(self) -> dict[str, Upload]:
        return {upload.client: upload for upload in self.uploads}

    @cached_property
    def factors(self) -> dict[str, float]:
        """The factor of each client whose claimed share of the examples exceeds the largest one."""
        if not self.max_share:
            return {}
        return cap_shares({u.client: examples_of(u.read()["counts"]) for u in self.uploads}, self.max_share)

    def noises(self) -> list[float]:
        """Return the deviation of the noise in every client's sums, which are scaled down with their noise."""
        return [float(upload.read()["noise"]) * self.factors.get(upload.client, 1.0) for upload in self.uploads]


def check_second(job: Job, method: str, name: str) -> None:
    """Refuse uploads without the second moments that a method needs; all uploads of a run have the same arrays.

    Args:
        job: Its uploads may be missing yet.
        name: ``gram`` or ``squares``.

    Raises:
        OptionError: The first upload lacks them.
    """
    if job.uploads and name not in job.uploads[0].read():
        raise OptionError(
            f"method {method!r} needs {name!r} in every upload, which {job.uploads[0].client} did not send: must be "
            "the uploads of a run with 'features.moments', or of a run of this method"
        )


def cap_shares(sizes: Mapping[str, float], share: float) -> dict[str, float]:
    """Return the factors that bring every claimed size to at most a share of the resulting total.

    Args:
        sizes: Client -> claimed number of examples, above 0.
        share: At least 1 / the number of clients, else all clients weigh the same.
    """
    left = dict(sizes)
    held: set[str] = set()
    while True:
        rest = sum(size for name, size in left.items() if name not in held)
        free = 1.0 - share * len(held)
        bound = share * rest / free if free > 0 and rest > 0 else min(sizes.values())
        above = {name for name, size in left.items() if name not in held and size > bound * (1 + 1e-9)}
        if not above or free <= 0:
            return {name: bound / sizes[name] for name in held} if held else {}
        held |= above


def examples_of(counts: Tensor) -> int:
    """Return the number of examples by counts [C], which may carry noise; at least 1."""
    return max(1, round(float(counts.sum())))


def _check_claim(counts: Tensor, num_examples: int | None) -> None:
    if not abs(total := float(counts.sum())) < MOST:
        raise refusals.broken_rule(f"counts sum to {total:.6g}", "below 2**63")
    if num_examples is not None and num_examples != examples_of(counts):
        raise refusals.broken_rule(f"counts sum to {total:.6g}, but num-examples is {num_examples}", "equal")


def _arrays(sums: Iterable[Statistics | FeatureMoments]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for part in sums:
        found |= moments_to_arrays(part) if isinstance(part, FeatureMoments) else to_arrays(part)
    return found


def head_state(job: Job, weight: Tensor, bias: Tensor) -> State:
    """Return a head as the weights of the job's student, a module with the linear layer ``head``, in float32.

    A student that has a ``fingerprint`` keeps its own, which is that of the uploads.
    """
    with seeded_torch(job.seed, "student"):
        own = job.builders[job.student]().state_dict()
    marked = {"fingerprint": own["fingerprint"]} if "fingerprint" in own else {}
    return {"head.weight": weight.to(torch.float32), "head.bias": bias.to(torch.float32), **marked}


# Mixed federations: the sums of all clients with one feature function become one member of an ensemble, a head.
#
# The head is ridge regression's, with lambda chosen by leaving its clients out. Scores of a regression are smaller than
# a net's logits, and an ensemble adds up both. So they are centred over the classes and scaled to the size of a net's.
# The other members see the head as one upload, with the summed examples of its clients.

# Root mean square of centred logits over a member's own examples: nets of 30 epochs have 5 to 7 on held-out digits.
SIZE = 5.0


def with_heads(job: Job, log: Callable[[str], None] = lambda _: None) -> Job:
    """Return the job in which the sums of each feature function are one upload, the head that they lead to.

    Raises:
        OptionError: Sums carry noise or have no Gram matrix, or no architecture is the head of their function.
    """
    groups: dict[bytes, list[Upload]] = {}
    for upload in job.uploads:
        if kind_of(upload.architecture) == STATISTICS:
            groups.setdefault(bytes(upload.read()["fingerprint"].tolist()), []).append(upload)
    if not groups:
        return job
    rest = [upload for upload in job.uploads if kind_of(upload.architecture) != STATISTICS]
    heads, taken = _heads_of(job.builders), {upload.client for upload in rest}
    for fingerprint, group in groups.items():
        if fingerprint not in heads:
            reported = short_fingerprint(torch.tensor(list(fingerprint), dtype=torch.uint8))
            raise OptionError(
                f"the sums of {group[0].client} have fingerprint {reported}: must be that of a head among the "
                "architectures"
            )
        member = _solve_group(group, heads[fingerprint], taken, seed=job.seed)
        taken.add(member.client)
        rest.append(member)
        log(f"{member.client} is one member of the ensemble, from the sums of {', '.join(one.client for one in group)}")
    return replace(job, uploads=tuple(sorted(rest, key=lambda upload: upload.client)))


def _heads_of(builders: Mapping[str, ModelBuilder]) -> dict[bytes, str]:
    """Return fingerprint -> the head's architecture."""
    found = {}
    for name in filter(is_head, builders):
        with seeded_torch(0, "fingerprint"):
            state = builders[name]().state_dict()
        found[bytes(state["fingerprint"].tolist())] = name
    return found


def _solve_group(group: list[Upload], architecture: str, taken: set[str], *, seed: int) -> Upload:
    clients = ClientSumsOnServer(group)
    if any(clients.noises()):
        raise OptionError(f"the sums of {group[0].client} carry noise: must be exact where they join an ensemble")
    if GRAM not in group[0].read():
        raise OptionError(f"the sums of {group[0].client} have no {GRAM!r}: must have it where they join an ensemble")
    total = Statistics.total(clients.values())
    head = _scale_head(Ridge(total).head(choose_penalty(clients, seed=seed).value), total)
    fingerprint = group[0].read()["fingerprint"]
    state = {"head.weight": head.weight.float(), "head.bias": head.bias.float(), "fingerprint": fingerprint}
    counts = tuple(int(count) for count in total.counts.round().tolist())
    facts = UploadFacts(_name(architecture, taken), architecture, sum(counts), counts)
    return Upload(facts, partial(_state, state))


def _scale_head(head: Head, total: Statistics) -> Head:
    """Return a head whose logits sum to 0 over the classes and have root mean square :data:`SIZE` on its examples."""
    weight, bias = head.weight - head.weight.mean(0), head.bias - head.bias.mean()
    square = ((weight @ total.gram) * weight).sum() + 2.0 * bias @ (weight @ total.sums.sum(0))
    square = (square + total.examples * bias @ bias) / (total.examples * total.classes)
    factor = SIZE / float(square.clamp_min(1e-12).sqrt())
    return Head(factor * weight, factor * bias)


def _name(architecture: str, taken: set[str]) -> str:
    """Return a client's name that no client has."""
    base = "sums-" + re.sub(r"[^A-Za-z0-9._-]+", "-", backbone_in(architecture))[:48]
    names = (base, *(f"{base}-{number}" for number in range(2, 3 + len(taken))))
    return next(name for name in names if name not in taken)


def _state(state: State) -> State:
    return {key: value.clone() for key, value in state.items()}
