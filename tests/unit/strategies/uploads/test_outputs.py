"""Finite weights whose model answers with numbers that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_app.models import builders
from strategies.core.errors import UploadError
from strategies.uploads.outputs import check_outputs

SHAPE = (1, 8, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


def test_weights_whose_outputs_overflow_are_refused() -> None:
    state = {key: torch.full_like(value, 3e38) for key, value in net().state_dict().items()}

    with pytest.raises(UploadError, match=r"outputs for normal noise are not \(largest value 3e\+38\)"):
        check_outputs("net", state, net, SHAPE)
    with pytest.raises(UploadError, match="outputs for normal noise are not"):
        check_outputs("net+unknown", state, net, SHAPE)
    check_outputs("cvae-decoder", state, net, SHAPE)


def test_trained_weights_pass_and_global_random_state_stays() -> None:
    before = torch.get_rng_state()

    check_outputs("net", dict(net().state_dict()), net, SHAPE)

    assert not torch.equal(before, torch.get_rng_state())  # the models of this test drew from it
    before = torch.get_rng_state()
    check_outputs("net", {key: value * 1e3 for key, value in STATE.items()}, net, SHAPE)
    assert torch.equal(before, torch.get_rng_state())


STATE = dict(net().state_dict())


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 16, 16), (5, 1, 1), (1, 1, 12)])
def test_no_untrained_model_of_the_zoo_is_refused(shape: tuple[int, int, int]) -> None:
    models = builders(2, shape)
    small = models.keys() & {"lenet5", "logistic", "mlp", "text-bag"}
    assert small
    for name in small:
        check_outputs(name, dict(models[name]().state_dict()), models[name], shape)
