"""The moments of generated images: those of named data sets, and what models with batch normalisation tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flboost_fakes import SMALL, C, job
from method_fakes import Book
from torch import nn

from strategies.core.facts import PIXELS
from strategies.distillation.moments import NEIGHBOURS, ImageMoments, estimate_moments
from strategies.method import Normalization, Silent
from strategies.methods.flboost import METHOD


def bare(channels: int = 3, padding: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Conv2d(channels, 9, 3, padding=padding, bias=False), nn.BatchNorm2d(9), nn.Flatten())


def trained_on(model: nn.Module, mean: torch.Tensor, deviation: float) -> nn.Module:
    """Give a model the running statistics of images with these moments and the guessed correlations, by loops."""
    weight = next(model.parameters()).detach().double().numpy()
    norm: Any = model[1]  # type: ignore[index]
    places = [(c, u, v) for c in range(weight.shape[1]) for u in range(3) for v in range(3)]
    for o, filters in enumerate(weight):
        norm.running_mean[o] = sum(filters[c].sum() * float(mean[c]) for c in range(weight.shape[1]))
        total = 0.0
        for c, u, v in places:
            for d, p, q in places:
                near = NEIGHBOURS ** (abs(u - p) + abs(v - q) + (c != d))
                total += filters[c, u, v] * filters[d, p, q] * near * deviation**2
        norm.running_var[o] = total
    return model


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        ("fashion-mnist", [-0.428], [0.706]),
        ("mnist", [-0.739], [0.616]),
        ("cifar10", [-0.017, -0.036, -0.107], [0.494, 0.487, 0.523]),
        ("svhn", [-0.125, -0.112, -0.054], [0.396, 0.402, 0.394]),
    ],
)
def test_moments_of_a_data_set_are_those_of_its_pixels_in_the_input_space(
    name: str, mean: list[float], deviation: list[float]
) -> None:
    halves = (0.5,) * len(mean)
    one = job(input_shape=(len(mean), 8, 8), normalization=Normalization(halves, halves))

    found = ImageMoments.of(one, name, Silent())

    np.testing.assert_allclose(found.mean.flatten(), mean, atol=6e-4)
    np.testing.assert_allclose(found.deviation.flatten(), deviation, atol=6e-4)
    own = ImageMoments.of(replace(one, normalization=Normalization(*PIXELS[name])), name, Silent())
    assert (own.mean == 0).all()
    assert (own.deviation == 1).all()


def test_moments_are_estimated_from_the_running_statistics_of_models() -> None:
    mean = torch.tensor([-0.3, 0.1, 0.4])
    models = [trained_on(bare(), mean, 0.7), nn.Linear(2, 2)]

    found = estimate_moments(models, 3)

    torch.testing.assert_close(found[0].float(), mean, rtol=0, atol=1e-5)
    assert found[1].item() == pytest.approx(0.7, rel=1e-5)


def test_moments_that_models_tell_are_noted_with_the_guess() -> None:
    def told() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, C)
        )

    rows = Book()
    uploads = tuple(
        replace(upload, read=lambda: {key: value + 0.1 * value.ndim for key, value in told().state_dict().items()})
        for upload in job().uploads
    )
    one = job(replace(SMALL, moments="models"), uploads=uploads, builders={"net": told}, start=told().state_dict())

    METHOD.fit(one, rows)

    [note] = [row["note"] for row in rows.rows if "moments" in str(row) or "mean" in row.get("note", "")]
    assert "which takes neighbouring pixels to be correlated by 0.9" in note
