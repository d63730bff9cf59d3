"""A part of a model's arrays as an upload: a head, LoRA factors, or all of them without their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.errors import OptionError, UploadError, shorten_list
from ..core.names import is_adapter_state, match_names
from ..core.seeds import seeded_torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.facts import State
    from ..method import ModelBuilder
    from .checks import Signature

# What PEFT leaves out of the names of its state dict: its one adapter is called "default".
ADAPTER = (".modules_to_save.default", ".default")


@dataclass(frozen=True)
class Part:
    """The arrays of a model that travel, and the others, which every party builds equally.

    Attributes:
        names: Name of an array in messages -> its name in the model's state dict.
        dtypes: Name of an array in messages -> its dtype there and in the model, where these differ.
    """

    names: Mapping[str, str]
    rest: State
    dtypes: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def signature(self, whole: Signature) -> Signature:
        """Return the shapes and dtypes of the arrays that travel."""
        own = {sent: whole[name] for sent, name in self.names.items()}
        return {sent: (shape, self.dtypes.get(sent, (dtype, ""))[0]) for sent, (shape, dtype) in own.items()}

    def complete(self, sent: State) -> State:
        """Return the whole state of a model, given the arrays that travelled."""
        return {**self.rest, **{name: self._cast(sent[key], key, 1) for key, name in self.names.items()}}

    def sent(self, state: State) -> State:
        """Return the arrays of a whole state as they travel."""
        return {sent: self._cast(state[name], sent, 0) for sent, name in self.names.items()}

    def of(self, state: State) -> State | None:
        """Return the arrays of a whole state that travel; None if the others are not those that every party builds."""
        equal = all(bool((state[name] == value).all()) for name, value in self.rest.items())
        return self.sent(state) if equal else None

    def _cast(self, value: Tensor, sent: str, side: int) -> Tensor:
        import torch

        return value.to(getattr(torch, self.dtypes[sent][side])) if sent in self.dtypes else value


def find_part(arrays: Signature, whole: Signature, build: ModelBuilder, model: str) -> Part | None:
    """Return the part of a model that some arrays are; None if they are the whole model under its own names.

    Raises:
        OptionError: They are no part of it, or the other arrays differ from one call of ``build`` to the next.
    """
    if arrays == whole:
        return None
    names = next((names for names in _namings(arrays, whole) if _fits(names, arrays, whole)), None)
    if names is None:
        missing, extra = sorted(set(whole) - set(arrays)), sorted(set(arrays) - set(whole))
        wrong = [f"{key} is {shape}, expected is {whole[key]}" for key, shape in arrays.items()
                 if whole.get(key, shape) != shape]  # fmt: skip
        found = (
            shorten_list(wrong, 160)
            if wrong
            else f"missing {shorten_list(missing)}; not expected {shorten_list(extra)}"
        )
        raise OptionError(
            f"initial_arrays do not fit model {model!r}: {found}. Must be its state_dict, that of one of its "
            "submodules, or a part of it"
        )
    with seeded_torch(0, "part"):
        one = build().state_dict()
    with seeded_torch(1, "part"):
        other = build().state_dict()
    rest = {name: value for name, value in one.items() if name not in set(names.values())}
    if drawn := [name for name, value in rest.items() if not bool((value == other[name]).all())]:
        raise OptionError(
            f"initial_arrays have {len(names)} of the {len(whole)} arrays of model {model!r}, and each call of the "
            f"model draws others anew: {shorten_list(drawn)}. Must be loaded from a file by the model, or be in "
            "initial_arrays"
        )
    pairs = {sent: (arrays[sent][1], whole[name][1]) for sent, name in names.items()}
    return Part(names, rest, {sent: pair for sent, pair in pairs.items() if pair[0] != pair[1]})


def _fits(names: Mapping[str, str] | None, arrays: Signature, whole: Signature) -> bool:
    """Say whether arrays fit those of a model that they are named after: by their shapes, and floats by any width."""
    return names is not None and all(
        name in whole and shape == whole[name][0] and (dtype == whole[name][1] or _are_floats(dtype, whole[name][1]))
        for sent, name in names.items()
        for shape, dtype in [arrays[sent]]
    )


def _are_floats(*dtypes: str) -> bool:
    return all("float" in dtype for dtype in dtypes)


def _namings(arrays: Signature, whole: Signature) -> Iterator[Mapping[str, str] | None]:
    """Yield the ways in which arrays may be named after those of a model: each array's name in the model."""
    yield {name: name for name in arrays}
    yield _wrapped(arrays, whole)
    yield _renamed(arrays, whole, _without_adapter)
    prefixes = {name[: place + 1] for name in whole for place, sign in enumerate(name) if sign == "."}
    fitting = [names for prefix in sorted(prefixes)
               if _fits(names := {name: prefix + name for name in arrays}, arrays, whole)]  # fmt: skip
    yield fitting[0] if len(fitting) == 1 else None
    listed = len(arrays) == len(whole) and set(arrays) == {str(place) for place in range(len(whole))}
    if listed and not is_adapter_state(whole):  # many factors have one shape, in any order
        yield {str(place): name for place, name in enumerate(whole)}  # ArrayRecord of a list of arrays


def _wrapped(arrays: Signature, whole: Signature) -> Mapping[str, str] | None:
    """Return the names of all arrays of a model in a wrapper, such as opacus' or that of torch.compile."""
    try:
        names = match_names(arrays, whole)
    except UploadError:
        return None
    found = {sent: name for name, sent in names.sources.items()}
    return found if len(found) == len(arrays) == len(whole) else None


def _renamed(arrays: Signature, whole: Signature, short: Callable[[str], str]) -> Mapping[str, str] | None:
    known = {short(name): name for name in whole}
    return {name: known[name] for name in arrays} if set(arrays) <= set(known) else None


def _without_adapter(name: str) -> str:
    for part in ADAPTER:
        name = name.replace(part, "")
    return name
