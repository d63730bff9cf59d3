"""Cached scores of the same uploads on the same held-out images, which several methods share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from server_app.settings.held_out import HeldOut
from strategies.core.errors import StoreError
from strategies.run.files import read_json, write_json
from strategies.run.uploads import StoredWeights

if TYPE_CHECKING:
    from server_app.settings.own_scores import Scorer
    from strategies.method import Job

Scores = TypeVar("Scores")


class Keep(Protocol):
    """Returns scores, cached or computed."""

    def __call__(self, what: str, make: Callable[[], Scores]) -> Scores:
        """Return the scores of that name."""


def fresh(what: str, make: Callable[[], Scores]) -> Scores:  # noqa: ARG001  the signature of every Keep
    """Compute the scores and cache none."""
    return make()


class KeptScores:
    """A :class:`Keep` with a file.

    Cached scores hold for the same uploads, examples, student, normalisation, device and threads; for others they are
    computed again. Of two processes that write the file at once, one may lose what it wrote, and it is computed again.

    Args:
        path: The file; may be missing.
        job: The job with its stored uploads.
        held_out: The images of the scores.
    """

    def __init__(self, path: Path, job: Job, held_out: Scorer) -> None:
        self._path = path
        self._key = _key(job, held_out)

    def __call__(self, what: str, make: Callable[[], Scores]) -> Scores:
        """Return the scores of that name, JSON values; compute them if the file lacks them.

        If the file cannot be read or written, the scores are computed again.
        """
        if self._key is None:
            return make()
        kept = self._read().get(self._key, {})
        if what not in kept:
            kept[what] = make()
            found = self._read()  # again, since another process may have written meanwhile
            found.setdefault(self._key, {})[what] = kept[what]
            with suppress(StoreError):
                write_json(self._path, found)
        scores: Scores = kept[what]
        return scores

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = read_json(self._path) if self._path.exists() else {}
        except StoreError:
            return {}
        return found if isinstance(found, dict) else {}


def _key(job: Job, held_out: Scorer) -> str | None:
    """Return a digest of everything that determines the scores; None for uploads that are not stored."""
    if not isinstance(held_out, HeldOut):  # the data that a function reads are unknown
        return None
    uploads = []
    for upload in job.uploads:
        if not isinstance(upload.read, StoredWeights):
            return None
        uploads.append([upload.client, upload.architecture, upload.read.sha256, upload.num_examples])
    normalization = [held_out.normalization.mean, held_out.normalization.std]
    digest = hashlib.sha256(json.dumps([uploads, job.student, normalization, job.device, job.threads]).encode())
    for tensor in (held_out.data.images, held_out.data.labels):
        digest.update(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
