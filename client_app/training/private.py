"""Local training under differential privacy: DP-SGD on one client's examples.

Paper: Abadi et al., Deep Learning with Differential Privacy, CCS 2016, https://arxiv.org/abs/1607.00133, Algorithm 1.
Symbols: q = L / N -> Plan.rate; sigma -> Plan.noise; C -> privacy.clip; T -> Plan.steps; L -> the mean batch size.
Where: Algorithm 1 -> train; one step -> _private_gradient; the accountant -> plan_privacy.
Deviations: opacus computes per-sample gradients, clips them (GradSampleModule, DPOptimizer), and accounts
    by Renyi differential privacy (Mironov 2017; Mironov, Talwar, Zhang 2019). Its bound is tighter than the paper's
    moments. SGD with momentum, or Adam, steps on the noisy gradient, which is post-processing.

Sampling and noise come from the operating system's entropy, never from the run's seed (:mod:`strategies.core.seeds`).
Hence no two trainings are the same. Augmentation and dropout are seeded by the system too, at every step.

A model's loss and accuracy on its examples are outside the guarantee: they are neither computed nor sent.
"""

from __future__ import annotations

import importlib.util
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from client_app.training.local import Epoch, Training, epoch_lengths, forget_momentum, optimizer_of, schedule_of
from fl_app.config import ClientConfig
from fl_app.data import ImageData
from fl_app.privacy import PrivacyConfig, mixes_examples
from fl_app.project import one_line
from strategies.core import refusals
from strategies.core.facts import MODEL_ERRORS
from strategies.core.seeds import system_normal, system_uniform

# Orders of Renyi divergence beyond opacus' own. With those, up to 63, no noise meets epsilon = log(1 / delta) / 63.
HIGH_ORDERS = (64, 80, 96, 128, 192, 256, 384, 512, 768, 1024)
# Bytes: the most memory for per-sample gradients at once.
MAX_GRAD_BYTES = 2**28


@dataclass(frozen=True)
class PrivacyPlan:
    """How a training spends its privacy budget.

    Attributes:
        rate: Probability q that an example is in a batch, in (0, 1].
        steps: Number of steps T.
        batch: Mean size of a batch.
        noise: Standard deviation of the noise on a sum of clipped gradients, in units of the clipping norm.
        epsilon: The budget that these steps spend, at most ``privacy.epsilon``.
    """

    rate: float
    steps: int
    batch: int
    noise: float
    epsilon: float


def plan_privacy(privacy: PrivacyConfig, config: ClientConfig, size: int) -> PrivacyPlan:
    """Return how a client spends its privacy budget; refuse one that no noise meets, or without opacus."""
    if importlib.util.find_spec("opacus") is None:
        raise refusals.no_opacus()
    if privacy.delta * size >= 1:
        raise refusals.bad_setting(
            "privacy.delta", f"{privacy.delta:g}", f"less than 1 / {size}, the client's number of examples"
        )
    batch, steps = min(config.batch_size, size), sum(epoch_lengths(config, size))
    return PrivacyPlan(batch / size, steps, batch, *_noise(privacy.epsilon, privacy.delta, batch / size, steps))


