from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from client_app.training.local import Epoch, Training, epoch_lengths, train
from client_app.training.losses import sharpen
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization
from strategies.core.errors import ComputeError, DataError, OptionError
from strategies.core.gpu import Graphed

HALF = Normalization((0.5,), (0.5,))
FAST = ClientConfig(epochs=4, batch_size=8, lr=0.1, device="cpu")


def toy(count: int = 48, classes: int = 3) -> ImageData:
    """Images whose brightest row tells the class."""
    rng = torch.Generator().manual_seed(5)
    images = torch.randint(0, 60, (count, 1, 6, 6), generator=rng, dtype=torch.uint8)
    labels = torch.arange(count) % classes
    images[torch.arange(count), 0, labels] = 220
    return ImageData(images, labels)


def model(seed: int = 0, *, norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    hidden = [nn.BatchNorm1d(12)] if norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), *hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 3))


def run(
    config: ClientConfig = FAST,
    *,
    net: nn.Module | None = None,
    data: ImageData | None = None,
    seed: int = 1,
    augmentation: str = "none",
) -> tuple[nn.Module, list[Epoch]]:
    net = net or model()
    seen: list[Epoch] = []
    last = train(net, Training(data or toy(), config, HALF, augmentation, seed, seen.append))
    assert last == seen[-1]
    return net, seen


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_training_draws_augmentation_and_dropout_from_the_seed_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    net = model(dropout=0.5)
    torch.set_rng_state(before)

    first = weights(run(net=net, augmentation="crop-flip")[0])

    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again = model(dropout=0.5)
    torch.manual_seed(1234)
    assert torch.equal(first, weights(run(net=again, augmentation="crop-flip")[0]))
    for other in ("none", "flip"):
        assert not torch.equal(first, weights(run(net=model(dropout=0.5), augmentation=other)[0]))


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_one_step_is_clipped_sgd_by_hand_and_of_sam_with_the_gradient_uphill(rho: float) -> None:
    data, net, reference = toy(8), model(), model()
    images = (data.images.float() / 255 - 0.5) / 0.5
    config = replace(FAST, epochs=1, lr=0.5, momentum=0.0, weight_decay=0.1, clip=0.01, sam_rho=rho)

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(reference(images), data.labels)

    def gradients() -> tuple[list[torch.Tensor], torch.Tensor]:
        found = list(torch.autograd.grad(loss(), list(reference.parameters())))
        return found, torch.cat([g.flatten() for g in found]).norm()

    before, (first, length) = loss().item(), gradients()
    with torch.no_grad():
        for p, g in zip(reference.parameters(), first, strict=True):
            p += rho * g / length
    steepest, norm = gradients()

    _, (epoch,) = run(config, net=net, data=data)

    assert norm > config.clip
    for moved, start, g in zip(net.parameters(), model().parameters(), steepest, strict=True):
        step = config.lr * (g * config.clip / norm + config.weight_decay * start)
        torch.testing.assert_close(moved, start - step, rtol=1e-4, atol=1e-6)
    assert epoch.loss == pytest.approx(before, rel=1e-5)


def test_sam_s_first_pass_leaves_the_weights_to_the_bit() -> None:
    data, net = toy(8), model()

    def loss() -> torch.Tensor:
        return nn.functional.cross_entropy(net(data.images.float()), data.labels)

    loss().backward()
    sharpen(net, loss, rho=0.3)

    assert torch.equal(weights(net), weights(model()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_lr": 0.001}, "client.final-lr' is 0.001: must be 0 unless 'client.schedule' is 'cosine'"),
        ({"final_lr": 0.1, "schedule": "cosine"}, "client.final-lr' is 0.1: must be at most 'client.lr', 0.01"),
    ],
)
def test_a_final_learning_rate_that_no_schedule_reaches_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        ClientConfig(**change)


def test_a_leftover_of_one_image_when_there_is_batch_norm_is_left_out_of_its_epoch() -> None:
    data = toy(17)

    _, epochs = run(replace(FAST, lr=1e-9), net=model(norm=True), data=data)

    # Of 17 images each epoch sees 16 and averages over those.
    assert all((16 * epoch.accuracy) % 1 == pytest.approx(0.0, abs=1e-4) for epoch in epochs)
    assert all(0.8 < epoch.loss < 1.6 for epoch in epochs)


def test_device_that_the_process_does_not_see_is_refused_by_the_setting() -> None:
    with pytest.raises(
        ComputeError, match=r"'cuda:99' is missing.* set 'client.device', or the node's own 'device', to"
    ):
        run(replace(FAST, device="cuda:99"))
    with pytest.raises(OptionError, match="setting 'client.device' is 'toaster': must be auto, cpu"):
        replace(FAST, device="toaster")


# So many steps, in place of whole epochs.


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


# The same on a GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": 0.0, "momentum": 0.0},
        {"clip": 0.01, "weight_decay": 0.1},
        {"optimizer": "adam", "lr": 0.01},
        {"schedule": "cosine", "final_lr": 0.01},
        {"momentum_epochs": 2},
        {"loss": "ldam", "lr": 0.01},
        {"sam_rho": 0.05},
        {"batch_size": 9},
        {"steps": 7},
    ],
)
def test_gpu_trains_what_the_cpu_trains(changes: dict[str, Any], norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.core.gpu._failed", [])
    captures = noted_captures(monkeypatch)
    (usual, seen), (other, seen_there) = (
        run(replace(FAST, device=device, **changes), net=model(norm=norm), augmentation="crop-flip")
        for device in ("cpu", "cuda")
    )
    assert all(value.device.type == "cpu" for value in other.state_dict().values())
    # A bias before a normalisation has no gradient but rounding, which Adam blows up to whole steps.
    away = 0.1 if norm and "optimizer" in changes else 1e-4
    torch.testing.assert_close(weights(other), weights(usual), rtol=1e-3, atol=away)
    assert [epoch.accuracy for epoch in seen_there] == pytest.approx([epoch.accuracy for epoch in seen], abs=0.03)
    assert all(captures)
    assert bool(captures) is not bool({"sam_rho", "momentum_epochs"} & changes.keys())


def noted_captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that will hold whether each capture of a graph went well."""
    captures: list[bool] = []
    captured = Graphed._capture

    def noted(self: Graphed, kind: Any, arguments: Any) -> bool:
        captures.append(captured(self, kind, arguments))
        return captures[-1]

    monkeypatch.setattr(Graphed, "_capture", noted)
    return captures
