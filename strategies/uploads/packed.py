"""Members of an ensemble as they travel to the clients: quantised or not, each with a digest that names it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core import refusals
from ..core.facts import read_ranges

if TYPE_CHECKING:
    from torch import nn

    from ..method import ModelBuilder, State

PRECISIONS = ("int8", "float32")


@dataclass(frozen=True)
class PackedMember:
    """One member on its way.

    Attributes:
        precision: ``"int8"`` or ``"float32"``.
        ranges: Activation ranges by layer; used by int8 only.
    """

    architecture: str
    precision: str
    arrays: Mapping[str, np.ndarray[Any, Any]]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Sha256 of everything that its logits follow from, in hex."""
        found = hashlib.sha256(f"{self.architecture}/{self.precision}".encode())
        for key in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[key])
            found.update(f"{key}/{array.dtype.str}/{array.shape}".encode() + array.tobytes())
        for layer in sorted(self.ranges):
            found.update(layer.encode() + np.array(self.ranges[layer], dtype="<f4").tobytes())
        return found.hexdigest()

    @property
    def bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values()) + 8 * len(self.ranges)


def pack_member(
    architecture: str, state: State, *, precision: str, ranges: Mapping[str, tuple[float, float]] | None = None
) -> PackedMember:
    """Return a model as it travels; equal weights give equal bytes on every machine.

    Args:
        state: Its float32 weights.
        precision: ``"int8"`` or ``"float32"``.
        ranges: Activation ranges; without them int8 quantises the weights only.
    """
    if precision == "int8":
        from .quantization import quantize_state

        return PackedMember(architecture, precision, quantize_state(state), dict(ranges or {}))
    return PackedMember(architecture, precision, {key: value.numpy() for key, value in state.items()})


def unpack_member(packed: PackedMember, builder: ModelBuilder) -> nn.Module:
    """Return the module in eval mode: normalised inputs [B, ...] -> logits [B, C].

    Raises:
        UploadError: The weights do not fit the builder's model.
    """
    import torch

    from ..core.seeds import build_module

    module = build_module(builder)
    if packed.precision == "int8":
        from .quantization import dequantize_state

        state = dequantize_state(packed.arrays)
    else:
        state = {key: torch.from_numpy(np.array(value)) for key, value in packed.arrays.items()}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise refusals.misfit_weights("a member of the ensemble", packed.architecture, error) from error
    if packed.precision == "int8":
        from .quantization import quantize_activations

        quantize_activations(module, packed.ranges)
    return module.eval()


def ensemble_digest(members: Sequence[str]) -> str:
    """Return the digest of an ensemble: of its members' digests in their order."""
    return hashlib.sha256("/".join(members).encode()).hexdigest()


def to_wire(number: int, packed: PackedMember) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
    """Return the arrays and the facts by which member ``number`` of a message is sent."""
    arrays = {f"{number}/{key}": np.asarray(value) for key, value in packed.arrays.items()}
    layers = sorted(packed.ranges)
    if not layers:
        return arrays, {}
    arrays[f"{number}/<ranges>"] = np.array([packed.ranges[layer] for layer in layers], dtype=np.float32)
    return arrays, {f"layers-{number}": layers}


def from_wire(
    number: int,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    facts: Mapping[str, Any],
    *,
    architecture: str,
    precision: str,
) -> PackedMember:
    """Read member ``number`` of a message, the inverse of :func:`to_wire`.

    Raises:
        UploadError: Layers and ranges do not belong together, or are no names and finite numbers.
    """
    prefix = f"{number}/"
    own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    bounds = own.pop("<ranges>", np.zeros(0)).ravel().tolist()
    ranges = read_ranges(facts.get(f"layers-{number}", []), bounds, f"member {number} of the ensemble: its ranges")
    return PackedMember(architecture, precision, own, ranges)
