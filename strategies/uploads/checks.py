"""What every upload must satisfy, whichever way it came: over the network, or from a folder of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import UploadError
from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from ..method import ModelBuilder

# Key of a state_dict -> shape and dtype name, for example ((6, 1, 5, 5), "float32").
Signature = Mapping[str, tuple[tuple[int, ...], str]]

CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MIB = 2**20
# Layers whose ranges one client may send, and the letters of a layer's name.
MAX_LAYERS = 4096
MAX_LAYER_NAME = 256
_SHOWN = 4


class Signatures(Mapping[str, Signature]):
    """The state_dict signature of every known architecture, each model built once, when first asked for."""

    def __init__(self, builders: Mapping[str, ModelBuilder]) -> None:
        self._builders = builders
        self._known: dict[str, Signature] = {}

    def __getitem__(self, name: str) -> Signature:
        if name not in self._known:
            with seeded_torch(0):
                state = self._builders[name]().state_dict()
            self._known[name] = {
                key: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for key, value in state.items()
            }
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)


def check_size(size: int, max_bytes: int, what: str) -> None:
    """Refuse weights that are too large.

    Args:
        size: Their size in bytes.
        max_bytes: Largest allowed size in bytes.
        what: What they are, in the plural, for the message.

    Raises:
        UploadError: Names both sizes.
    """
    if size > max_bytes:
        raise UploadError(f"{what} are {size / MIB:.1f} MiB, must be {max_bytes / MIB:.1f} MiB (max-upload-mib)")


def check_keys(found: Iterable[str], wanted: Signature, architecture: str, what: str) -> None:
    """Refuse weights whose names are not those of the architecture.

    Args:
        found: The names.
        wanted: The architecture's signature.
        architecture: Its name.
        what: What has these names, in the plural, for the message.

    Raises:
        UploadError: Names the first few keys that are missing or not expected.
    """
    names = set(found)
    missing, extra = sorted(set(wanted) - names), sorted(names - set(wanted))
    if missing or extra:
        raise UploadError(
            f"{what} do not fit architecture {architecture!r}: missing {some(missing)}; not expected {some(extra)}"
        )


def check_finite(values: np.ndarray[Any, Any], what: str) -> None:
    """Refuse values that are not finite.

    Raises:
        UploadError: There is a NaN or an infinity.
    """
    if not np.all(np.isfinite(values)):
        raise UploadError(f"{what} holds NaN or Inf; must be finite values")


def check_num_examples(value: object, what: str) -> int:
    """Return the size of a training set.

    Args:
        value: What was said.
        what: The field, for the message.

    Raises:
        UploadError: It is missing or no positive whole number.
    """
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value < 2**63 or value != int(value):  # type: ignore[operator, call-overload]
        shown = "missing" if value is None else repr(value)[:80]
        raise UploadError(f"{what} is {shown}: must be a positive whole number")
    return int(value)  # type: ignore[call-overload, no-any-return]


def check_label_counts(
    counts: object, num_classes: int, what: str, *, num_examples: int | None = None, total: str = ""
) -> tuple[int, ...]:
    """Return the training examples per class.

    Args:
        counts: What was said.
        num_classes: C.
        what: The field, for the message.
        num_examples: The size of the training set, which they must sum to; None if it is not known.
        total: The field of that size, for the message.

    Returns:
        [C] numbers.

    Raises:
        UploadError: They are no C whole numbers from 0, or have another sum.
    """
    whole = tuple(c for c in counts if type(c) is int and c >= 0) if isinstance(counts, list) else ()
    if not isinstance(counts, list) or not len(whole) == len(counts) == num_classes:
        raise UploadError(f"{what} is {str(counts)[:80]}: must be {num_classes} whole numbers from 0")
    if num_examples is not None and sum(whole) != num_examples:
        raise UploadError(f"{what} sum to {sum(whole)}, but {total} is {num_examples}")
    return whole


def check_ranges(layers: object, bounds: object, what: str) -> dict[str, tuple[float, float]]:
    """Return the activation ranges of a model by layer, in float32, in which they are sent on.

    Args:
        layers: Names, as they were said.
        bounds: Smallest and largest value of each layer in turn, as they were said.
        what: The fields, for the message.

    Raises:
        UploadError: The names are no different texts of bounded length, or not each has two finite numbers in order.
    """
    names = layers if isinstance(layers, list) else []
    texts = {name for name in names if isinstance(name, str) and len(name) <= MAX_LAYER_NAME}
    if not isinstance(layers, list) or not len(texts) == len(names) <= MAX_LAYERS:
        raise UploadError(
            f"{what}: the layers are {layers!r:.80}: must be at most {MAX_LAYERS} different names of at most "
            f"{MAX_LAYER_NAME} letters"
        )
    numbers = [bound for bound in bounds if type(bound) is float] if isinstance(bounds, list) else []
    if not isinstance(bounds, list) or not len(numbers) == len(bounds) == 2 * len(names):
        raise UploadError(f"{what} are {bounds!r:.80}: must be two real numbers for each of {len(names)} layers")
    with np.errstate(over="ignore"):
        pairs = np.array(numbers).astype(np.float32).reshape(-1, 2).tolist()
    for name, (low, high) in zip(names, pairs, strict=True):
        if not -np.inf < low <= high < np.inf:
            raise UploadError(f"{what} of layer {name[:80]!r} are {low} and {high}: must be finite, smallest first")
    return {name: (low, high) for name, (low, high) in zip(names, pairs, strict=True)}


def some(names: Sequence[str], width: int = 80) -> str:
    """Return the first few names for a message, each cut to ``width`` letters, and how many more there are."""
    shown = ", ".join(name[:width] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return shown + more if names else "nothing"