@cache
def _noise(epsilon: float, delta: float, rate: float, steps: int) -> tuple[float, float]:
    """Return the least noise multiplier that keeps to the budget, and the epsilon that it spends."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.utils import get_noise_multiplier

    accountant, orders = RDPAccountant(), [*RDPAccountant.DEFAULT_ALPHAS, *HIGH_ORDERS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opacus warns that a bound could be tighter; the bound still holds
        try:
            noise = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
                epsilon_tolerance=min(0.01, epsilon / 100),
                alphas=orders,
            )
        except ValueError as error:
            raise refusals.bad_setting("privacy.epsilon", f"{epsilon:g}", f"larger; opacus: {error}") from error
        accountant.history = [(noise, rate, steps)]
        return noise, accountant.get_epsilon(delta=delta, alphas=orders)


def train(model: nn.Module, training: Training, privacy: PrivacyConfig) -> float:
    """Train a classifier in place under differential privacy, as the module describes.

    Args:
        model: Training starts from its weights; it must have no batch normalisation.
        training: Its loss is cross-entropy; its clipping and its seed are not used, and what it reports is NaN.

    Returns:
        The epsilon that was spent, for the budget's delta.

    Raises:
        UploadError: opacus is missing or does not know the model's layers, the model has batch normalisation, or the
            budget cannot be met.
    """
    data, config = training.data, training.config
    if mixes_examples(model):
        raise refusals.no_private_training("the model must have no batch normalisation, by which examples interact")
    plan = plan_privacy(privacy, config, len(data.labels))
    from opacus.optimizers import DPOptimizer

    base = optimizer_of(model, config)
    lengths = epoch_lengths(config, len(data.labels))
    cosine = schedule_of(base, config, len(lengths))
    module = _with_per_sample_gradients(model)
    # opacus only clips and sums; _private_gradient adds the noise and divides.
    clipping = DPOptimizer(
        base, noise_multiplier=0.0, max_grad_norm=privacy.clip, expected_batch_size=None, loss_reduction="sum"
    )

    def prepare(images: torch.Tensor) -> torch.Tensor:
        return training.prepare(images, torch.Generator().manual_seed(secrets.randbits(63)))

    model.train()
    with torch.random.fork_rng(devices=[]), prepare_for_hooks(model), _same_buffers(model):
        _try_out(module, clipping.params, prepare(_random_examples(data.images)))
        for number, length in enumerate(lengths, start=1):
            forget_momentum(base, config, number)
            for _ in range(length):
                torch.manual_seed(secrets.randbits(63))  # dropout
                _private_gradient(module, clipping, data, prepare=prepare, plan=plan)
                base.step()
            if cosine is not None:
                cosine.step()
            if training.report is not None:
                training.report(Epoch(number, float("nan"), float("nan")))
    module.to_standard_module()
    model.zero_grad(set_to_none=True)
    return plan.epsilon


@contextmanager
def prepare_for_hooks(model: nn.Module) -> Iterator[None]:
    """Switch in-place activations off, because opacus' hooks need each layer's output."""
    overwriting = [module for module in model.modules() if getattr(module, "inplace", False) is True]
    for module in overwriting:
        module.inplace = False  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # inputs need no gradient
            yield
    finally:
        for module in overwriting:
            module.inplace = True  # type: ignore[assignment]


def _private_gradient(
    module: nn.Module,
    clipping: Any,
    data: ImageData,
    *,
    prepare: Callable[[torch.Tensor], torch.Tensor],
    plan: PrivacyPlan,
) -> None:
    """Draw a batch [b], b perhaps 0, and set every parameter's gradient to ``(sum_i clip(g_i) + sigma C z) / L``."""
    parameters = clipping.params
    for parameter in parameters:
        parameter.summed_grad = torch.zeros_like(parameter)
    chosen = (system_uniform(len(data.labels)) <= plan.rate).nonzero().flatten()
    most = max(1, MAX_GRAD_BYTES // (4 * sum(parameter.numel() for parameter in parameters)))
    for part in torch.split(chosen, most) if len(chosen) else ():
        _set_per_sample_gradients(module, parameters, prepare(data.images[part]), data.labels[part])
        for parameter in parameters:  # NaN and infinity cannot be clipped, and no noise would hide them in the sum
            parameter.grad_sample.nan_to_num_(0.0, 0.0, 0.0)
        clipping.clip_and_accumulate()
    for parameter in parameters:
        drawn = system_normal(*parameter.shape) * (plan.noise * clipping.max_grad_norm)
        # Rounded once, after the noise is added, so the last digits of the sum reveal nothing; a double holds them all.
        parameter.grad = ((parameter.summed_grad.double() + drawn) / plan.batch).float().to(parameter.dtype)
        parameter.grad_sample = parameter.summed_grad = None


def _with_per_sample_gradients(model: nn.Module) -> Any:
    """Return the model as opacus' module, which computes per-sample gradients."""
    from opacus import GradSampleModule

    try:
        return GradSampleModule(model, loss_reduction="sum")
    except NotImplementedError as error:
        raise refusals.no_private_training(
            f"opacus cannot compute the per-sample gradients of this model: {one_line(error)}"
        ) from error


def _set_per_sample_gradients(
    module: nn.Module, parameters: list[Any], inputs: torch.Tensor, labels: torch.Tensor
) -> None:
    """Set every parameter's ``grad`` and its ``grad_sample`` [b, ...]; zeros where it has no part in the answer."""
    for parameter in parameters:
        parameter.grad = parameter.grad_sample = None
    F.cross_entropy(module(inputs), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad_sample = parameter.new_zeros(len(labels), *parameter.shape)


def _random_examples(images: torch.Tensor) -> torch.Tensor:
    """Return two random examples of the form of ``images``, always the same; texts are blank.

    Blank images would change few statistics, and the gradients of deep models with group norms overflow on them.
    """
    drawn = torch.rand(2, *images.shape[1:], generator=torch.Generator().manual_seed(0))
    return (drawn * (256 if images.dtype == torch.uint8 else 1)).to(images.dtype)


def _try_out(module: nn.Module, parameters: list[Any], inputs: torch.Tensor) -> None:
    """Refuse a model whose per-sample gradients opacus misses, or with statistics of them, by two examples."""
    try:
        with _same_buffers(module):
            _set_per_sample_gradients(module, parameters, inputs, torch.zeros(2, dtype=torch.int64))
        if any(parameter.grad_sample is None for parameter in parameters):
            raise ValueError("a function reads a layer's weights in place of the layer")
        for parameter in parameters:
            torch.testing.assert_close(parameter.grad_sample.sum(0), parameter.grad, rtol=1e-3, atol=1e-4)
    except MODEL_ERRORS as error:
        raise refusals.no_private_training(
            f"opacus cannot compute the per-sample gradients of this model: {one_line(error)}"
        ) from error


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose buffers a block changes, by values or by other tensors of the same names."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        if name not in before or not torch.equal(buffer, before[name]):
            raise refusals.no_private_training(
                f"training changes the model's buffer {name.removeprefix('_module.')!r}, which gets no noise: must be "
                "a model without statistics of its examples"
            )
