"""Local training that is so many steps long, in place of whole epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from client_app.training.local import Epoch, Training, epoch_lengths, train
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization
from strategies.core.errors import DataError

FAST = ClientConfig(epochs=4, batch_size=8, lr=0.1, device="cpu")


def toy(count: int = 48) -> ImageData:
    rng = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (count, 1, 6, 6), generator=rng, dtype=torch.uint8)
    return ImageData(images, torch.arange(count) % 3)


def model(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.BatchNorm1d(12) if norm else nn.ReLU(), nn.Linear(12, 3))


def run(
    config: ClientConfig, *, net: nn.Module | None = None, data: ImageData | None = None
) -> tuple[nn.Module, list[Epoch]]:
    net, seen = net or model(), list[Epoch]()
    half = Normalization((0.5,), (0.5,))
    last = train(net, Training(data or toy(), config, half, seed=1, report=seen.append))
    assert last == seen[-1]
    return net, seen


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    ("steps", "size", "lengths"),
    [
        (0, 48, [6, 6, 6, 6]),
        (6, 48, [6]),
        (13, 48, [6, 6, 1]),
        (2, 48, [2]),
        (5, 17, [2, 2, 1]),  # the leftover of one image is no step
        (3, 18, [3]),
        (3, 1, [1, 1, 1]),
        (0, 1, [1, 1, 1, 1]),
    ],
)
def test_steps_when_counted_take_the_place_of_the_epochs(steps: int, size: int, lengths: list[int]) -> None:
    config = replace(FAST, steps=steps)

    assert epoch_lengths(config, size) == lengths
    net, epochs = run(config, net=model(norm=size > 1), data=toy(size))

    assert isinstance(net, nn.Sequential)
    assert [epoch.number for epoch in epochs] == list(range(1, len(lengths) + 1))
    assert size == 1 or net[2].num_batches_tracked == sum(lengths)


def test_momentum_when_forgotten_after_every_epoch_equals_training_that_starts_anew() -> None:
    config = replace(FAST, epochs=2, batch_size=16)
    forgetful, _ = run(replace(config, momentum_epochs=1), data=toy(16))
    apart = model()
    for _ in range(2):  # a batch of all images is the same in any order
        run(replace(config, epochs=1), net=apart, data=toy(16))

    torch.testing.assert_close(weights(forgetful), weights(apart), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights(run(config, data=toy(16))[0]), weights(forgetful), atol=1e-4)
    kept, _ = run(replace(config, momentum_epochs=2), data=toy(16))
    assert torch.equal(weights(kept), weights(run(config, data=toy(16))[0]))


@pytest.mark.parametrize("config", [replace(FAST, batch_size=1), FAST, replace(FAST, steps=3)])
def test_a_batch_that_is_too_small_for_batch_normalisation_is_refused_in_one_line(config: ClientConfig) -> None:
    count = 5 if config.batch_size == 1 else 1

    with pytest.raises(DataError, match="a batch has 1 of the client's examples, .* needs more: must be at least 2"):
        run(config, net=model(norm=True), data=toy(count))
    run(config, data=toy(count))


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(DataError, match="there are no examples to train on"):
        run(replace(FAST, steps=3), data=toy(0))
