"""A user's cache of features on the own disk: a later run with another penalty, projection or budget reads them.

A file holds the backbone's raw features of one list of examples. Its name is a digest of the feature function before
the projection and of the examples. The folder and its files are open to this user alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strategies.core.places import make_private

# Flower's own logger, so that its lines reach the log of the run.
LOG = getLogger("flwr")

MIB = 2**20
SUFFIX = ".npy"
Rows = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class FeatureCache:
    """The files of cached features of a client, or of a server's held-out images.

    Attributes:
        folder: The folder of the files, made when the first one is written.
        most_mib: The size of all files together; the oldest are removed first; 0 for no cache.
    """

    folder: Path
    most_mib: float

    def read(self, key: str, shape: tuple[int, int]) -> Rows | None:
        """Return features [N, d] in float32, mapped from the disk; None if they are missing or damaged."""
        path = self.folder / f"{key}{SUFFIX}"
        try:
            found: Rows = np.load(path, mmap_mode="r", allow_pickle=False)
            os.utime(path)
        except (OSError, ValueError):
            return None
        return found if found.shape == shape and found.dtype == np.float32 else None

    @contextlib.contextmanager
    def writing(self, key: str, shape: tuple[int, int]) -> Iterator[Rows | None]:
        """Yield an array [N, d] on the disk, which becomes a file of the cache if the block succeeds.

        It is None where the cache has no room for it, or the disk refuses it.
        """
        size = 4 * shape[0] * shape[1]
        if size == 0 or size > self.most_mib * MIB:
            yield None
            return
        temporary = self.folder / f".{key}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            make_private(self.folder)
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            rows: Rows = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
        except OSError as error:
            LOG.warning("features are not cached: %s", error)
            yield None
            return
        try:
            yield rows
            rows.flush()  # type: ignore[attr-defined]
            temporary.replace(self.folder / f"{key}{SUFFIX}")
            self._shrink()
        finally:
            temporary.unlink(missing_ok=True)

    def _shrink(self) -> None:
        files = sorted(self.folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in files)
        for path in files:
            if total <= self.most_mib * MIB + len(files) * 4096:  # each file has a header
                return
            total -= path.stat().st_size
            path.unlink(missing_ok=True)


def key_of(function: str, images: torch.Tensor) -> str:
    """Return the name of the features of some examples.

    Args:
        function: The fields of the feature function before projection and normalisation.
        images: The decoded examples, in order.
    """
    digest = hashlib.sha256(function.encode())
    digest.update(f" {tuple(images.shape)} {images.dtype}".encode())
    for part in torch.split(images, 1024):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()
