"""The ranges that a client sends: of its own examples as they are, few enough, and the same ones again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from client_app.work import activation_ranges
from fl_app.data import ImageData, Normalization
from strategies.core.errors import UploadError
from strategies.uploads.quantization import INPUT

SPACE = Normalization((0.5,), (0.25,))


def data(count: int) -> ImageData:
    """Image i is all of grey level i, at most 255."""
    levels = torch.arange(count).clamp(max=255).to(torch.uint8)
    return ImageData(levels[:, None, None, None].expand(count, 1, 4, 4), torch.zeros(count, dtype=torch.int64))


class Watched(nn.Module):
    """Notes the inputs that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 2)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.fc(x.flatten(1))  # type: ignore[no-any-return]


def test_ranges_are_of_the_normalised_examples_as_they_are() -> None:
    model = Watched()
    ranges = activation_ranges(model, data(200), SPACE, seed=0)
    assert ranges[INPUT] == pytest.approx((-2.0, (199 / 255 - 0.5) / 0.25), abs=1e-5)
    seen = torch.cat(model.seen)
    logits = model.fc(seen.flatten(1))
    assert ranges["fc"] == pytest.approx((logits.min().item(), logits.max().item()), rel=1e-5)
    assert ((seen[:, 0, 0, 0] * 0.25 + 0.5) * 255).round().tolist() == list(range(200))
    assert model.training


def test_ranges_of_a_model_that_diverged_are_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    nn.init.constant_(model[1].weight, 3e38)  # type: ignore[arg-type]
    with pytest.raises(UploadError, match="layer '1' gives NaN or Inf"):
        activation_ranges(model, data(3), SPACE, seed=0)
