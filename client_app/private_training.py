"""Local training under differential privacy: DP-SGD on one client's examples.

Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, https://arxiv.org/abs/1607.00133, Algorithm 1.
Symbols: q = L / N -> Plan.rate; sigma -> Plan.noise; C -> privacy.clip; T -> Plan.steps; L -> the mean batch size.
Where: Algorithm 1 -> train; one step -> _private_gradient; the accountant -> plan_of.
Deviations: gradients of single examples and their clipping are opacus' (GradSampleModule, DPOptimizer), and so is the
    accountant, of Renyi differential privacy (Mironov 2017; Mironov, Talwar, Zhang 2019), whose bound is tighter than
    the paper's moments. A step follows SGD with momentum, or Adam, on the noisy gradient: that is post-processing.

Sampling and noise are made of the operating system's random bytes, never of the run's seed, which the server knows:
with it the server could draw the same noise and subtract it. So no training is the same twice. torch's own generators
would not do either: they take 32 bits of a seed, which can be tried out. What is drawn per image beside it,
augmentation and dropout, is seeded by the system too, anew for every step.

A model's loss and accuracy on its examples are outside the guarantee: they are neither computed nor told.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from client_app.local_training import Epoch, epoch_lengths, optimizer_of, schedule_of
from client_app.node import Asked
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization, augment, normalize
from fl_app.privacy import PrivacyConfig, mixes_examples
from strategies.core.errors import UploadError

# Gradients of single examples are held at once up to so many bytes.
HELD = 2**28


@dataclass(frozen=True)
class Plan:
    """How a budget is spent.

    Attributes:
        rate: Probability q that an example is in a batch, in (0, 1].
        steps: Number of steps T.
        batch: Mean size of a batch.
        noise: Standard deviation of the noise on a sum of clipped gradients, in units of the clipping norm.
        epsilon: What these steps spend, at most the budget.
    """

    rate: float
    steps: int
    batch: int
    noise: float
    epsilon: float


def check_question(privacy: PrivacyConfig, asked: Asked) -> None:
    """Refuse a question whose answer would be outside the guarantee.

    Raises:
        UploadError: Says which.
    """
    if not privacy.on:
        return
    refused = {
        f"task {asked.task!r}": asked.task != "classifier",
        "a second round of uploads": asked.server_round != 1,
        "answers on examples that are kept from training": bool(asked.holdout),
        "the ranges of activations, for INT8": asked.calibrate,
        "an upload to a run without an id, which cannot be sent again": not asked.run_id,
    }
    for what, found in refused.items():
        if found:
            refuse(privacy, what)


def refuse(privacy: PrivacyConfig, what: str) -> None:
    """Refuse what is outside the guarantee, if there is to be one.

    Raises:
        UploadError: Says so.
    """
    if privacy.on:
        raise UploadError(f"the server asks for {what}: allowed with privacy.epsilon is one upload of a classifier")


def plan_of(privacy: PrivacyConfig, config: ClientConfig, size: int) -> Plan:
    """Return how a client spends its budget.

    Args:
        privacy: The budget.
        config: Epochs or steps, and batch size.
        size: The client's examples N.

    Raises:
        UploadError: opacus is missing, or no noise is enough.
    """
    if importlib.util.find_spec("opacus") is None:
        raise UploadError(
            "privacy.epsilon needs opacus, which is not installed here: pip install 'oneshot-fl[privacy]'"
        )
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier

    if privacy.delta * size >= 1:
        raise UploadError(f"privacy.delta is {privacy.delta:g}: must be less than 1 / {size}, its examples")
    batch, steps = min(config.batch_size, size), sum(epoch_lengths(config, size))
    rate, accountant = batch / size, RDPAccountant()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bound that could be tighter holds all the same
        try:
            noise = get_noise_multiplier(
                target_epsilon=privacy.epsilon,
                target_delta=privacy.delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=min(0.01, privacy.epsilon / 100),
            )
        except ValueError as error:
            raise UploadError(f"privacy.epsilon is {privacy.epsilon:g}: must be more; opacus: {error}") from error
        accountant.history = [(noise, rate, steps)]
        return Plan(rate, steps, batch, noise, accountant.get_epsilon(delta=privacy.delta))


def train(
    model: nn.Module,
    data: ImageData,
    config: ClientConfig,
    *,
    privacy: PrivacyConfig,
    normalization: Normalization,
    augmentation: str,
    report: Callable[[Epoch], None] | None = None,
) -> float:
    """Train a classifier in place; see the module.

    Args:
        model: Its weights are the start; it has no batch normalisation.
        data: Examples [N, ...] with labels [N].
        config: Epochs or steps, batch size and optimiser. Its loss is cross-entropy; its clipping is not used.
        privacy: The budget and the clipping norm.
        normalization: The model's input space.
        augmentation: A key of :data:`fl_app.data.AUGMENTATIONS`.
        report: Called after every epoch, with its number alone.

    Returns:
        The epsilon that was spent, for the budget's delta.

    Raises:
        UploadError: opacus is missing, or the model or the budget do not allow it.
    """
    if mixes_examples(model):
        raise UploadError("privacy.epsilon: the model has batch normalisation, by which examples see each other")
    plan = plan_of(privacy, config, len(data.labels))
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    base = optimizer_of(model, config)
    lengths = epoch_lengths(config, len(data.labels))
    cosine = schedule_of(base, config, len(lengths))
    module = GradSampleModule(model, loss_reduction="sum")
    # opacus clips; the noise is ours, and so the sum is not divided there.
    clipping = DPOptimizer(
        base, noise_multiplier=0.0, max_grad_norm=privacy.clip, expected_batch_size=None, loss_reduction="sum"
    )

    def prepare(images: torch.Tensor) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(secrets.randbits(63))
        return normalize(augment(images, augmentation, drawn), *normalization)

    model.train()
    with torch.random.fork_rng(devices=[]), hooked(model):
        for number, length in enumerate(lengths, start=1):
            for _ in range(length):
                torch.manual_seed(secrets.randbits(63))  # dropout
                chosen = (system_uniform(len(data.labels)) <= plan.rate).nonzero().flatten()
                _private_gradient(module, clipping, data, chosen, prepare=prepare, plan=plan)
                base.step()
            if cosine is not None:
                cosine.step()
            if report is not None:
                report(Epoch(number, float("nan"), float("nan")))
    module.to_standard_module()
    model.zero_grad(set_to_none=True)
    return plan.epsilon


@contextmanager
def hooked(model: nn.Module) -> Iterator[None]:
    """Let opacus' hooks see what a layer gives: no activation may overwrite it meanwhile."""
    overwriting = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in overwriting:
        module.inplace = False  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # images need no gradient
            yield
    finally:
        for module in overwriting:
            module.inplace = True  # type: ignore[assignment]


