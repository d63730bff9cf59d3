"""One-shot FedAvg: the server averages the uploaded weights, once.

Paper: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017, https://arxiv.org/abs/1602.05629. Read version: arXiv v4, as Eq. (2) of DENSE
    (Zhang et al., NeurIPS 2022) states it for one round.
Symbols: w_k -> uploads[k].read(); n_k -> uploads[k].num_examples.
Where: Algorithm 1, the server's last line -> teacher.average.weighted_mean.
Deviations: one round. The published code of DENSE and Co-Boosting averages with equal weights: option ``weights``.
    Buffers of batch normalisation are averaged too, as there; FENS keeps the first client's: option ``bn_buffers``.
    LoRA adapters: the average of their updates B A, not of A and B (weights.adapters).
    ``linear = "merged"`` merges linear layers in closed form (teacher.merged), which is this library's own.
"""

from __future__ import annotations

import time

from ..combiners.update_gate import merge_uploads
from ..core.errors import OptionError
from ..core.options import config_class, option
from ..core.seeds import build_module
from ..method import Job, Method, Need, Outcome, Progress, State
from ..teacher.average import recorded_weights, weighted_mean
from ..teacher.weight_space import has_adapters, merge_uploaded_adapters, open_weights
from ..weights.states import merge_by_name, names_with


@config_class("fedavg")
class FedAvgConfig:
    """Options of one-shot FedAvg."""

    weights: str = option(
        "examples", "how clients are weighted: by examples n_k / sum n, or equally", choices=("examples", "uniform")
    )
    bn_buffers: str = option(
        "average", "batch-normalisation buffers: averaged, or the first client's", choices=("average", "first")
    )
    linear: str = option(
        "averaged",
        "linear layers: averaged, or merged in closed form by the directions of the clients' updates",
        choices=("averaged", "merged"),
    )


def fit(job: Job, progress: Progress) -> Outcome:
    """Average the uploads' weights, one tensor of all clients in memory at a time."""
    begin = time.perf_counter()
    equal = job.config.weights == "uniform"
    weights = [1.0] * len(job.uploads) if equal else recorded_weights(job, progress)
    if has_adapters(job):
        return merge_uploaded_adapters(job, progress, weights)
    changed: State = {}
    if job.config.bn_buffers == "first":
        first = job.uploads[0].read()
        changed |= {name: first[name] for name in _buffers(job)}
    if job.config.linear == "merged":
        changed |= merge_uploads(job, job.uploads, weights, progress)
    opened = {upload.client: open_weights(upload) for upload in job.uploads}

    def average(*names: str) -> State:
        return weighted_mean(({name: state[name] for name in names} for state in opened.values()), weights)

    averaged = merge_by_name(opened, average, tick=progress.report)
    student = job.collect((name, changed.get(name, value)) for name, value in averaged)
    return Outcome(student=student, timings={"average": time.perf_counter() - begin})


def _buffers(job: Job) -> list[str]:
    """Return the names of the student's buffers, but for singular vectors, which follow from their weight."""
    model = build_module(job.builders[job.student])
    state = model.state_dict()
    return [name for name, _ in model.named_buffers() if name in state and len(names_with(name, state)) == 1]


def check_weights(job: Job) -> None:
    """Refuse equal weights for weights that are means over examples.

    Raises:
        OptionError: Names the option.
    """
    if job.means_of_examples and job.config.weights != "examples":
        raise OptionError(
            f"setting 'fedavg.weights' is {job.config.weights!r}: must be 'examples' with {job.student!r}, whose "
            "weights are means over a client's examples"
        )


METHOD = Method(
    name="fedavg",
    title="FedAvg (one shot)",
    source="McMahan et al., AISTATS 2017",
    config=FedAvgConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE}),
    kind="baseline",
    check=check_weights,
    any_model=True,
)
