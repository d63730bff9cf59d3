"""The merged linear layers of a job's uploads, as an option of FedAvg and as a start of Tally's student."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.facts import UploadFacts
from strategies.core.seeds import initial_torch
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods import fedavg, tally

SHAPE, CLASSES, SEED = (1, 4, 4), 3, 5
STILL = tally.TallyConfig(
    epochs=1, student_lr=1e-12, images=8, batch_size=4, probes=8, start="merged", counts="noise-rows"
)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def began(seed: int = SEED) -> dict[str, Tensor]:
    with initial_torch(seed, "net"):
        return net().state_dict()


def job(config: Any, *, seed: int | None = SEED) -> Job:
    """Three clients whose first layers move for inputs of their own, and whose last layers move alike."""
    uploads = []
    for number in range(3):
        state = {key: value.clone() for key, value in began().items()}
        state["1.weight"][:, 4 * number : 4 * number + 4] += 0.5
        state["3.bias"] += 1.0
        uploads.append(Upload(UploadFacts(f"c{number}", "net", 10), partial(dict, state)))
    space = Normalization((0.5,), (0.5,))
    return Job(tuple(uploads), {"net": net}, "net", CLASSES, SHAPE, space, config, clients_seed=seed)


def test_fedavg_keeps_what_each_client_has_moved_alone() -> None:
    averaged, merged = (
        fedavg.fit(job(fedavg.FedAvgConfig(linear=how)), Silent()).student or {} for how in ("averaged", "merged")
    )
    moved = {name: (state["1.weight"] - began()["1.weight"]).mean() for name, state in
             (("averaged", averaged), ("merged", merged))}  # fmt: skip

    assert float(moved["averaged"]) == pytest.approx(0.5 * 12 / 16 / 3, rel=1e-4)
    # G_k has the one direction of the update: its share is 1 + a / d of the client's own, a / d of the others.
    share = 0.6 / 17
    assert float(moved["merged"]) == pytest.approx(0.5 * 12 / 16 * (1 + share) / (1 + 3 * share), rel=1e-4)
    torch.testing.assert_close(merged["3.bias"], averaged["3.bias"])  # equal updates are their mean


def test_tally_starts_from_merged_layers_but_the_last_which_counts_weigh() -> None:
    starts = {}
    for how in ("merged", "class-weighted"):
        starts[how] = tally.fit(job(replace(STILL, start=how)), Silent()).student or {}
    whole = fedavg.fit(job(fedavg.FedAvgConfig(linear="merged")), Silent()).student or {}

    torch.testing.assert_close(starts["merged"]["1.weight"], whole["1.weight"])
    torch.testing.assert_close(starts["merged"]["3.weight"], starts["class-weighted"]["3.weight"])
    assert not torch.allclose(starts["merged"]["1.weight"], starts["class-weighted"]["1.weight"])
