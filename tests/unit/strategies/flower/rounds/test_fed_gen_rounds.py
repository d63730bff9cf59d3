"""FedGen in rounds, on a grid of Python functions: the generator goes out, and comes into the clients' training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_fakes import CLASSES, SHAPE, Client, FakeGrid, equal, net, strategy, trains_in_rounds, weights
from flwr.app import ArrayRecord
from torch import nn

from strategies import Iterative, IterativeConfig
from strategies.client.corrections import LocalUpdate
from strategies.distillation.generator_spec import GeneratorSpec
from strategies.flower.rounds.refinement import Refiner

State = dict[str, torch.Tensor]
SMALL: dict[str, Any] = {
    "iterations": 3, "batch_size": 6, "latent": 5, "generator_width": 8, "local_batch_size": 6,
}  # fmt: skip


class Federation:
    """Two clients that train two steps, each on examples of two classes.

    Args:
        heed: Whether their loss has the terms that the request asks for.
    """

    def __init__(self, *, heed: bool = True) -> None:
        self.asked: list[tuple[str, Mapping[str, Any], Mapping[str, State]]] = []
        self._heed = heed

    def nodes(self) -> dict[int, Client]:
        return {5: self._client("alice", 1), 6: self._client("bob", 2)}

    def _client(self, name: str, seed: int) -> Client:
        inputs = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(seed))
        labels = torch.arange(8) % 2 + seed
        counts = torch.bincount(labels, minlength=CLASSES).tolist()

        def loss_of(model: nn.Module, update: LocalUpdate) -> torch.Tensor:
            logits = model(inputs)
            loss = nn.functional.cross_entropy(logits, labels)
            return loss + update.penalty(model, logits, labels) if self._heed else loss

        return trains_in_rounds(name, net, loss_of, steps=2, examples=8, label_counts=counts, asked=self.asked)


def result(run: Path, federation: Federation, *, refined: bool = True, rounds: int = 3, **changes: Any) -> State:
    refiner = Refiner.of("fed-gen", **{**SMALL, **changes}) if refined else None
    found: Any = strategy(Iterative, run, config=IterativeConfig(rounds=rounds), refiner=refiner)
    return dict(found.start(FakeGrid(federation.nodes()), ArrayRecord(weights(5))).arrays.to_torch_state_dict())


@pytest.mark.parametrize("level", ["features", "images"])
def test_generator_of_a_round_goes_out_with_the_next(tmp_path: Path, level: str) -> None:
    federation = Federation()
    state = result(tmp_path / "run", federation, level=level)
    assert all(bool(value.isfinite().all()) for value in state.values())
    for _, said, sent in federation.asked:
        number = said["server-round"]
        assert sorted(sent) == (["arrays"] if number == 1 else ["arrays", "generator"])
        assert any(key.startswith("generator-") for key in said) == (number > 1)
        if number > 1:
            spec = GeneratorSpec.read(said)
            assert spec.level == level
            assert spec.weight == pytest.approx(10.0 * 0.98 ** (number - 1))
            spec.build(72).load_state_dict(sent["generator"])
    assert [said["server-round"] for _, said, _ in federation.asked] == [1, 1, 2, 2, 3, 3]
    second, third = (federation.asked[place][2]["generator"] for place in (2, 4))
    assert equal(second, federation.asked[3][2]["generator"])
    assert not equal(second, third)
    assert third["norm0.num_batches_tracked"] == 6  # it has gone on, and not begun anew


def test_first_round_is_plain_and_so_are_all_with_clients_that_take_no_notice(tmp_path: Path) -> None:
    plain = result(tmp_path / "a", Federation(), refined=False, rounds=1)
    assert equal(result(tmp_path / "b", Federation(), rounds=1), plain)
    plain = result(tmp_path / "c", Federation(), refined=False)
    assert equal(result(tmp_path / "d", Federation(heed=False)), plain)
    assert not equal(result(tmp_path / "e", Federation()), plain)
