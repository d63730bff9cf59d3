"""The driver's end of the wire: replays the method's calls in the actor on the driver's Progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..method import Progress, Snapshot
from .task import unpack

if TYPE_CHECKING:
    from ..method import State

T = TypeVar("T")


class Relay:
    """A Progress with its three optional members: ``save``, ``tick`` and ``interval_s``.

    Args:
        progress: The driver's Progress.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._unsaved: State = {}

    @property
    def interval_s(self) -> float:
        """The least number of seconds between two checkpoints."""
        return float(getattr(self._progress, "interval_s", 20.0))

    def tick(self) -> None:
        """Let the driver do its other duties."""
        if tick := getattr(self._progress, "tick", None):
            tick()

    def ticking(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, with a tick before each."""
        for item in items:
            self.tick()
            yield item

    def resume(self) -> Snapshot | None:
        """Return the last checkpoint written."""
        self._unsaved = {}
        return self._progress.resume()

    def deliver(self, kind: str, args: tuple[Any, ...]) -> None:
        """Repeat a call, which the method made in the actor, on the Progress.

        Args:
            kind: ``"report"``, ``"record"`` or ``"checkpoint"``.
            args: Its arguments; for a checkpoint, the packed snapshot.
        """
        if kind == "report":
            self._progress.report(*args)
        elif kind == "record":
            self._progress.record(*args)
        else:
            self._checkpoint(unpack(*args))

    def _checkpoint(self, snapshot: Snapshot) -> None:
        if save := getattr(self._progress, "save", None):
            save(snapshot)
            return
        # A Progress without ``save`` may decline; the rows would be lost, because the method sends them only once.
        snapshot = replace(snapshot, appended=_join_snapshots(self._unsaved, snapshot.appended))
        self._unsaved = dict(snapshot.appended)

        def take() -> Snapshot:
            self._unsaved = {}
            return snapshot

        self._progress.checkpoint(take)


def _join_snapshots(old: State, new: Mapping[str, Any]) -> State:
    import torch

    return old | {name: torch.cat([old[name], rows]) if name in old else rows for name, rows in new.items()}
