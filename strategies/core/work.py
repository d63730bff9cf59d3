"""The work of a server stage, counted exactly: image passes through the teacher, steps of optimisers, questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KEY = "counted-work"  # of a snapshot's state


@dataclass
class Work:
    """The counts so far; a pass is one image through one member.

    Attributes:
        teacher_forward: Passes through the teacher. Passes that a backward pass repeats to save memory do not count.
        teacher_backward: Passes of a gradient through the teacher, to the image.
        generator_steps: Steps of a generator's optimiser, or of images that are optimised themselves.
        bfloat16_steps: The generator's steps in bfloat16 among them.
        exchanges: Questions to the clients after their upload, each with the clients' answers.
    """

    teacher_forward: int = 0
    teacher_backward: int = 0
    student_steps: int = 0
    generator_steps: int = 0
    bfloat16_steps: int = 0
    exchanges: int = 0

    def passed(self, logits: Tensor) -> None:
        """Count the passes that made logits [M, B, C], and those of their gradient once it comes."""
        passes = logits.shape[0] * logits.shape[1]
        self.teacher_forward += passes

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
