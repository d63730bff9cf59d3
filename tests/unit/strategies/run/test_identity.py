"""What a run's facts say of its models and settings, for those who read it later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.errors import OptionError
from strategies.method import Job, Normalization
from strategies.methods.fedavg import FedAvgConfig
from strategies.run.run_folder import open_run

JOB = Job((), {"model": lambda: nn.Linear(4, 2)}, "model", 2, (4, 1, 1), Normalization((0.0,), (1.0,)), FedAvgConfig())


def opened(folder: Path, model: Callable[[], nn.Module]) -> dict[str, Any]:
    with open_run(folder, "fedavg", replace(JOB, builders={"model": model}), identity={}, facts={}) as run:
        return dict(run.info)


def test_open_run_refuses_another_model_of_the_same_name_in_one_line(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    begun = opened(tmp_path / "run", lambda: nn.Linear(4, 2))
    assert begun["student-tensors"].startswith("2 tensors, 10 numbers, ")
    assert torch.equal(torch.random.get_rng_state(), state)
    others = [lambda: nn.Linear(2, 4), lambda: nn.Linear(4, 2).double(), lambda: nn.Sequential(nn.Linear(4, 2))]
    for other in others:
        with pytest.raises(OptionError, match="student-tensors is '2 tensors, .* began with '2 tensors, "):
            opened(tmp_path / "run", other)
    assert opened(tmp_path / "run", lambda: nn.Linear(4, 2)) == begun
