"""A model's last linear layer: solved from sums of its inputs over all clients, or averaged class by class.

Clients with few classes each pull the last layer apart while they train, and an average of such layers is poor. The
sums of :mod:`..statistics.sums` over the layer's inputs do not depend on how the examples are divided. So a layer that
is solved from them is that of the examples together, for the start of the clients' training or for the end of a merge.

Ridge regression: Fani et al., *Accelerating Heterogeneous Federated Learning with Closed-form Classifiers* (Fed3R),
ICML 2024, https://arxiv.org/abs/2406.01116, which starts fine-tuning from such a layer. Deviations: the inputs are not
normalised, lambda is chosen by leaving clients out, and there is no temperature: a steeper start drifts further apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..core import refusals
from ..core.clients import Answer, Clients, Question
from ..core.errors import OptionError
from ..core.facts import State
from ..core.seeds import build_module
from ..core.stage_options import RIDGE
from ..method import Job
from ..statistics.bounds import check_counts, check_gram
from ..statistics.choice import choose_penalty
from ..statistics.heads import ridge_head
from ..statistics.sums import Statistics, from_arrays
from .heads import head_keys, last_linear
from .weight_space import open_weights

KIND = "head"  # of the question


def ask_sums(clients: Clients, job: Job, state: Mapping[str, Tensor], *, phase: str, quorum: int) -> dict[str, State]:
    """Send clients a model, and return the sums of its last layer's inputs by client.

    :func:`..client.measures.sum_inputs` makes them.

    Args:
        phase: The name under which the messages' bytes are counted.
        quorum: The least number of usable answers.

    Raises:
        QuorumError: Fewer usable answers than the quorum.
    """
    _, layer = _untrained(job)
    said = {"architecture": job.student, "num-classes": job.num_classes}
    question = Question(KIND, said, {name: value.detach().cpu().numpy() for name, value in state.items()})

    def check(answer: Answer) -> None:
        _check_sums(answer.arrays, job.num_classes, layer.in_features)

    answers = clients.ask(question, phase=phase, quorum=quorum, check=check)
    return {
        name: {key: torch.from_numpy(np.array(value)) for key, value in answer.arrays.items()}
        for name, answer in answers.items()
    }


def solve_layer(job: Job, state: Mapping[str, Tensor], sums: Mapping[str, Mapping[str, Tensor]]) -> State:
    """Return a model whose last linear layer is solved from the clients' sums of its inputs.

    Args:
        sums: Client -> its sums, see :func:`..client.measures.sum_inputs`.
    """
    clients = {name: from_arrays(arrays) for name, arrays in sums.items()}
    total = Statistics.total(clients[name] for name in sorted(clients))
    head = ridge_head(total, choose_penalty(clients, seed=job.seed).value)
    weight, bias = head_keys(_untrained(job)[0], job.num_classes)
    return {**state, weight: head.weight.to(state[weight].dtype), bias: head.bias.to(state[bias].dtype)}


def average_rows(job: Job, state: Mapping[str, Tensor]) -> State:
    """Return a merged model whose last layer's row of a class is the mean of the clients' by their examples of it.

    A class without examples keeps its merged row.

    Raises:
        OptionError: A client does not report its label counts.
    """
    if lacking := [upload.client for upload in job.uploads if upload.label_counts is None]:
        raise OptionError(
            f"setting 'finish' is 'counts', and {lacking[0]} reports no label counts: must be another value, or every "
            "client must share them"
        )
    counts = torch.tensor([upload.label_counts for upload in job.uploads], dtype=torch.float64)  # [M, C]
    shares, seen = counts / counts.sum(0).clamp_min(1.0), counts.sum(0) > 0
    states = [open_weights(upload) for upload in job.uploads]
    found = dict(state)
    for key in head_keys(_untrained(job)[0], job.num_classes):
        if key not in state:  # a layer may have no bias
            continue
        rows = torch.stack([each[key].double().reshape(job.num_classes, -1) for each in states])
        merged = state[key].double().reshape(job.num_classes, -1)
        mean = torch.where(seen[:, None], (shares[:, :, None] * rows).sum(0), merged)
        found[key] = mean.reshape(state[key].shape).to(state[key].dtype)
    return found


def body_of(job: Job, state: Mapping[str, Tensor]) -> State:
    """Return the weights below a model's last linear layer, which its inputs depend on."""
    own = head_keys(_untrained(job)[0], job.num_classes)
    return {name: value for name, value in state.items() if name not in own}


def check_solvable(job: Job, setting: str, how: str) -> None:
    """Refuse a job whose student has no last layer to solve, before a client has worked.

    Args:
        job: Its uploads may be missing.

    Raises:
        OptionError: The student does not end with a linear layer of C outputs and a bias.
    """
    if not job.num_classes:
        raise OptionError(f"setting {setting!r} is {how!r}: needs a classifier, and no number of classes is given")
    model, layer = _untrained(job)
    head_keys(model, job.num_classes)
    if how == RIDGE and layer.bias is None:
        raise OptionError(
            f"setting {setting!r} is {how!r}, and the last linear layer of {job.student} has no bias: must have one"
        )


def _untrained(job: Job) -> tuple[nn.Module, nn.Linear]:
    model = build_module(job.builders[job.student])
    return model, last_linear(model)[1]


def _check_sums(
    arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]], classes: int, features: int
) -> None:
    """Refuse sums that no examples can have; inputs of a layer may have any length, so it is divided out."""
    wanted = {
        "counts": ((classes,), "int64"),
        "sums": ((classes, features), "float32"),
        "gram": ((features * (features + 1) // 2,), "float32"),
    }
    if (found := {name: (value.shape, str(value.dtype)) for name, value in arrays.items()}) != wanted:
        raise refusals.other_shapes(f"arrays of a last layer's inputs are {found}", str(wanted))
    for name, value in arrays.items():
        if not np.isfinite(value).all():
            raise refusals.not_finite(name)
    own = from_arrays({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
    check_counts(own.counts)
    trace = float(own.gram.diagonal().sum())
    if not trace > 0:
        raise refusals.broken_rule(f"gram has trace {trace:.6g}", "above 0")
    length = own.examples / trace
    check_gram(Statistics(own.counts, own.sums * length**0.5, own.gram * length))
