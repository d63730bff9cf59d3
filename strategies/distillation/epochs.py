"""The frame of every server stage that works in epochs: resume, observe, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.seeds import seeded_torch
from ..method import Job, Outcome, Progress, Snapshot, State
from ..teacher.student import observe
from .pool import Pool, quantize

SHOWN = 64  # images in the report


@contextmanager
def clock_block(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of a block to a phase."""
    begin = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - begin


@dataclass
class Stage:
    """The state that changes from epoch to epoch and that a checkpoint therefore holds.

    It contains no random states: an epoch draws only from generators derived from the seed and its own number.

    Attributes:
        modules: The trained modules; ``"student"`` is the result.
        store_images: :attr:`~strategies.method.Job.store_images`: how many images the outcome holds; 0 for a sample.
        seconds: Phase -> seconds spent since the start of this process.
        steps: The number of steps of each epoch of this process so far; the last may be under way.
    """

    modules: dict[str, nn.Module]
    optimizer: torch.optim.Optimizer
    pool: Pool
    made: int = 0
    store_images: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)

    def clock(self, phase: str) -> AbstractContextManager[None]:
        """Add the seconds of a block to a phase."""
        return clock_block(self.seconds, phase)

    def ticks(self, progress: Progress, epoch: int, epochs: int, *, of: int = 0) -> Callable[[], None]:
        """Begin the steps of an epoch, and return the function to call after each, which reports it.

        Args:
            epoch: The epoch, from 0.
            epochs: T.
            of: The number of steps; 0: as many as in the epoch before, and more if it had more than the one before.
        """
        before = self.steps[-2:]
        expected = of or (2 * before[-1] - before[0] if before else 0)
        self.steps.append(0)

        def tick() -> None:
            self.steps[-1] += 1
            progress.report(epoch, epochs, None, (self.steps[-1], expected and max(expected, self.steps[-1])))

        return tick

    def sample(self) -> Tensor | None:
        """Return :func:`sample_images` images of the pool, a sample from the last epoch; None without any."""
        if not len(self.pool):
            return None
        images = self.pool.columns["images"]
        return sample_images(images if self.store_images else images[-self.made :], self.store_images)

    def snapshot(self, epoch: int) -> Snapshot:
        """Return copies of the state after ``epoch`` epochs, and mark the pool's rows as saved."""
        states = {name: copy_weights(module) for name, module in self.modules.items()}
        snapshot = Snapshot(
            epoch, {"modules": states, "optimizer": _optimizer_state(self.optimizer)}, self.pool.unsaved()
        )
        self.pool.mark_saved()
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of an equally built stage."""
        for name, module in self.modules.items():
            module.load_state_dict(snapshot.state["modules"][name])
        _restore_optimizer(self.optimizer, snapshot.state["optimizer"])
        self.pool.restore(snapshot.appended)


def run_epochs(
    job: Job, progress: Progress, stage: Stage, *, epochs: int, step: Callable[[int], Mapping[str, float]]
) -> Outcome:
    """Run the remaining epochs; the outcome is the last epoch's student.

    Args:
        progress: Supplies the snapshot to resume from; receives reports, rows and checkpoints.
        epochs: T.
        step: One epoch, given its number from 0; returns the numbers to record. Its draws from torch's global random
            state are seeded by its number.
    """
    snapshot = progress.resume()
    if snapshot is not None:
        stage.restore(snapshot)
    for epoch in range(snapshot.step if snapshot else 0, epochs):
        with seeded_torch(job.seed, "epoch", epoch):
            values = dict(step(epoch))
        done = epoch + 1
        with stage.clock("observer"):
            values |= observe(job, done, stage.modules["student"])
        progress.record({"epoch": done, **values})
        progress.report(done, epochs, values, (0, stage.steps[-1] if stage.steps else 0))
        progress.checkpoint(lambda done=done: stage.snapshot(done))  # type: ignore[misc]
    return Outcome(student=copy_weights(stage.modules["student"]), timings=stage.seconds, images=stage.sample())


def sample_images(images: Tensor, most: int = 0) -> Tensor:
    """Return the images that an outcome holds, on the CPU.

    Args:
        images: [N, ch, H, W], uint8 or pixels in [0, 1].
        most: :attr:`~strategies.method.Job.store_images`: the number of the last images, as they are. 0: up to
            64 of all, at equal distances, in uint8.
    """
    if most:
        return images[-most:].cpu().clone()
    chosen = images[torch.linspace(0, len(images) - 1, min(SHOWN, len(images))).long()]
    return (chosen if chosen.dtype == torch.uint8 else quantize(chosen)).cpu()


def learning_rate(schedule: str, lr: float, position: float, epochs: float) -> float:
    """Return the learning rate of a step.

    ``"one-cycle"`` is that of Smith, Topin, *Super-convergence*, 2019, in the form of torch's OneCycleLR.

    Args:
        schedule: ``"constant"``: lr. ``"cosine"``: ``lr (1 + cos(pi epoch / epochs)) / 2``, equal in all steps of an
            epoch. ``"one-cycle"``: half a cosine up from lr / 25 to lr in the first tenth of all steps, then half a
            cosine down to lr / 250,000.
        position: The number of epochs done before the step, the current one as a fraction.
        epochs: T; the last one may be a part of an epoch.
    """
    if schedule == "one-cycle":
        done, up = position / epochs, 0.1
        low, share = (lr / 25, done / up) if done < up else (lr / 25e4, (1 - done) / (1 - up))
        return low + (lr - low) * (1 - math.cos(math.pi * share)) / 2
    return lr * (1 + math.cos(math.pi * math.floor(position) / epochs)) / 2 if schedule == "cosine" else lr


def copy_weights(module: nn.Module) -> State:
    """Return a module's state dict in contiguous copies on the CPU."""
    return {name: _copy(tensor) for name, tensor in module.state_dict().items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of the per-parameter states in the order of parameters; the config determines the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": [
            {k: _copy(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
            for p in parameters
        ]
    }


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, state in zip(parameters, saved["parameters"], strict=True):
        optimizer.state[parameter] = {key: _like(parameter, value) for key, value in state.items()}
        # A graph reads the count on the GPU. A parameter without gradients has none.
        if "step" in state and any(group.get("capturable") for group in optimizer.param_groups):
            optimizer.state[parameter]["step"] = state["step"].to(parameter.device)


def _like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a state tensor on its parameter's device, in its memory layout: another layout may round differently."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value).requires_grad_(False)
    return value
