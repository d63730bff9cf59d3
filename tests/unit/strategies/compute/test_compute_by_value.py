"""User code that travels by value."""

import functools
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import cloudpickle as ray_cloudpickle

import strategies.method
from strategies.compute.by_value import dumps
from strategies.core.errors import ComputeError

cloudpickle: Any = ray_cloudpickle
loads = pickle.loads
SCALE = 3.0


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return helper(x)


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


LOAD = "import pickle, sys; built = pickle.load(sys.stdin.buffer)(); print(float(built(__import__('torch').ones(()))))"


def elsewhere(pickled: bytes, folder: Path) -> float:
    """Load and call in a process that cannot import this file."""
    done = subprocess.run([sys.executable, "-c", LOAD], input=pickled, capture_output=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return float(done.stdout)


@pytest.mark.slow
def test_dumps_with_a_users_class_loads_where_its_module_is_absent(tmp_path: Path) -> None:
    assert elsewhere(dumps("the builder", functools.partial(Scaled), cloudpickle), tmp_path) == 3.0


def test_dumps_with_library_and_installed_code_goes_by_reference() -> None:
    assert loads(dumps("x", strategies.method.Silent, cloudpickle)) is strategies.method.Silent
    assert loads(dumps("x", torch.nn.Linear, cloudpickle)) is torch.nn.Linear


def test_dumps_with_a_lock_in_a_closure_names_the_value_and_its_owner() -> None:
    lock = threading.Lock()

    def builder() -> Any:
        return lock

    with pytest.raises(ComputeError) as caught:
        dumps("the builder of architecture 'cnn'", functools.partial(builder), cloudpickle)
    text = str(caught.value)
    assert text.startswith("the builder of architecture 'cnn' (test_compute_by_value.")
    assert "builder) cannot be sent to a Ray actor: TypeError" in text
    assert "lock" in text
    assert "\n" not in text
