"""FedGen: the server trains a generator of features on each round's models, and shares it with the clients' training.

Paper: Zhu, Hong, Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021,
    https://arxiv.org/abs/2105.10056; FedGen* and the shapes of both generators are of Zhang, Shen, Ding, Tao, Duan,
    Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning, CVPR 2022,
    https://arxiv.org/abs/2203.09249. Read version: the submission of the second, FLBoost, whose section
    3.3 says how it trains FedGen's generator, and a summary of the first and of both published codes.
Symbols: G -> generator; f_k -> teacher.members; n_k^y - 1 -> Upload.label_counts; eta -> diversity_weight; b_g ->
    local_batch_size; gamma_t -> gamma.
Where: sum_k mean_i(w_{y_i,k} NLL_k) + eta R -> FedGenServer.loss with consensus.weighted_cross_entropy; w ->
    matched.class_weights; R -> losses.diversity; the clients' half -> client/generated.py; its description ->
    generator_spec.py.
Deviations: the model itself stays the combined one. The defaults are those of Zhang et al.'s comparison, except for
    their width of 8192, with which the generator has 72 million weights for 512 features, and with the cross-entropy of
    each client and the diversity loss, as in the first code. Preset "paper" is their text: the cross-entropy of the
    clients' mean output alone. Their text prints no gamma; it is that of both codes. Preset "published-code" has Zhu et
    al.'s numbers in that generator's shape, with as many hidden units. Adam begins anew in every
    round, for only weights travel. t counts from 0, so that the first generator, shared in the second round, has
    gamma_1. The KL term, whose weight in the published code is 0, is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import OptionError
from ..core.gpu import eager
from ..core.options import config_class, option, presets
from ..core.seeds import generator
from ..core.work import work
from ..distillation.consensus import CE_FORMS, weighted_cross_entropy
from ..distillation.epochs import copy_weights
from ..distillation.generator_spec import LEVELS, NOISES, GeneratorSpec, draw_noise
from ..distillation.losses import diversity
from ..distillation.matched import Matched, check_level, class_weights
from ..distillation.settings import shared
from ..method import InRounds, Job, Method, Need, Outcome, Progress
from ..teacher.average import average_uploads

# Every count of a class starts at this value, and a class counts as held from one example of one client on.
FIRST = 1
# Both publications have these. The weight gamma of both terms in the clients' loss, its factor per round, its least:
LOCAL_WEIGHT = 10.0
LOCAL_DECAY = 0.98
LOCAL_FLOOR = 1e-4
LOCAL_EPOCHS = 20  # of a round in which clients use the generator


# "paper": FedGen as FLBoost's paper describes it. "published-code": Zhu et al. Defaults: FLBoost's comparison.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"generator_width": 8192, "ce_form": "mean-output", "diversity_weight": 0.0},
    "published-code": {
        "batch_size": 32,
        "latent": 32,
        "generator_width": 256,
        "generator_lr": 3e-4,
        "lr_decay": 0.98,
        "weight_decay": 1e-2,
        "labels": "held",
        "weights": "counts",
        "ce_form": "batch-mean",
        "noise": "uniform",
        "local_batch_size": 32,
    },
}


@config_class("fed-gen")
class FedGenConfig:
    """Options of FedGen; the defaults are those of FLBoost's comparison."""

    level: str = option("features", "the generator makes inputs of the last layer, or images (FedGen*)", choices=LEVELS)
    iterations: int = option(50, "generator steps per round", low=1, main=True)
    batch_size: int = option(50, "examples per generator step", low=2, setting=False)
    latent: int = shared("latent", 100)
    generator_width: int = shared("generator_width", 512)
    generator_lr: float = option(0.01, "Adam's learning rate of the generator", above=0.0, setting=False)
    lr_decay: float = option(0.998, "factor of the learning rate per round", above=0.0, high=1.0, setting=False)
    weight_decay: float = option(1e-3, "weight decay of the generator", low=0.0, setting=False)
    labels: str = option(
        "uniform",
        "classes y of the examples: all, or those of which a client has an example",
        choices=("uniform", "held"),
        setting=False,
    )
    weights: str = option(
        "uniform", "weights w of the clients: equal, or by their examples of the class", choices=("uniform", "counts"),
        setting=False,
    )  # fmt: skip
    ce_form: str = option(
        "per-sample", "w weighs each sample, the batch's mean, or the clients' output", choices=CE_FORMS, setting=False
    )
    diversity_weight: float = option(1.0, "weight eta of the diversity loss", low=0.0, setting=False)
    noise: str = option("normal", "the noise: N(0, 1), or U[0, 1)", choices=NOISES, setting=False)
    local_batch_size: int = option(
        50, "generated examples b_g beside each batch of a client", low=1, high=2**12, setting=False
    )

    preset = presets(PRESETS)

    def __post_init__(self) -> None:
        if self.generator_width % 2:
            raise OptionError(f"setting 'server.generator-width' is {self.generator_width}: must be an even number")


