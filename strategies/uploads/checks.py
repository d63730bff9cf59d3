"""The checks that every upload passes: a message's, an import's and a checkpoint's alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import UploadError
from ..core.facts import UploadFacts
from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from ..method import ModelBuilder, State

# Key of a state_dict -> shape and dtype name, for example ((6, 1, 5, 5), "float32").
Shape = tuple[int, ...]
Signature = Mapping[str, tuple[Shape, str]]

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
        what: The weights' name in the message, a plural.

    Raises:
        UploadError: Names both sizes.
    """
    if size > max_bytes:
        raise UploadError(f"{what} are {size / MIB:.1f} MiB, must be {max_bytes / MIB:.1f} MiB (max-upload-mib)")


@dataclass(frozen=True)
class Form:
    """The form in which the arrays of an upload come, and how they are read.

    Attributes:
        what: The arrays' name in messages, a plural.
        one: One array's name in messages, with braces in place of its key.
        read: (array, shape, dtype, what) -> its values in this shape and dtype; raises UploadError where it cannot.
        misfit: (array, shape, dtype) -> a description of an array that does not fit, else an empty text; None: ``read``
            checks the array itself.
    """

    what: str
    one: str
    read: Callable[[Any, Shape, str, str], np.ndarray[Any, Any]]
    misfit: Callable[[Any, Shape, str], str] | None = None


def check_upload(arrays: Mapping[str, Any], facts: UploadFacts, signature: Signature, form: Form) -> State:
    """Return the weights of an upload, whose facts are already checked; see :func:`check_arrays`."""
    import torch

    found = check_arrays(arrays, facts.architecture, signature, form)
    return {key: torch.from_numpy(array) for key, array in found.items()}


def check_arrays(
    arrays: Mapping[str, Any], architecture: str, signature: Signature, form: Form
) -> dict[str, np.ndarray[Any, Any]]:
    """Check the names, shapes, dtypes and values of arrays, in this order, and return the values.

    Args:
        arrays: By name, in some form.
        architecture: The architecture's name, for messages.
        signature: The shape and dtype of each of its arrays.
        form: Reads the arrays.

    Returns:
        The values, in the order of the signature.

    Raises:
        UploadError: Names the first few keys that are missing, not expected or misfits, or an array without finite
            values, or with a batch normalisation's negative variance.
    """
    _check_keys(arrays, signature, f"{form.what} do not fit architecture {architecture!r}")
    misfits = [
        f"{key} is {found}, expected is {dtype}{list(shape)}"
        for key, (shape, dtype) in signature.items()
        if form.misfit is not None and (found := form.misfit(arrays[key], shape, dtype))
    ]
    if misfits:
        raise UploadError(f"{form.what} do not fit architecture {architecture!r}: {shorten_list(misfits, 160)}")
    values = {}
    for key, (shape, dtype) in signature.items():
        what = form.one.format(key)
        values[key] = form.read(arrays[key], shape, dtype, what)
        if not np.all(np.isfinite(values[key])):
            raise UploadError(f"{what} holds NaN or Inf; must be finite values")
        if key.endswith("running_var") and np.any(values[key] < 0):  # its root would be NaN, in the clients' mean too
            raise UploadError(f"{what} holds a negative variance; must be at least 0")
    return values


def check_facts(
    told: Mapping[str, Any],
    num_classes: int,
    *,
    client: str,
    architecture: str,
    fields: Mapping[str, str] | None = None,
) -> UploadFacts:
    """Check a client's claims about its upload; a pretrained model may lack the size of its training set.

    Args:
        told: Any of ``num-examples``, ``label-counts``, ``pretrained``, ``range-layers`` and ``ranges``.
        num_classes: C.
        client: The client's name.
        architecture: The architecture of its model.
        fields: Key -> its name in messages; other keys name themselves.

    Raises:
        UploadError: Names the field, its value and the remedy.
    """
    names = {key: (fields or {}).get(key, key) for key in ("num-examples", "label-counts", "ranges")}
    pretrained, size, counts = told.get("pretrained") is True, told.get("num-examples"), told.get("label-counts")
    num_examples = None if size is None and pretrained else check_num_examples(size, names["num-examples"])
    label_counts = None if counts is None else _label_counts(counts, num_classes, names["label-counts"])
    if label_counts is not None and num_examples not in (None, sum(label_counts)):
        raise UploadError(
            f"{names['label-counts']} sum to {sum(label_counts)}, but {names['num-examples']} is {num_examples}"
        )
    layers, bounds = told.get("range-layers", []), told.get("ranges", [])
    ranges = None if layers == bounds == [] else check_ranges(layers, bounds, names["ranges"])
    return UploadFacts(client, architecture, num_examples, label_counts, pretrained, ranges)


def check_num_examples(value: object, what: str) -> int:
    """Return the size of a training set.

    Args:
        value: The claimed size.
        what: The field's name, for the message.

    Raises:
        UploadError: It is missing or no positive whole number.
    """
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not 0 < value < 2**63 or value != int(value):  # type: ignore[operator, call-overload]
        shown = "missing" if value is None else repr(value)[:80]
        raise UploadError(f"{what} is {shown}: must be a positive whole number")
    return int(value)  # type: ignore[call-overload, no-any-return]


def _check_keys(found: Iterable[str], wanted: Iterable[str], what: str) -> None:
    names, expected = set(found), set(wanted)
    missing, extra = sorted(expected - names), sorted(names - expected)
    if missing or extra:
        raise UploadError(f"{what}: missing {shorten_list(missing)}; not expected {shorten_list(extra)}")


def _label_counts(counts: object, num_classes: int, what: str) -> tuple[int, ...]:
    whole = tuple(c for c in counts if type(c) is int and c >= 0) if isinstance(counts, list) else ()
    if not isinstance(counts, list) or not len(whole) == len(counts) == num_classes:
        raise UploadError(f"{what} is {str(counts)[:80]}: must be {num_classes} whole numbers from 0")
    return whole


def check_ranges(layers: object, bounds: object, what: str) -> dict[str, tuple[float, float]]:
    """Return the activation ranges of a model by layer, in float32, in which they are sent on.

    Args:
        layers: A list of the layers' names.
        bounds: A list of two finite numbers for each of them, the smallest first.
        what: The ranges' name in messages.

    Raises:
        UploadError: They are something else.
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


def shorten_list(names: Sequence[str], width: int = 80) -> str:
    """Return the first few names for a message, each cut to ``width`` letters, and how many more there are."""
    shown = ", ".join(name[:width] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return shown + more if names else "nothing"
