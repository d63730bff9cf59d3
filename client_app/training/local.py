"""Local training on one client's images.

The papers' settings are options of :class:`fl_app.config.ClientConfig`. Co-Boosting and DENSE use SGD 0.01, momentum
0.9 and cross-entropy; FENS uses SGD 0.0025 without momentum, cosine; Fed-Heart uses Adam. All upload the weights of the
last epoch. LDAM's loss is in :mod:`client_app.training.losses`, SAM in :mod:`client_app.training.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

from client_app.training.losses import loss_of, sharpen
from client_app.training.widened import widen
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization, augment, normalize
from fl_app.project import TRAINS, called, own_training, scores_in
from strategies.core.errors import DataError, OptionError
from strategies.core.gpu import Graphed, adam, has_hooks, resolve_device, sgd
from strategies.core.layout import fast_layout, tensors_of
from strategies.core.processor import keep_freed_memory
from strategies.core.scan import LOG
from strategies.core.seeds import derive_seed, seeded_torch


@dataclass(frozen=True)
class Epoch:
    """The figures of one epoch of training: its number from 1, mean training loss, and accuracy in [0, 1].

    The accuracy is NaN where the model predicts no labels. The loss is the minimised one, cross-entropy or LDAM; with
    SAM it is the loss of the first pass. With ``client.steps``, the last epoch may be shorter.
    """

    number: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Training:
    """What every local training takes beside the model.

    Attributes:
        data: Examples with labels [N]: images [N, ch, H, W], uint8 or float32 in [0, 1], or rows.
        config: Epochs or steps, batch size, loss, optimiser and device.
        normalization: The model's input space.
        augmentation: A key of :data:`fl_app.data.AUGMENTATIONS`, applied anew in every epoch.
        seed: Fixes the order of the examples, augmentation, noise and dropout.
        report: Called after every epoch.
    """

    data: ImageData
    config: ClientConfig
    normalization: Normalization
    augmentation: str = "none"
    seed: int = 0
    report: Callable[[Epoch], None] | None = None

    def prepare(self, images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Return images [B, ch, H, W], augmented and normalised."""
        return normalize(augment(images, self.augmentation, rng), *self.normalization)


