"""The loop over a model's tensors: one tensor of all clients in memory, and what is merged by no rule.

A state is any mapping of name -> tensor, such as a ``state_dict``, or :class:`.core.checkpoints.OpenFile`, which reads
each tensor of a file when it is asked for. So the loop needs memory for its result and for one tensor of all clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core import refusals
from ..core.errors import OptionError
from ..core.facts import weights_alone
from .rules import average, widest_dtype

MEAN, VARIANCE, COUNTER = "running_mean", "running_var", "num_batches_tracked"  # of batch normalisation


# The estimates of the first singular vectors beside a weight under torch's two forms of spectral_norm. Of a chain of
# parametrizations only the first one sees the weight itself.
_VECTOR = re.compile(r"(?P<new>.*parametrizations\.\w+)\.0\._[uv]|(?P<old>.+)_[uv]")
_LEAST_STEPS, _MOST_STEPS, _SETTLED = 4, 1000, 1e-12  # of the power iteration


def _nothing(_: str) -> Sequence[Tensor]:
    return ()


@dataclass(frozen=True)
class Updates:
    """One tensor of all clients, as a rule takes it.

    Attributes:
        updates: theta_k - theta_0 of each client, in float32, of a float64 tensor in float64.
        weights: w_k >= 0 of each client; their sum is 1.
        other: Name -> the updates of another tensor.
        measured: Name -> what each client has measured under it, see :data:`.core.facts.MEASURED`; empty for nothing.
    """

    name: str
    updates: Sequence[Tensor]
    weights: Sequence[float]
    clients: Sequence[str]
    other: Callable[[str], Sequence[Tensor]]
    measured: Callable[[str], Sequence[Tensor]] = _nothing


Rule = Callable[[Updates], Tensor]


def mean(one: Updates) -> Tensor:
    """Return ``sum_k w_k tau_k``: the one rule that needs no entries of the updates, only their sum."""
    return average(one.updates, one.weights)


def merge_states(
    states: Mapping[str, Mapping[str, Tensor]],
    weights: Sequence[float],
    rule: Rule,
    *,
    start: Mapping[str, Tensor] | None = None,
    scale: float = 1.0,
    tick: Callable[[int, int], None],
    collect: Callable[[Iterable[tuple[str, Tensor]]], dict[str, Tensor]] = dict,
) -> dict[str, Tensor]:
    """Return theta_0 + s tau, tensor by tensor.

    Beside the rule: running means and variances of batch normalisation are those of the clients' examples together,
    whatever the scale; its counters are the largest; the singular vectors of ``spectral_norm`` are those of the merged
    weight; other whole numbers and booleans must be equal.

    Args:
        states: Client -> its weights; equal names and shapes.
        weights: One of each client, >= 0 and not all 0.
        rule: Returns the merged update tau of one tensor. A complex tensor comes as real pairs [..., 2].
        start: theta_0, the weights that all clients started from; None: rules get the weights themselves, as
            differences to 0.
        scale: s.
        collect: Takes the merged tensors as they come, and returns what this function does.

    Returns:
        The merged weights on the CPU, in the dtypes of the start, else in the clients' widest.

    Raises:
        OptionError: Names or shapes differ, or whole numbers that no rule can merge.
    """
    total = sum(weights)
    tensors = _Tensors(states, [weight / total for weight in weights], start)

    def merge(weight: str, *vectors: str) -> dict[str, Tensor]:
        found = {weight: tensors.merge(weight, rule, scale)}
        if vectors:
            first = [tensors.read(each)[0] for each in vectors]
            found |= zip(vectors, singular_vectors(found[weight], *first), strict=True)
        return found

    return collect(merge_by_name(states, merge, start=start, tick=tick))


def merge_by_name(
    states: Mapping[str, Mapping[str, Tensor]],
    merge: Callable[..., dict[str, Tensor]],
    *,
    start: Mapping[str, Tensor] | None = None,
    tick: Callable[[int, int], None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor and the merged one.

    Args:
        states: Client -> its weights.
        merge: Given the names that :func:`names_with` returns, it returns these tensors merged.

    Raises:
        OptionError: Names differ.
    """
    model = weights_alone(dict.fromkeys(next(iter(states.values())) if start is None else start))
    for client, state in states.items():
        if odd := sorted(model.keys() ^ weights_alone(dict.fromkeys(state)).keys()):
            where = "the start and" if start is not None else f"{next(iter(states))} and"
            raise OptionError(f"the weights of {where} {client} differ in {odd[0]!r}: must have the same names")
    found: dict[str, Tensor] = {}  # u and v of one weight are found together
    for done, name in enumerate(model):
        tick(done, len(model))
        if name not in found:
            found = merge(*names_with(name, model))
        yield name, found.pop(name)
    tick(len(model), len(model))


def names_with(name: str, names: Container[str]) -> tuple[str, ...]:
    """Return the names of the tensors that one merged tensor follows from.

    Returns:
        Of a vector u or v of ``spectral_norm`` those of its weight, of u and of v; of any other tensor its own.
    """
    found = _VECTOR.fullmatch(name)
    if found is None:
        return (name,)
    weight = f"{found['old']}_orig" if found["old"] else f"{found['new']}.original"
    group = (weight, f"{name[:-1]}u", f"{name[:-1]}v")
    return group if all(each in names for each in group) else (name,)