def _private_gradient(
    module: nn.Module,
    clipping: Any,
    data: ImageData,
    chosen: torch.Tensor,
    *,
    prepare: Callable[[torch.Tensor], torch.Tensor],
    plan: Plan,
) -> None:
    """Leave ``(sum_i clip(g_i) + sigma C z) / L`` as the gradient of every parameter.

    Args:
        module: Leaves every example's gradient at each parameter.
        clipping: opacus' optimiser, which clips and sums them.
        data: Examples [N, ...].
        chosen: Those of this batch [b]; b may be 0.
        prepare: From stored examples to the model's input.
        plan: Mean batch size L and noise sigma.
    """
    parameters = clipping.params
    for parameter in parameters:
        parameter.summed_grad = torch.zeros_like(parameter)
    most = max(1, HELD // (4 * sum(parameter.numel() for parameter in parameters)))
    for part in torch.split(chosen, most) if len(chosen) else ():
        for parameter in parameters:
            parameter.grad_sample = None
        logits = module(prepare(data.images[part]))
        F.cross_entropy(logits, data.labels[part], reduction="sum").backward()  # type: ignore[no-untyped-call]
        for parameter in parameters:  # what is no number cannot be clipped, and would show in the sum through all noise
            parameter.grad_sample.nan_to_num_(0.0, 0.0, 0.0)
        clipping.clip_and_accumulate()
    for parameter in parameters:
        drawn = system_normal(parameter.numel()).view_as(parameter) * (plan.noise * clipping.max_grad_norm)
        # Rounded once, after the noise is in: what a sum of floats could tell by its last digits is lost.
        parameter.grad = ((parameter.summed_grad.double() + drawn) / plan.batch).to(parameter.dtype)
        parameter.grad_sample = parameter.summed_grad = None


def system_uniform(count: int) -> torch.Tensor:
    """Return numbers of the operating system's entropy, uniform in (0, 1], float64 [count]."""
    words = np.frombuffer(os.urandom(8 * count), dtype=np.uint64)
    return torch.from_numpy(((words >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53)


def system_normal(count: int) -> torch.Tensor:
    """Return numbers of the operating system's entropy, standard normal by Box and Muller, float64 [count]."""
    pairs = -(-count // 2)
    radius, angle = torch.sqrt(-2.0 * torch.log(system_uniform(pairs))), 2.0 * math.pi * system_uniform(pairs)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count]
