from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from client_app.cvae import KL_WEIGHT, divergence, reconstruction, train
from client_app.local_training import Epoch
from fl_app.config import ClientConfig
from fl_app.data import ImageData, Normalization, open_split
from fl_app.models.cvae import SIDES, Cvae, Decoder
from strategies.core.errors import DataError, OptionError

HALF = Normalization((0.5,), (0.5,))


def cvae(shape: tuple[int, int, int] = (1, 16, 16), *, latent: int = 4) -> Cvae:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Cvae(10, shape, latent=latent)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", SIDES)
def test_images_when_encoded_and_decoded_keep_their_shape(channels: int, side: int) -> None:
    model = cvae((channels, side, side), latent=7)
    images, labels = uniform(5, channels, side, side), torch.arange(5)

    logits, mean, log_variance = model(images, labels, torch.zeros(5, 7))

    assert logits.shape == images.shape
    assert mean.shape == log_variance.shape == (5, 7)


def test_layers_are_those_of_the_specification() -> None:
    sizes = {key: tuple(value.shape) for key, value in cvae((1, 32, 32), latent=10).named_parameters()}

    convolutions = [shape for key, shape in sizes.items() if len(shape) == 4]
    linear = [shape for key, shape in sizes.items() if len(shape) == 2]
    assert convolutions == [
        (32, 1, 4, 4), (32, 32, 4, 4), (64, 32, 4, 4), (64, 64, 4, 4),
        (64, 64, 4, 4), (64, 32, 4, 4), (32, 32, 4, 4), (32, 1, 4, 4),
    ]  # fmt: skip
    assert linear == [(500, 256), (20, 500), (256, 20)]
    assert [layer.eps for layer in cvae().decoder.modules() if isinstance(layer, torch.nn.BatchNorm2d)] == [1e-3] * 3


def test_the_decoder_takes_noise_and_label_and_its_image_depends_on_both() -> None:
    decoder = cvae().decoder.eval()
    noise = uniform(2, 4)

    pairs = [(noise, [3, 4]), (noise, [5, 6]), (-noise, [3, 4])]
    with torch.no_grad():
        first, other_label, other_noise = (decoder(z, torch.tensor(labels)) for z, labels in pairs)

    assert decoder.latent == 4
    assert not torch.allclose(first, other_label)
    assert not torch.allclose(first, other_noise)


def test_noise_is_shifted_and_scaled_by_the_posterior() -> None:
    model = cvae().eval()
    images, labels, noise = uniform(3, 1, 16, 16), torch.arange(3), uniform(3, 4, seed=1)

    with torch.no_grad():
        logits, mean, log_variance = model(images, labels, noise)
        wanted = model.decoder(mean + torch.sqrt(torch.exp(log_variance)) * noise, labels)

    torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 64, 64), (2, 16, 16), (3, 16, 32), (13, 1, 1), (1, 1, 64)])
def test_examples_of_another_shape_are_refused(shape: tuple[int, int, int]) -> None:
    for make in (Cvae, Decoder):
        with pytest.raises(OptionError, match=r"a CVAE cannot take examples of shape .*: must be .* 16 or 32 pixels"):
            make(10, shape, latent=4)


def test_error_of_grey_images_is_the_cross_entropy_of_their_pixels() -> None:
    logits, images = 4 * uniform(3, 1, 2, 2) - 2, uniform(3, 1, 2, 2, seed=1)

    p, x = 1 / (1 + np.exp(-logits.double().numpy())), images.double().numpy()
    wanted = -(x * np.log(p) + (1 - x) * np.log(1 - p)).sum() / 3

    assert float(reconstruction(logits, images)) == pytest.approx(wanted, rel=1e-6)


def test_error_of_coloured_images_is_the_squared_one() -> None:
    logits, images = 4 * uniform(3, 3, 2, 2) - 2, uniform(3, 3, 2, 2, seed=1)

    p, x = 1 / (1 + np.exp(-logits.double().numpy())), images.double().numpy()

    assert float(reconstruction(logits, images)) == pytest.approx(((p - x) ** 2).sum() / 3, rel=1e-6)


def test_divergence_when_integrated_by_numbers_is_the_formula() -> None:
    means, log_variances = np.array([[0.0, 1.0], [-0.5, 0.3]]), np.array([[0.0, -1.0], [0.4, 0.2]])

    grid = np.linspace(-12, 12, 20001)
    total = 0.0
    for mean, log_variance in zip(means.ravel(), log_variances.ravel(), strict=True):
        log_q = -0.5 * ((grid - mean) ** 2 / np.exp(log_variance) + log_variance + np.log(2 * np.pi))
        log_p = -0.5 * (grid**2 + np.log(2 * np.pi))
        total += float((np.exp(log_q) * (log_q - log_p)).sum() * (grid[1] - grid[0]))

    found = float(divergence(torch.tensor(means), torch.tensor(log_variances)))
    assert found == pytest.approx(total / 2, rel=1e-6)
    assert float(divergence(torch.zeros(2, 3), torch.zeros(2, 3))) == 0.0


SETTINGS = ClientConfig(epochs=3, optimizer="adam", lr=0.001, batch_size=32, clip=0.0, latent=4)


def trained(seed: int = 0, count: int = 64, **changes: Any) -> tuple[Cvae, list[Epoch]]:
    data = open_split("digits", "train").take(torch.arange(count))
    model, config = cvae(), ClientConfig(**{**vars(SETTINGS), **changes})
    epochs: list[Epoch] = []
    train(model, data, config, normalization=HALF, augmentation="none", seed=seed, report=epochs.append)
    return model, epochs


def test_training_brings_the_loss_down_and_tells_no_accuracy() -> None:
    _, epochs = trained(epochs=6)

    losses = [epoch.loss for epoch in epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]
    assert all(np.isnan(epoch.accuracy) for epoch in epochs)


def test_training_with_the_same_seed_gives_the_same_bits_and_with_another_others() -> None:
    states = [trained(seed, epochs=1)[0].state_dict() for seed in (0, 0, 1)]

    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert not all(torch.equal(value, states[2][key]) for key, value in states[0].items())


def test_the_divergence_counts_with_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def at(weight: float) -> Cvae:
        monkeypatch.setattr("client_app.cvae.KL_WEIGHT", weight)
        return trained()[0]

    assert KL_WEIGHT == 1.0  # as published
    free, held = at(0.0), at(50.0)
    images = open_split("digits", "train").take(torch.arange(64)).images / 255

    with torch.no_grad():
        free_kl, held_kl = (divergence(*model.eval().encoder(images).chunk(2, dim=1)) for model in (free, held))

    assert held_kl < 0.5 * free_kl


@pytest.mark.parametrize(("count", "batch"), [(1, 32), (64, 1)])
def test_a_client_without_a_batch_of_two_is_refused(count: int, batch: int) -> None:
    data = ImageData(torch.zeros(count, 1, 16, 16, dtype=torch.uint8), torch.zeros(count).long())
    config = ClientConfig(**{**vars(SETTINGS), "batch_size": batch})

    with pytest.raises(DataError, match=rf"on {count} examples in batches of {batch}: both must be at least 2"):
        train(cvae(), data, config, normalization=HALF, augmentation="none", seed=0)