def singular_vectors(weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first singular vectors of a merged weight, by power iteration, for ``spectral_norm``.

    The mean of the clients' vectors is none: it is short, and vectors of opposite signs cancel out.

    Args:
        weight: [out, in, ...] or, of a transposed convolution, [in, out, ...].
        u: The first client's vector [out], from which the iteration begins.
        v: Its vector of the other dimensions together.
    """
    first, second = u.double(), v.double()
    rows = [weight.double().flatten(1)] if weight.dim() > 1 else [weight.double()[:, None]]
    rows += [weight.double().transpose(0, 1).flatten(1)] if weight.dim() > 1 else []
    fitting = [each for each in rows if list(each.shape) == [len(first), len(second)]]
    if not fitting:
        return u.clone(), v.clone()
    matrix = max(fitting, key=lambda each: float((first @ each @ second).abs()))
    for step in range(_MOST_STEPS):
        before = second
        second = nn.functional.normalize(matrix.T @ first, dim=0)
        first = nn.functional.normalize(matrix @ second, dim=0)
        if step >= _LEAST_STEPS and float((second - before).norm()) < _SETTLED:
            break
    return first.to(u.dtype), second.to(v.dtype)


@dataclass(frozen=True)
class _Tensors:
    """The tensors of all clients, by name."""

    states: Mapping[str, Mapping[str, Tensor]]
    shares: Sequence[float]
    start: Mapping[str, Tensor] | None

    def merge(self, name: str, rule: Rule, scale: float) -> Tensor:
        """Return one merged tensor."""
        prefix, _, last = name.rpartition(".")
        mean, variance = (f"{prefix}.{each}" if prefix else each for each in (MEAN, VARIANCE))
        values = self.read(name)
        first = self.start[name] if self.start is not None else values[0]
        kind = widest_dtype(values) if self.start is None else first.dtype
        if last in (MEAN, VARIANCE) and mean in self and variance in self:
            pooled = _pooled(self.read(mean), self.read(variance), self.shares)
            return pooled[last == VARIANCE].to(kind)
        if not (first.is_floating_point() or first.is_complex()):
            return _largest(values) if last == COUNTER else self._equal(name, values)
        tau = rule(
            Updates(name, self._updates(name, values), self.shares, list(self.states), self.updates, self.measured)
        )
        whole = scale * tau
        if self.start is not None:
            whole += _numbers(first).double()
            if not bool(first.isfinite().all()):
                raise refusals.not_finite(f"tensor {name!r}").of("the start")
        return (torch.view_as_complex(whole) if first.is_complex() else whole).to(kind)

    def __contains__(self, name: str) -> bool:
        return name in next(iter(self.states.values()))

    def read(self, name: str) -> list[Tensor]:
        """Return a tensor of each client, on the CPU."""
        values = [state[name].detach().cpu() for state in self.states.values()]
        wanted = tuple(self.start[name].shape) if self.start is not None else tuple(values[0].shape)
        for client, value in zip(self.states, values, strict=True):
            if tuple(value.shape) != wanted:
                raise OptionError(
                    f"tensor {name!r} of {client} has shape {list(value.shape)}: must be {list(wanted)}, that of "
                    f"{'the start' if self.start is not None else next(iter(self.states))}"
                )
        return values

    def updates(self, name: str) -> list[Tensor]:
        """Return the update of a tensor of each client."""
        return self._updates(name, self.read(name))

    def measured(self, name: str) -> list[Tensor]:
        """Return what each client has measured under a name; empty if none has."""
        found = [state[name].detach().cpu() for state in self.states.values() if name in state]
        if found and len(found) < len(self.states):
            lacking = ", ".join(client for client, state in self.states.items() if name not in state)
            raise OptionError(f"{name!r} is missing from the uploads of {lacking}: must be in all uploads or in none")
        return found

    def _updates(self, name: str, values: Sequence[Tensor]) -> list[Tensor]:
        double = any(value.dtype in (torch.float64, torch.complex128) for value in values)
        precision = torch.float64 if double else torch.float32
        numbers = [_numbers(value).to(precision) for value in values]
        if self.start is None:
            return numbers
        began = _numbers(self.start[name].detach().cpu()).to(precision)
        return [number - began for number in numbers]

    def _equal(self, name: str, values: Sequence[Tensor]) -> Tensor:
        for client, value in zip(self.states, values, strict=True):
            if not torch.equal(value, values[0]):
                raise OptionError(
                    f"tensor {name!r} holds {str(value.dtype).removeprefix('torch.')} numbers, in which "
                    f"{next(iter(self.states))} and {client} differ: must be equal, because they cannot be merged"
                )
        return values[0].clone()


def _numbers(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _largest(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).amax(0)


def _pooled(means: Sequence[Tensor], variances: Sequence[Tensor], shares: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return mean and variance of all clients' examples together: within the clients, and between their means."""
    mean = average(means, shares)
    parts = [var.double() + (own.double() - mean).square() for own, var in zip(means, variances, strict=True)]
    return mean, average(parts, shares)
