"""The shipped server stages against the published loops, written a second time in plain PyTorch.

Both sides get the same weights and the same draws. The published loop draws in the order of its formulas, from the
random numbers that the shipped code derives for synthesis, reweighting and distillation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from published_loops import Settings
from published_models import load_in_order, plain_cnn5, plain_lenet5
from side_by_side import EPOCHS, Case, distance, plain_state, same_draws, shipped_job, shipped_server
from torch import Tensor, nn

from fl_app.models import build

CLOSE = 1e-5
# Two generator steps; pool images as they are made, because one that lies next to a border of 8 bits may round to
# either side.
TINY = Settings(epochs=4, steps=2, batch=12, latent=8, classes=4, mu=0.05, eight_bits=False)


def net() -> nn.Module:
    """A smooth model: at the kink of a ReLU, rounding would decide a gradient, and with it the sign of a pixel."""
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip


def tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for tensor in module.state_dict().values() if tensor.is_floating_point()]


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("method", ["dense", "co-boosting"])
def test_an_epoch_from_one_identical_state_ends_in_the_same_student_and_weights(method: str, augment: bool) -> None:
    it = Case(method, (1, 8, 8), net, net, clients=3, settings=replace(TINY, augment=augment))
    job = shipped_job(it)
    server = shipped_server(it, job)
    server.epoch(0)
    state = plain_state(it, server, job)
    before = [tensor.clone() for tensor in tensors(state.student)]

    losses = server.epoch(1)
    EPOCHS[method](state, it.settings, 1, same_draws(it))

    assert distance(tensors(server.learner.student), tensors(state.student)) < CLOSE
    assert distance(before, tensors(state.student)) > 100 * CLOSE  # the epoch changed it
    assert distance([server.stage.pool.columns["images"]], [state.images]) < CLOSE
    assert torch.equal(server.stage.pool.columns["labels"], state.labels)
    # A sum of terms of opposite signs: rounding, which differs between processors, is as large as in them.
    assert losses["generator"] == pytest.approx(state.losses["generator"], rel=CLOSE, abs=CLOSE)
    assert losses["distillation"] == pytest.approx(state.losses["distillation"], rel=CLOSE)
    if method == "co-boosting":
        assert state.weights.tolist() == pytest.approx(server.combiner.weights.tolist(), rel=CLOSE)
        assert state.weights.tolist() != pytest.approx([1 / 3] * 3, abs=0.01)  # they moved


@pytest.mark.parametrize(("name", "plain", "shape"), [("cnn5", plain_cnn5, 3), ("lenet5", plain_lenet5, 1)])
def test_the_published_models_equal_the_zoo_s(name: str, plain: Any, shape: int) -> None:
    torch.manual_seed(4)
    shipped = build(name, num_classes=10, input_shape=(shape, 32, 32)).eval()
    images = torch.randn(3, shape, 32, 32)

    assert distance([shipped(images)], [load_in_order(plain(), shipped.state_dict())(images)]) < CLOSE
