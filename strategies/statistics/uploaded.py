"""An upload of feature sums as a module of buffers, and the checks that it passes before it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..core.errors import UploadError
from .privacy import COUNT_WEIGHT, SUM_WEIGHT
from .sums import Statistics, from_arrays, to_arrays

if TYPE_CHECKING:
    from ..core.facts import State
    from ..method import Upload

# The parts of a feature function, each with a digest of its own, so that a refusal can name the part that differs.
PARTS = ("weights", "preprocessing", "projection", "precision")
DIGEST = 32  # bytes of each
SIX = 6.0  # deviations that honest noise does not exceed
ROUNDING = 1e-5  # per example; honest uploads in float32 have at most 2.4e-7


class FeatureSums(nn.Module):
    """The sums of one client: ``counts``, ``sums``, ``gram``, ``noise`` and ``fingerprint``, all of them buffers.

    Args:
        classes: C.
        features: d.
        fingerprint: uint8 [4, 32], a digest of each of :data:`PARTS`.
        non_negative: Whether no feature is negative.
        noise: sigma, the deviation of the noise that the run's budget demands on the diagonal of ``gram``; 0: none.
    """

    counts: Tensor
    fingerprint: Tensor

    def __init__(
        self, classes: int, features: int, fingerprint: Tensor, *, non_negative: bool = False, noise: float = 0.0
    ) -> None:
        super().__init__()
        for name, value in to_arrays(Statistics.zeros(classes, features)).items():
            self.register_buffer(name, value)
        self.register_buffer("noise", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("fingerprint", fingerprint.clone())
        self._non_negative, self._noise = non_negative, noise

    def fill(self, statistics: Statistics, noise: float = 0.0) -> None:
        """Take statistics, and the deviation of the noise in them."""
        state = {**to_arrays(statistics), "noise": torch.tensor([noise], dtype=torch.float64)}
        self.load_state_dict({**state, "fingerprint": self.fingerprint})

    def check_upload(self, state: Mapping[str, Tensor]) -> None:
        """Refuse sums of other features, and sums that no examples with features of norm 1 can have.

        Noisy sums keep the same bounds up to the noise that a run's budget demands, see :func:`_check_noisy`.

        Args:
            state: An upload whose names, shapes and types fit, and whose numbers are finite.

        Raises:
            UploadError: Names the bound that is broken.
        """
        self._check_fingerprint(state["fingerprint"])
        if not math.isclose(float(state["noise"]), self._noise, rel_tol=1e-9):
            told = float(state["noise"])
            raise UploadError(f"noise is {told:.6g}: must be {self._noise:.6g}, that of the run's budget")
        if self._noise:
            _check_noisy(from_arrays(state), self._noise)
            return
        counts = state["counts"]
        if bool((counts < 0).any() or (counts != counts.round()).any()) or not float(counts.sum()) > 0:
            raise UploadError("counts are not whole numbers from 0 with a positive sum")
        found = from_arrays(state)
        _check_entries(found, ROUNDING * found.examples)
        if self._non_negative and min(float(found.gram.min()), float(found.sums.min())) < -ROUNDING * found.examples:
            raise UploadError("sums or gram have negative entries, but no feature of this backbone is negative")
        _check_spectrum(found, ROUNDING * found.examples)

    def _check_fingerprint(self, told: Tensor) -> None:
        differing = [part for part, same in zip(PARTS, (told == self.fingerprint).all(1), strict=True) if not same]
        if differing:
            raise UploadError(
                f"its features come from another function: fingerprint {_short(told)}, expected is "
                f"{_short(self.fingerprint)}; they differ in {', '.join(differing)}"
            )


@dataclass(frozen=True)
class Uploaded(Mapping[str, Statistics]):
    """The statistics of uploads by client, read anew at each access, so that one is in memory at a time.

    Attributes:
        uploads: In the order of client names.
        max_share: The largest share of all examples that one client may claim; 0: any.
    """

    uploads: Sequence[Upload]
    max_share: float = 0.0

    def __getitem__(self, client: str) -> Statistics:
        upload = next((upload for upload in self.uploads if upload.client == client), None)
        if upload is None:
            raise KeyError(client)
        return from_arrays(upload.read()).scaled(self.factors.get(client, 1.0))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(upload.client for upload in self.uploads))

    def __len__(self) -> int:
        return len(self.uploads)

    @property
    def factors(self) -> dict[str, float]:
        """The factor of each client whose claimed share of the examples exceeds the largest one."""
        if not self.max_share:
            return {}
        return capped({u.client: float(u.read()["counts"].sum()) for u in self.uploads}, self.max_share)

    def noises(self) -> list[float]:
        """Return the deviation of the noise of every upload."""
        return [float(upload.read()["noise"]) for upload in self.uploads]


def capped(sizes: Mapping[str, float], share: float) -> dict[str, float]:
    """Return the factors that bring every claimed size to at most a share of the resulting total.

    Args:
        sizes: Client -> claimed number of examples.
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


