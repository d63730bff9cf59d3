"""The work of a server stage, counted exactly: image passes through the teacher, steps, questions, multiplications."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from .facts import MODEL_ERRORS, run_on_blanks

if TYPE_CHECKING:
    from torch import Tensor, nn

SMALL = 10_000_000  # multiplications of one example's forward pass; LeNet-5 has 0.4 million, CNN5 20 to 30

KEY = "counted-work"  # of a snapshot's state


@dataclass
class Work:
    """The counts so far; a pass is one image through one member.

    Attributes:
        teacher_forward: Passes through the teacher. Passes that a backward pass repeats to save memory do not count.
        teacher_backward: Passes of a gradient through the teacher, to the image.
        bfloat16_passes: The passes through the teacher in bfloat16 among them.
        generator_steps: Steps of a generator's optimiser, or of images that are optimised themselves.
        bfloat16_steps: The generator's steps in bfloat16 among them.
        exchanges: Questions to the clients after their upload, each with the clients' answers.
    """

    teacher_forward: int = 0
    teacher_backward: int = 0
    bfloat16_passes: int = 0
    student_steps: int = 0
    generator_steps: int = 0
    bfloat16_steps: int = 0
    exchanges: int = 0

    def passed(self, logits: Tensor, bf16: bool = False) -> None:
        """Count the passes that made logits [M, B, C], and those of their gradient once it comes."""
        passes = logits.shape[0] * logits.shape[1]
        self.teacher_forward += passes
        self.bfloat16_passes += passes * bf16

        def backward(_: Tensor) -> None:
            self.teacher_backward += passes

        if logits.requires_grad:
            logits.register_hook(backward)  # type: ignore[no-untyped-call]

    def generator_stepped(self, bf16: bool = False) -> None:
        """Count a step of a generator.

        Args:
            bf16: Whether the generator computed in bfloat16.
        """
        self.generator_steps += 1
        self.bfloat16_steps += bf16

    def include(self, counts: Mapping[str, int]) -> None:
        """Add counts of an earlier process."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + int(count))

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


_CURRENT: ContextVar[Work | None] = ContextVar("work", default=None)


def work() -> Work:
    """Return the counts of the stage that runs; outside of a stage fresh counts, which are lost."""
    return _CURRENT.get() or Work()


@contextmanager
def count_work(counts: Work) -> Iterator[Work]:
    """Count the work of a block."""
    token = _CURRENT.set(counts)
    try:
        yield counts
    finally:
        _CURRENT.reset(token)


class Counting:
    """A Progress whose snapshots carry the counts, so that a resumed stage has those of its earlier processes."""

    def __init__(self, progress: Any, counts: Work) -> None:
        self._counts, self._progress = counts, progress
        self.report, self.record = progress.report, progress.record

    def resume(self) -> Any:
        """Return the method's snapshot, and take over the counts that came with it."""
        snapshot = self._progress.resume()
        if snapshot is None:
            return None
        self._counts.include(snapshot.state[KEY])
        return replace(snapshot, state=snapshot.state["state"])

    def checkpoint(self, take: Callable[[], Any]) -> None:
        """Offer a checkpoint with the counts."""

        def with_counts() -> Any:
            snapshot = take()
            return replace(snapshot, state={KEY: self._counts.as_dict(), "state": snapshot.state})

        self._progress.checkpoint(with_counts)


def count_multiplications(model: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Count the multiplications of a forward pass for one example, of layers with a weight alone; 0 if it fails."""
    import torch

    found = 0

    def count(layer: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal found
        weight = layer.weight
        found += output[0].numel() * weight[0].numel() if isinstance(weight, torch.Tensor) and weight.dim() > 1 else 0

    kinds = (torch.nn.Linear, torch.nn.modules.conv._ConvNd)
    handles = [layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, kinds)]
    with torch.no_grad(), suppress(*MODEL_ERRORS):  # the stage refuses it in better words
        run_on_blanks(model, input_shape)
    for handle in handles:
        handle.remove()
    return found
