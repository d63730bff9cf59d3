"""Averages of weights."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.errors import OptionError

if TYPE_CHECKING:
    from ..method import Job

LARGEST = 3.0  # norm of a client's tensor, as a multiple of the clients' median, from which on it is shrunk


def weighted_mean(states: Iterable[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return ``sum_k w_k theta_k / sum_k w_k`` over every tensor of some state dicts, buffers included.

    Eq. (2) of DENSE; McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
    2017, Algorithm 1. The sums are in double precision, so that the order of clients does not show. Whole numbers
    (``num_batches_tracked``) are averaged as numbers with a fraction, then cut to whole ones.

    Args:
        states: Read one at a time; equal keys and shapes.
        weights: w_k >= 0 [M], not all zero; one for each state.

    Returns:
        A state dict of the first one's dtypes, on the CPU.

    Raises:
        ValueError: The states differ in their keys or shapes, or there are not as many as weights.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for state, weight in zip(states, weights, strict=True):
        if not sums:
            sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
            dtypes = {name: tensor.dtype for name, tensor in state.items()}
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in sums.items()}:
            raise ValueError("models of different architectures have no average")
        for name, tensor in state.items():
            # Weights enter unnormalised: counts times counts are exact, thirds would not be.
            sums[name].add_(tensor.detach().cpu().double(), alpha=weight)
    total = sum(weights)
    return {name: (value / total).to(dtypes[name]) for name, value in sums.items()}


def norms_of(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of every tensor of real numbers, in double precision."""
    return {name: float(value.double().norm()) for name, value in state.items() if value.is_floating_point()}


def shrinkage(norms: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return what to multiply a client's tensors by, so that no average is swayed by how large its weights are.

    A tensor of a norm above ``LARGEST`` times the clients' median gets the median, also where that is 0 as most of them
    have zeros; others are not named. Of two clients nobody can say which one is too large.

    Args:
        norms: Of each client, by tensor; finite.
    """
    if len(norms) < 3:
        return [{} for _ in norms]
    usual = {name: statistics.median([client[name] for client in norms]) for name in norms[0]}
    return [{name: usual[name] / norm for name, norm in one.items() if norm > LARGEST * usual[name]} for one in norms]


def shrunk(state: Mapping[str, Tensor], factors: Mapping[str, float]) -> dict[str, Tensor]:
    """Return a state, or a part of it, with the tensors that :func:`shrinkage` names multiplied by its factors."""
    return {name: value * factors[name] if name in factors else value for name, value in state.items()}


def example_weights(num_examples: Sequence[int | None]) -> list[float] | None:
    """Return one weight per client, its number of examples n_k; None if a client does not tell it."""
    known = [float(count) for count in num_examples if count is not None]
    return known if len(known) == len(num_examples) else None


def average_of(job: Job, why: str) -> dict[str, Tensor]:
    """Return the average of the uploads that have the student's architecture, by their examples where all tell them.

    Args:
        job: Its uploads and student.
        why: What asks for it, as the beginning of a sentence.

    Raises:
        OptionError: No upload is of that architecture.
    """
    alike = [upload for upload in job.uploads if upload.architecture == job.student]
    if not alike:
        others = ", ".join(sorted({upload.architecture for upload in job.uploads}))
        raise OptionError(
            f"{why}: no client has the student's architecture {job.student!r}; allowed as a student is {others}"
        )
    counts = example_weights([upload.num_examples for upload in alike])
    return weighted_mean((upload.read() for upload in alike), counts or [1.0] * len(alike))