def train(model: nn.Module, training: Training) -> Epoch:
    """Train a classifier in place, from its weights on the CPU, where they are again after; return the last epoch.

    Raises:
        ComputeError: This process does not see the GPU that the config names.
    """
    device = resolve_device(training.config.device, "'client.device', or the node's own 'device',")
    data = ImageData(training.data.images.to(device), training.data.labels.to(device))
    forward = widen(model) if device == "cpu" else model.to(device)
    criterion = loss_of(training.config, data.labels)

    def objective(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = forward(inputs)
        return criterion(logits, labels), hits(logits, labels)

    try:
        return minimise(model, replace(training, data=data), objective)
    finally:
        if device != "cpu":
            torch.cuda.empty_cache()  # the server stage may need what this process would keep


def train_by(name: str, model: nn.Module, data: TensorDataset, config: ClientConfig, *, seed: int) -> dict[str, float]:
    """Train a model in place by the function that ``model.train`` names, and return the numbers that it reports.

    It gets those of ``model`` (on the CPU), ``data``, ``config`` (the settings of the table ``client``), ``device`` and
    ``seed`` that its signature names. Torch's global generator is seeded around it.

    Raises:
        ComputeError: This process does not see the GPU that the config names.
        OptionError: It cannot be imported, needs other arguments, fails, or returns something else.
    """
    what, least = f"model.train {name!r}", seed % 2**32  # what numpy and scikit-learn take as a seed
    device = resolve_device(config.device, "'client.device', or the node's own 'device',")
    given = {"model": model, "data": data, "config": config, "device": device, "seed": least}
    with seeded_torch(seed, "own training"):
        found = called(own_training(name), given, what)
    model.to("cpu")
    if not (found is None or isinstance(found, Mapping)):
        raise OptionError(f"{what} returns {type(found).__name__}: {TRAINS}")
    try:
        return scores_in(found, what, LOG.warning) if found else {}
    except OptionError as error:  # which speaks of scores
        raise OptionError(f"{what} returns {str(found)[:80]}: {TRAINS}") from error


# Takes prepared images [B, ch, H, W] and labels [B]. Returns two scalars: the loss, and the number of images that the
# model labels correctly, NaN where it predicts no labels.
Objective = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Takes uint8 images [B, ch, H, W] and the generator of their augmentation; returns the objective's inputs.
Prepare = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the number of images that a model labels correctly, a scalar.

    Args:
        logits: [B, C].
        labels: [B].
    """
    return (logits.detach().argmax(1) == labels).sum()


def minimise(model: nn.Module, training: Training, objective: Objective, prepare: Prepare | None = None) -> Epoch:
    """Train a model in place for any objective, on the device of its weights; it is on the CPU after.

    On a GPU the steps are replayed as graphs, as :class:`strategies.core.gpu.Graphed` can. The order of the images and
    their augmentation are drawn as on a CPU.

    Args:
        model: Training starts from its weights.
        training: Its data are on the model's device.
        objective: The function to minimise.
        prepare: From stored examples to the objective's inputs, anew in every epoch; None for the training's own.

    Returns:
        The last epoch.

    Raises:
        DataError: There is no example, or a batch of one for a model whose batch normalisation needs two.
    """
    data, config, prepare = training.data, training.config, prepare or training.prepare
    if not len(data.labels):
        raise DataError("there are no examples to train on: must be at least 1")
    generator = torch.Generator().manual_seed(derive_seed(training.seed, "batches"))
    optimizer = optimizer_of(model, config)
    lengths = epoch_lengths(config, len(data.labels))
    cosine = schedule_of(optimizer, config, len(lengths))
    step = Graphed(
        _step(model, optimizer, objective, config), data.labels.device,
        # A graph calls no hook, and reads the optimiser's state where it lies.
        capture=not has_hooks(model) and not config.momentum_epochs,
        reads=partial(tensors_of, model),
    )  # fmt: skip
    fast_layout(model, data.images[:2].float())
    model.train()
    epoch = Epoch(0, float("nan"), 0.0)
    with seeded_torch(training.seed, "dropout"), keep_freed_memory():
        for number, length in enumerate(lengths, start=1):
            forget_momentum(optimizer, config, number)
            order = torch.randperm(len(data.labels), generator=generator).to(data.labels.device)
            epoch = _one_epoch(
                data, step, _batches(order, config)[:length], number=number,
                prepare=lambda images: prepare(images, generator),
            )  # fmt: skip
            if cosine is not None:
                cosine.step()
            if training.report is not None:
                training.report(epoch)
    model.to("cpu", memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return epoch


def optimizer_of(model: nn.Module, config: ClientConfig) -> torch.optim.Optimizer:
    """Return the optimiser of local training on a model's parameters."""
    if config.optimizer == "adam":
        return adam(model.parameters(), config.lr, config.weight_decay)
    return sgd(model.parameters(), config.lr, config.momentum, config.weight_decay)


def forget_momentum(optimizer: torch.optim.Optimizer, config: ClientConfig, number: int) -> None:
    """Forget the optimiser's momentum before an epoch, from 1, if ``client.momentum-epochs`` says so."""
    if config.momentum_epochs and (number - 1) % config.momentum_epochs == 0:
        optimizer.state.clear()


def schedule_of(
    optimizer: torch.optim.Optimizer, config: ClientConfig, epochs: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return the scheduler that changes the learning rate after every epoch; None for a constant rate."""
    if config.schedule != "cosine":
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, eta_min=config.final_lr)


# Takes a step on prepared images [B, ch, H, W] with labels [B]. Returns [2]: the loss, summed over the batch, and the
# number of images that the model labels correctly.
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, objective: Objective, config: ClientConfig) -> Step:
    """Return the function that does one step of the optimiser."""

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss, right = objective(inputs, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if config.sam_rho:
            sharpen(model, lambda: objective(inputs, labels)[0], rho=config.sam_rho)
        if config.clip:
            _clip(model, config.clip)
        optimizer.step()
        return torch.stack([loss.detach() * len(labels), right])

    return step


def _clip(model: nn.Module, largest: float) -> None:
    """Clip the gradient norm of all weights; on a CPU leave shorter gradients unwritten, unlike ``clip_grad_norm_``."""
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if norm.is_cuda or norm > largest:  # a GPU's step need not wait for the norm
        nn.utils.clip_grads_with_norm_(model.parameters(), largest, norm)


def epoch_lengths(config: ClientConfig, size: int) -> list[int]:
    """Return the number of steps of each epoch; with ``client.steps``, the last epoch has the remaining steps."""
    whole = len(_batches(torch.arange(size), config))
    if not config.steps:
        return [whole] * config.epochs
    epochs = math.ceil(config.steps / whole)
    return [whole] * (epochs - 1) + [config.steps - whole * (epochs - 1)]


def _batches(order: torch.Tensor, config: ClientConfig) -> list[torch.Tensor]:
    """Return the images of each step; a last batch of one is dropped, because batch norm needs two for a variance."""
    size = min(config.batch_size, max(1, len(order)))
    least = size if config.whole_batches else min(size, 2)
    return [chosen for chosen in torch.split(order, size) if len(chosen) >= least]


def _checked_step(step: Step, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Take a step, and turn torch's refusal of a single value per channel into a line for the client's owner."""
    try:
        return step(inputs, labels)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DataError(
            f"a batch has {len(labels)} of the client's examples, and the model's batch normalisation needs more: "
            "must be at least 2, by client.batch-size and the examples it has"
        ) from error


def _one_epoch(
    data: ImageData,
    step: Step,
    batches: list[torch.Tensor],
    *,
    number: int,
    prepare: Callable[[torch.Tensor], torch.Tensor],
) -> Epoch:
    total, seen = torch.zeros(2, device=data.labels.device), 0
    for chosen in batches:
        labels = data.labels[chosen]
        total += _checked_step(step, prepare(data.images[chosen]), labels)
        seen += len(labels)
    mean = total / seen
    return Epoch(number, float(mean[0]), float(mean[1]))