def gamma(server_round: int) -> float:
    """Return gamma_t of a round, from 1: ``max(floor, gamma_0 decay^t)`` with t = round - 1."""
    return float(max(LOCAL_FLOOR, LOCAL_WEIGHT * LOCAL_DECAY ** (server_round - 1)))


def fit(job: Job, progress: Progress) -> Outcome:
    """Train the generator for a round; the student is the combined model as it was given, else the uploads' average."""
    begin = time.perf_counter()
    if job.start is None:
        job = replace(job, start=average_uploads(job, "method 'fed-gen' has no model to start from"))
    server = FedGenServer(job, progress)
    combined = time.perf_counter()
    server.train()
    timings = {"average": combined - begin, "generator": time.perf_counter() - combined}
    return Outcome(student=dict(job.start or {}), memory=copy_weights(server.generator), timings=timings)


def describe_generator(job: Job) -> Mapping[str, str | int | float]:
    """Return the description of the generator that the clients of a round receive."""
    return _generator_spec(job).as_config()


class FedGenServer:
    """The training set-up of a round's generator."""

    def __init__(self, job: Job, progress: Progress) -> None:
        config: FedGenConfig = job.config
        self.job, self.config, self.progress = job, config, progress
        models = Matched.of(job, config.level, config.latent, config.generator_width, table=METHOD.name)
        self.teacher = models.teacher
        self.generator = models.generator.train()
        self.classes, weights = self._labels_and_weights()
        self.weights = weights.to(job.device)

    def train(self) -> None:
        """Make the steps of the round."""
        job, config = self.job, self.config
        rng = generator(job.seed, "fed-gen", job.server_round)
        rate = config.generator_lr * config.lr_decay ** (job.server_round - 1)
        optimizer = eager(torch.optim.Adam)(self.generator.parameters(), rate, weight_decay=config.weight_decay)
        sums: dict[str, float] = {}
        for step in range(config.iterations):
            noise = draw_noise(config.noise, config.batch_size, config.latent, rng).to(job.device)
            labels = self.classes[torch.randint(len(self.classes), (len(noise),), generator=rng)].to(job.device)
            terms = self.loss(noise, labels)
            optimizer.zero_grad(set_to_none=True)
            torch.stack(list(terms.values())).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            work().generator_stepped()
            sums = {name: sums.get(name, 0.0) + float(value.detach()) for name, value in terms.items()}
            self.progress.report(step, config.iterations)
        means = {name: value / config.iterations for name, value in sums.items()}
        self.progress.record({"epoch": config.iterations, **means, "generator": sum(means.values())})
        self.progress.report(config.iterations, config.iterations)

    def loss(self, noise: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the weighted terms of the generator's loss, those of weight 0 left out."""
        config = self.config
        made = self.generator(noise, labels)
        logits = self.teacher.member_logits(made)
        weights = self.weights[:, labels]
        terms = {"ce": weighted_cross_entropy(logits, labels, weights, config.ce_form)}
        if config.diversity_weight:
            terms["diversity"] = config.diversity_weight * diversity(noise, made)
        return terms

    def _labels_and_weights(self) -> tuple[Tensor, Tensor]:
        """Return the classes to draw from [H], and the weights w of the clients [M, C]."""
        job, config = self.job, self.config
        every = torch.arange(job.num_classes)
        equal = torch.full((len(job.uploads), job.num_classes), 1.0 / len(job.uploads))
        if config.labels == "uniform" and config.weights == "uniform":
            return every, equal
        counts = [upload.label_counts for upload in job.uploads if upload.label_counts is not None]
        if len(counts) < len(job.uploads):
            silent = [upload.client for upload in job.uploads if upload.label_counts is None]
            self.progress.record(
                {"note": f"no label-counts from {', '.join(silent)}: all classes and clients weigh the same"}
            )
            return every, equal
        most = torch.tensor(counts).max(0).values
        held = every[most > 0] if config.labels == "held" else every
        begun = [[FIRST + count for count in row] for row in counts]
        return held if len(held) else every, class_weights(begun) if config.weights == "counts" else equal


def _generator_spec(job: Job) -> GeneratorSpec:
    config: FedGenConfig = job.config
    return GeneratorSpec(
        level=config.level,
        noise=config.noise,
        latent=config.latent,
        classes=job.num_classes,
        width=config.generator_width,
        shape=job.input_shape,
        batch=config.local_batch_size,
        weight=gamma(job.server_round),
        epochs=LOCAL_EPOCHS,
    )


METHOD = Method(
    name="fed-gen",
    title="FedGen",
    source="Zhu et al., ICML 2021, as in Zhang et al., CVPR 2022",
    config=FedGenConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE}),
    check=lambda job: check_level(job, job.config.level, table="fed-gen"),
    in_rounds=InRounds(describe_generator, draws_by_round=True, learning_rate="generator-lr"),
)
