"""The checks that every upload passes: a message's, an import's and a checkpoint's alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import refusals
from ..core.errors import UploadError
from ..core.facts import (
    CVAE,
    FISHER_OF,
    GRAM_OF_ROWS,
    MEASURED,
    MODEL_ERRORS,
    STATISTICS,
    kind_of,
    name_in,
    weights_alone,
)
from ..core.names import MatchedNames, match_names
from ..core.seeds import generator, seeded_torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.facts import State
    from ..method import ModelBuilder

# Key of a state_dict -> shape and dtype name, for example ((6, 1, 5, 5), "float32").
Shape = tuple[int, ...]
Signature = Mapping[str, tuple[Shape, str]]


class ModelSignature(dict[str, tuple[Shape, str]]):
    """The signature of a module's state_dict.

    Attributes:
        ties: Name -> an earlier name of the same tensor; a file may lack one of the two.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__(
            {key: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for key, value in state.items()}
        )
        firsts: dict[Any, str] = {}
        places = {key: (value.data_ptr(), value.shape, value.stride()) for key, value in state.items() if value.numel()}
        names = {key: firsts.setdefault(place, key) for key, place in places.items()}
        self.ties = {key: first for key, first in names.items() if key != first}
        self.ties |= {first: key for key, first in reversed(self.ties.items())}


class Signatures(Mapping[str, Signature]):
    """The state_dict signature of every known architecture, each model built once, when first asked for."""

    def __init__(self, builders: Mapping[str, ModelBuilder]) -> None:
        self._builders = builders
        self._known: dict[str, Signature] = {}

    def __getitem__(self, name: str) -> Signature:
        if name not in self._known:
            with seeded_torch(0):
                state = self._builders[name]().state_dict()
            self._known[name] = ModelSignature(state)
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
        raise refusals.too_large(what, size, max_bytes)


@dataclass(frozen=True)
class ArrayForm:
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


def check_upload(
    arrays: Mapping[str, Any], architecture: str, signature: Signature, form: ArrayForm, notes: list[str] | None = None
) -> State:
    """Return the weights of an upload as tensors, see :func:`check_arrays`; their names may differ as they usually do.

    Args:
        notes: Takes a line for each way in which names were taken for the same; None for no lines.

    Raises:
        UploadError: See :func:`check_arrays`; or two prefixes of names fit.
    """
    import torch

    names = match_names(arrays, signature, getattr(signature, "ties", None))
    found = check_arrays(arrays, architecture, signature, form, names)
    if notes is not None:
        notes += names.notes
    return {key: torch.from_numpy(array) for key, array in found.items()}


@dataclass(frozen=True)
class RenamedTensors(Mapping[str, "Tensor"]):
    """A model's tensors by other names, each read when it is asked for; what a client measured is there too."""

    tensors: Mapping[str, Tensor]
    names: MatchedNames
    signature: Signature | None = None  # whose dtypes the tensors get; None: they keep their own

    def __getitem__(self, name: str) -> Tensor:
        import torch

        if name in self.names.counters:
            return torch.tensor(0)
        if name.startswith(MEASURED):
            return self.tensors[self._measured[name]]
        value = self.tensors[self.names.sources[name]]
        return value if self.signature is None else value.to(getattr(torch, self.signature[name][1]))

    @cached_property
    def _measured(self) -> dict[str, str]:
        return measured_names(self.tensors, self.names)

    def __iter__(self) -> Iterator[str]:
        return chain(self.names.sources, self.names.counters, self._measured)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def measured_names(found: Iterable[str], names: MatchedNames) -> dict[str, str]:
    """Return what a client has measured by a model's names -> its names here, which follow those of the weights."""
    own: dict[str, str] = {}
    for name, source in names.sources.items():
        own.setdefault(source, name)  # of tied tensors the first, as a module counts its parameters
    renamed: dict[str, str] = {}
    for key in found:
        prefix = next((each for each in MEASURED if key.startswith(each)), "")
        name = key.removeprefix(prefix)
        if prefix == FISHER_OF:
            renamed[prefix + own.get(name, name)] = key
        elif prefix:
            weight = own.get(name_in(name, "weight"), name_in(name, "weight"))
            renamed[prefix + weight.removesuffix("weight").removesuffix(".")] = key
    return renamed


def check_measured(arrays: Mapping[str, Any], architecture: str, signature: Signature, form: ArrayForm) -> State:
    """Return what a client has measured for a merge of weights, see :data:`.core.facts.MEASURED`; empty for nothing.

    Raises:
        UploadError: It is of no parameter or linear layer of the architecture, of another shape, or not finite.
    """
    wanted: dict[str, tuple[Shape, str]] = {}
    weights = match_names(weights_alone(arrays), signature, getattr(signature, "ties", None))
    measured = {own: arrays[key] for own, key in measured_names(arrays, weights).items()}
    for key in measured:
        prefix, name = next((each, key.removeprefix(each)) for each in MEASURED if key.startswith(each))
        if prefix == FISHER_OF and name in signature:
            wanted[key] = (signature[name][0], "float32")
        elif len(shape := signature.get(name_in(name, "weight"), ((), ""))[0]) == 2:
            width = shape[0 if prefix == GRAM_OF_ROWS else 1] + (name_in(name, "bias") in signature)
            wanted[key] = ((width, width), "float64")
    return check_upload(measured, architecture, wanted, form)


