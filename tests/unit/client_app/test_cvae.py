from __future__ import annotations

import numpy as np
import pytest
import torch

from client_app.training.fedcvae_ens import divergence, reconstruction
from fl_app.models.client_nets import Cvae, Decoder
from strategies.core.errors import OptionError


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_noise_is_shifted_and_scaled_by_the_posterior() -> None:
    model = Cvae(10, (1, 16, 16), latent=4).eval()
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