def _check_entries(found: Statistics, slack: float) -> None:
    counts, diagonal = found.counts, found.gram.diagonal()
    if abs(float(diagonal.sum()) - found.examples) > slack:
        raise UploadError(
            f"gram has trace {float(diagonal.sum()):.6g} for {found.examples:.0f} examples: must be their number, "
            "because every feature vector has norm 1"
        )
    norms = found.sums.norm(dim=1)
    wrong = (norms > counts * (1 + ROUNDING)) | ((counts == 1) & ((norms - 1).abs() > ROUNDING))
    if bool(wrong.any()):
        raise UploadError(
            f"sums of class {int(wrong.nonzero()[0])} have norm {float(norms[wrong][0]):.6g} for "
            f"{float(counts[wrong][0]):.0f} examples: must be at most their number, and 1 for one example"
        )


def _check_noisy(found: Statistics, sigma: float) -> None:
    """Refuse sums that the noise of a budget explains with a probability below 1e-8 per bound.

    A Gaussian number stays within six deviations, and the norm of d numbers within ``sqrt(d) + 6`` of them.
    The spectral norm of the noise on G stays within ``(sqrt(2 d) + 6) sigma``. Both follow from the concentration of
    Lipschitz functions.
    """
    root, count = math.sqrt(found.features), sigma / COUNT_WEIGHT
    if float(found.counts.min()) < -SIX * count:
        raise UploadError(f"a count is {float(found.counts.min()):.6g}: noise explains at least {-SIX * count:.6g}")
    examples = found.examples + SIX * count * math.sqrt(found.classes)
    trace, slack = float(found.gram.diagonal().sum()), SIX * sigma * root
    if trace > examples + slack:
        raise UploadError(f"gram has trace {trace:.6g}: examples and noise explain at most {examples + slack:.6g}")
    norms = found.sums.norm(dim=1)
    most = found.counts + SIX * count + (root + SIX) * sigma / SUM_WEIGHT
    if bool((norms > most).any()):
        wrong = int((norms - most).argmax())
        norm, bound = float(norms[wrong]), float(most[wrong])
        raise UploadError(f"sums of class {wrong} have norm {norm:.6g}: noise explains at most {bound:.6g}")
    edge = (math.sqrt(2.0) * root + SIX) * sigma
    least, *_, largest = torch.linalg.eigvalsh(found.gram).tolist()
    if least < -edge or largest > examples + edge:
        raise UploadError(
            f"gram has eigenvalues from {least:.6g} to {largest:.6g}: examples and noise explain {-edge:.6g} to "
            f"{examples + edge:.6g}"
        )


def _check_spectrum(found: Statistics, slack: float) -> None:
    # Rounding of d^2 entries to float32 moves an eigenvalue by at most the Frobenius norm of its errors.
    least = float(torch.linalg.eigvalsh(found.scatter_within)[0])
    if least < -slack:
        raise UploadError(f"gram has eigenvalue {least:.6g} within classes: must be at least 0 for real examples")
    if found.examples < found.features:
        extra = float(torch.linalg.eigvalsh(found.gram)[: found.features - int(found.examples)].clamp_min(0).sum())
        if extra > slack:
            raise UploadError(f"gram has a rank above {found.examples:.0f}, the number of its examples")


def _short(fingerprint: Tensor) -> str:
    return "".join(bytes(part[:2].tolist()).hex() for part in fingerprint)


def head_state(weight: Tensor, bias: Tensor) -> State:
    """Return a head as the weights of a module with the linear layer ``head``, in float32."""
    return {"head.weight": weight.to(torch.float32), "head.bias": bias.to(torch.float32)}
