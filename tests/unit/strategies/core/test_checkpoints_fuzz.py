from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from strategies.core.checkpoints import read_checkpoint
from strategies.core.errors import UploadError


def test_an_archive_that_unpacks_to_far_more_than_it_is_is_refused_unread(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(4.0)}, stream)
    with zipfile.ZipFile(stream) as good, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as bad:
        for name in good.namelist():
            bad.writestr(name, bytes(2**26) if name.endswith("data/0") else good.read(name))

    with pytest.raises(UploadError, match=r"it is an archive that unpacks to \d+ bytes, far more than its own size"):
        read_checkpoint(tmp_path / "a.pt")
