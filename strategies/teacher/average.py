"""Averages of models' weights."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..method import Job, Progress, State
from ..weights.states import names_with, singular_vectors

LARGEST = 3.0  # a tensor with a norm above this multiple of the clients' median norm is shrunk


def weighted_mean(states: Iterable[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return ``sum_k w_k theta_k / sum_k w_k`` over every tensor of some state dicts, buffers included.

    Eq. (2) of DENSE; McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
    2017, Algorithm 1. The sums are in double precision, so that the order of clients does not change the result.
    Integers (``num_batches_tracked``) are averaged in double precision too, then truncated. The singular vectors of
    ``spectral_norm`` are those of the averaged weight.

    Args:
        states: Read one at a time; equal keys and shapes.
        weights: w_k >= 0 [M], not all zero; one for each state.

    Returns:
        A state dict on the CPU, in the states' widest dtypes.

    Raises:
        ValueError: The states differ in their keys or shapes, or their number differs from that of the weights.
    """
    sums: dict[str, Tensor] = {}
    began: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for state, weight in zip(states, weights, strict=True):
        if not sums:
            sums = {name: torch.zeros(tensor.shape, dtype=_double(tensor)) for name, tensor in state.items()}
            dtypes = {name: tensor.dtype for name, tensor in state.items()}
            began = {name: tensor for name, tensor in state.items() if len(names_with(name, state)) > 1}
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in sums.items()}:
            raise ValueError("models of different architectures cannot be averaged")
        for name, tensor in state.items():
            # Weights enter unnormalised: products of counts are exact, products with thirds would not be.
            sums[name].add_(tensor.detach().cpu().to(sums[name].dtype), alpha=weight)
            dtypes[name] = torch.promote_types(dtypes[name], tensor.dtype)
    total = sum(weights)
    averaged = {name: (value / total).to(dtypes[name]) for name, value in sums.items()}
    renew_singular_vectors(averaged, began)
    return averaged


def renew_singular_vectors(state: State, start: Mapping[str, Tensor]) -> None:
    """Replace the singular vectors of ``spectral_norm`` in a state by those of its weights.

    Args:
        state: Changed in place.
        start: Its vectors of each weight, or other estimates of them, from which the search begins.
    """
    for name in start:
        whole, *vectors = names_with(name, state)
        if vectors[:1] == [name]:
            state |= zip(vectors, singular_vectors(state[whole], *(start[each].cpu() for each in vectors)), strict=True)


def _double(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def repeat_tied_weights(model: nn.Module, changed: State) -> State:
    """Return some weights of a model under all names that it has for them: a layer or a tensor may have several.

    Args:
        model: Of which only the names are read.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    new = {every[name]: value for name, value in changed.items() if name in every}
    return changed | {name: new[parameter] for name, parameter in every.items() if parameter in new}


def tensor_norms(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of every floating-point tensor, in double precision."""
    return {name: float(value.double().norm()) for name, value in state.items() if value.is_floating_point()}


def find_shrink_factors(norms: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return factors that shrink oversized tensors, so that no client dominates an average by the scale of its weights.

    A tensor whose norm exceeds ``LARGEST`` times the clients' median is scaled to the median, even if the median is 0.
    Other tensors get no factor. With fewer than three clients nothing is shrunk: of two, either may be the outlier.

    Args:
        norms: Of each client, tensor name -> norm; finite.
    """
    if len(norms) < 3:
        return [{} for _ in norms]
    usual = {name: statistics.median([client[name] for client in norms]) for name in norms[0]}
    return [{name: usual[name] / norm for name, norm in one.items() if norm > LARGEST * usual[name]} for one in norms]


def shrink_tensors(state: Mapping[str, Tensor], factors: Mapping[str, float]) -> dict[str, Tensor]:
    """Return a state, or a part of it, with its tensors multiplied by the factors of :func:`find_shrink_factors`."""
    return {name: value * factors[name] if name in factors else value for name, value in state.items()}


def example_weights(num_examples: Sequence[int | None]) -> list[float] | None:
    """Return each client's number of examples n_k as its weight; None if a client does not report it."""
    known = [float(count) for count in num_examples if count is not None]
    return known if len(known) == len(num_examples) else None


def recorded_weights(job: Job, progress: Progress) -> list[float]:
    """Return each client's number of examples; if one does not report it, equal weights and a note in the metrics."""
    counts = example_weights([upload.num_examples for upload in job.uploads])
    if counts is None:
        silent = [upload.client for upload in job.uploads if upload.num_examples is None]
        progress.record({"note": f"no num-examples from {', '.join(silent)}: every client weighs the same"})
    return counts or [1.0] * len(job.uploads)


def average_uploads(job: Job, why: str) -> dict[str, Tensor]:
    """Return the average of the uploads that have the student's architecture.

    Uploads are weighted by their numbers of examples if all of them report one, else equally.

    Args:
        why: The setting that needs the average, as the beginning of the error.

    Raises:
        OptionError: No upload has that architecture.
    """
    alike = [upload for upload in job.uploads if upload.architecture == job.student]
    if not alike:
        others = ", ".join(sorted({upload.architecture for upload in job.uploads}))
        raise OptionError(
            f"{why}: no client has the student's architecture {job.student!r}; the student must be one of {others}"
        )
    counts = example_weights([upload.num_examples for upload in alike])
    return weighted_mean((upload.read() for upload in alike), counts or [1.0] * len(alike))