def fits(shapes: Mapping[str, Shape], signature: Signature) -> bool:
    """Say whether arrays of these names and shapes fit an architecture, by :func:`..core.names.match_names`."""
    try:
        names = match_names(shapes, signature, getattr(signature, "ties", None))
    except UploadError:
        return False
    alike = all(shapes[found] == signature[name][0] for name, found in names.sources.items())
    return alike and not (names.missing or names.extra)


def check_arrays(
    arrays: Mapping[str, Any],
    architecture: str,
    signature: Signature,
    form: ArrayForm,
    names: MatchedNames | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Check the names, shapes, dtypes and values of arrays, in this order, and return the values.

    Args:
        names: The arrays' names in the signature; None where they must be the same.

    Returns:
        The values, in the order of the signature.

    Raises:
        UploadError: Names the first few keys that are missing, not expected or misfits, or an array without finite
            values, or with a batch normalisation's negative variance.
    """
    what = f"{form.what} do not fit architecture {architecture!r}"
    missing, extra = sorted(set(signature) - set(arrays)), sorted(set(arrays) - set(signature))
    if names is not None:
        missing, extra = sorted(names.missing), sorted(names.extra)
    if missing or extra:
        raise refusals.other_keys(what, missing, extra)
    if names is not None:
        arrays = {name: arrays[found] for name, found in names.sources.items()}
    misfits = [
        f"{key} is {found}, expected is {dtype}{list(shape)}"
        for key, (shape, dtype) in signature.items()
        if key in arrays and form.misfit is not None and (found := form.misfit(arrays[key], shape, dtype))
    ]
    if misfits:
        raise refusals.misfits(what, misfits)
    values = {}
    for key, (shape, dtype) in signature.items():
        what = form.one.format(key)
        if key not in arrays:
            values[key] = np.zeros(shape, dtype)
            continue
        values[key] = form.read(arrays[key], shape, dtype, what)
        if not np.all(np.isfinite(values[key])):
            raise refusals.not_finite(what)
        if key.endswith("running_var") and np.any(values[key] < 0):  # its root would be NaN, in the clients' mean too
            raise refusals.negative_variance(what)
    return values


# Finite weights may overflow in the forward pass, so a model's outputs are checked too.
PROBES = 4


def check_outputs(
    architecture: str,
    state: State,
    builder: ModelBuilder,
    input_shape: tuple[int, ...],
    *,
    num_examples: int | None = None,
) -> str:
    """Refuse a classifier whose outputs for ordinary inputs are not finite, and sums that no examples can have.

    Args:
        architecture: The key of the model, from which its kind follows; a decoder takes no images and is not probed.
        input_shape: Of one input; the probes are standard normal. A model that cannot take them is not judged.
        num_examples: The client's reported number of examples, which its sums must be over; None if it reports none.

    Returns:
        A warning about an upload that is accepted; empty for none.

    Raises:
        UploadError: An output is infinite or no number, or sums break a bound.
    """
    if kind_of(architecture) == CVAE:
        return ""
    if kind_of(architecture) == STATISTICS:
        sums: Any = builder()
        return str(sums.check_upload(state, num_examples))  # sums of features know their own bounds
    with seeded_torch(0, "probe"):
        model = builder()
    check_answers(model, state, input_shape)
    return ""


def check_answers(model: nn.Module, state: State, input_shape: tuple[int, ...], most: float = math.inf) -> None:
    """Refuse weights with which a model's outputs for standard normal inputs are not finite, or too large.

    Args:
        model: Takes the weights, in place; one that cannot take the inputs is not judged.
        most: The largest size of an output.

    Raises:
        UploadError: An output is larger or no number.
    """
    import torch

    probes = torch.randn(PROBES, *input_shape, generator=generator(0, "probe"))
    with seeded_torch(0, "probe"), torch.no_grad():
        model.load_state_dict(state)
        try:
            outputs = model.eval()(probes)
        except MODEL_ERRORS:  # a model of tokens, say
            return
    if isinstance(outputs, torch.Tensor) and not bool((outputs.isfinite() & (outputs.abs() <= most)).all()):
        largest = max((float(value.abs().max()) for value in state.values() if value.numel()), default=0.0)
        bound = "" if math.isinf(most) else f" whose outputs are at most {most:g}"
        raise refusals.outputs_overflow(largest, bound)
