"""The shim is tried on a stand-in torchvision in a fresh process, for each way in which the import can end."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fl_app.vision import torchvision

ROOT = Path(__file__).parents[3]
# As torchvision behaves without its compiled operators: the first missing one fails its import, then the second.
BROKEN = """
import torch
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        raise RuntimeError(f"operator torchvision::{name} does not exist")
"""
REPORT = """
import torch
from fl_app.vision import torchvision
print(torchvision.__name__, [hasattr(torch.ops.torchvision, name) for name in ("nms", "qnms")])
"""


def imported_with(stand_in: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import the shim in a new process where torchvision is the given text."""
    (folder / "torchvision.py").write_text(stand_in)
    path = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n"
    return subprocess.run([sys.executable, "-c", path + REPORT], capture_output=True, text=True, check=False)


def test_torchvision_through_the_shim_has_models_and_datasets() -> None:
    assert torchvision.__name__ == "torchvision"
    assert torchvision.datasets.FashionMNIST
    assert torchvision.transforms.functional.hflip(torch.tensor([[[1.0, 2.0]]])).tolist() == [[[2.0, 1.0]]]
    assert torchvision.ops.box_area(torch.tensor([[0.0, 0.0, 2.0, 3.0]])).item() == 6.0


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="only a CPU build of torch is mended")
def test_import_without_compiled_operators_declares_both(tmp_path: Path) -> None:
    ended = imported_with(BROKEN, tmp_path)
    assert ended.stdout.split(maxsplit=1) == ["torchvision", "[True, True]\n"], ended.stderr
