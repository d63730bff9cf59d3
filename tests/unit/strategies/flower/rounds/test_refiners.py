"""Every method of one model as the refiner of real rounds: it starts from what a round was combined to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from flower_fakes import ONE_THREAD, FakeGrid, named, net, strategy, weights
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

from strategies import FLBoost, Iterative, IterativeConfig, Refiner
from strategies.core.errors import OptionError
from strategies.flower.rounds.config import REFINERS
from strategies.method import METHODS, Need

State = Mapping[str, torch.Tensor]
# As little work as each method does at all; a rate of nearly 0 leaves the student where it starts.
SMALL: dict[str, dict[str, Any]] = {
    "flboost": {"iterations": 1, "batch_size": 4, "latent": 4, "student_steps": 1, "weight_decay": 0.0},
    "fed-gen": {"iterations": 1, "batch_size": 4, "latent": 4, "generator_width": 8},
    "dense": {"epochs": 1, "generator_steps": 1, "batch_size": 4, "synthesis_batch_size": 4, "latent": 4},
    "co-boosting": {"epochs": 1, "generator_steps": 1, "batch_size": 4, "synthesis_batch_size": 4, "latent": 4},
    "tally": {"epochs": 1, "images": 4, "batch_size": 4, "probes": 4},
    "f-dafl": {"epochs": 1, "generator_steps": 1, "batch_size": 4, "synthesis_batch_size": 4, "latent": 4},
    "f-adi": {"epochs": 1, "batch_size": 4, "inversion_steps": 1, "synthesis_batch_size": 4},
}  # fmt: skip
DATA_FREE = [name for name in REFINERS if Need.PROXY_IMAGES not in METHODS[name].needs]
ALMOST = 1e-9


def small(name: str, **changes: Any) -> Refiner:
    known = METHODS[name].config.__dataclass_fields__
    return Refiner.of(name, **{key: value for key, value in {**SMALL[name], **changes}.items() if key in known})


def clients() -> dict[int, Any]:
    counts = ([4, 3, 2, 1], [1, 2, 3, 4], [5, 0, 0, 5])
    return {5 + k: named(f"c{k}", k, label_counts=row) for k, row in enumerate(counts)}


def result(run_dir: Path, refiner: Refiner | None, *, teacher: str = "method") -> State:
    options = replace(ONE_THREAD, teacher=teacher)
    run: Any = strategy(Iterative, run_dir, config=IterativeConfig(rounds=2), refiner=refiner, options=options)
    arrays = run.start(FakeGrid(clients()), ArrayRecord(weights(5))).arrays
    return dict(arrays.to_torch_state_dict())


def test_all_data_free_methods_are_tried() -> None:
    assert sorted(SMALL) == sorted(DATA_FREE)


@cache
def plain() -> State:
    """Return the weights after two rounds without a refiner."""
    with TemporaryDirectory() as folder:
        return result(Path(folder) / "run", None)


@pytest.mark.parametrize("name", DATA_FREE)
def test_a_refiner_starts_from_the_round_s_model_and_moves_it(tmp_path: Path, name: str) -> None:
    still = result(tmp_path / "still", small(name, student_lr=ALMOST))
    parameters = [key for key, _ in net().named_parameters()]
    assert all(torch.allclose(still[key], plain()[key], atol=1e-6) for key in parameters)
    moved = result(tmp_path / "moved", small(name, student_lr=0.1))
    same = all(torch.equal(moved[key], plain()[key]) for key in parameters)
    assert same == (name == "fed-gen")  # its generator teaches the clients, not the model


def test_tally_teaches_a_refiner_that_is_there_and_distils(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="options.teacher is 'tally': must be 'method' in rounds without a refiner"):
        result(tmp_path, None, teacher="tally")
    with pytest.raises(OptionError, match="method 'fed-gen' does not distil an ensemble"):
        result(tmp_path, small("fed-gen"), teacher="tally")
    around = strategy(FLBoost, tmp_path / "around", base=FedAvg(), options=replace(ONE_THREAD, teacher="tally"))
    assert around.job.teacher == "tally"
