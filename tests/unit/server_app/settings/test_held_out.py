from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fl_app.data import ImageData
from server_app.settings import server_data
from server_app.settings.server_data import HeldOut
from strategies.combiners.combiners import Weighted
from strategies.method import Normalization
from strategies.teacher.ensemble import Ensemble


class Brightest(nn.Module):
    """Says the class whose pixel is the brightest, of images [B, 1, 1, C]."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = nn.Parameter(torch.tensor(sign))
        self.modes: list[bool] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.modes.append(self.training)
        return self.sign * images.flatten(1)


@pytest.fixture
def seven(monkeypatch: pytest.MonkeyPatch) -> HeldOut:
    """Return seven images of three pixels; the brightest pixel is the label of the first four only."""
    monkeypatch.setattr(server_data, "BATCH", 3)
    bright = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    images = torch.full((7, 1, 1, 3), 10, dtype=torch.uint8)
    images[torch.arange(7), 0, 0, bright] = 200
    labels = torch.tensor([0, 1, 2, 0, 2, 0, 1])
    return HeldOut(ImageData(images, labels), Normalization((0.5,), (0.5,)))


@pytest.mark.parametrize("mode", [True, False])
def test_accuracy_when_counted_by_hand_is_the_same_and_the_mode_is_restored(seven: HeldOut, mode: bool) -> None:
    model = Brightest().train(mode)

    assert seven.accuracy(model) == 57.14  # 4 of 7
    assert seven(3, model) == {"accuracy": 57.14}
    assert set(model.modes) == {False}
    assert model.training is mode


@pytest.mark.parametrize(("metric", "scale"), [("balanced-accuracy", 100), ("log-loss", 1)])
def test_a_stage_is_observed_by_the_score_that_heads_the_tables(seven: HeldOut, metric: str, scale: float) -> None:
    score = seven.scored(Brightest())["scores"][metric]["value"]

    found = replace(seven, metric=metric)(3, Brightest())

    assert found == {"accuracy": 57.14, metric: pytest.approx(scale * score, abs=1e-4)}


def test_images_when_given_to_a_model_are_normalised_and_none_is_left_out(seven: HeldOut) -> None:
    pairs = list(seven.batches(torch.device("cpu")))

    images = torch.cat([images for images, _ in pairs])
    torch.testing.assert_close(images, (seven.data.images / 255 - 0.5) / 0.5)
    assert torch.equal(torch.cat([labels for _, labels in pairs]), seven.data.labels)


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (3, [3]), (4, [4]), (6, [3, 3]), (7, [3, 4]), (8, [3, 3, 2])])
def test_a_single_last_image_joins_the_batch_before(seven: HeldOut, count: int, sizes: list[int]) -> None:
    twice = ImageData(seven.data.images.repeat(2, 1, 1, 1)[:count], seven.data.labels.repeat(2)[:count])
    some = HeldOut(twice, seven.normalization)

    assert [len(labels) for _, labels in some.batches(torch.device("cpu"))] == sizes
    assert some.num_batches == len(sizes)


def test_members_when_scored_together_have_the_scores_they_have_alone(seven: HeldOut) -> None:
    members = [Brightest(), Brightest(-1.0), Brightest(3.0)]
    ensemble = Ensemble(members, Weighted([1.0, 2.0, 3.0]))

    alone, together = seven.member_scores(ensemble)

    own = [seven.scored(member) for member in members]
    assert alone == [{key: value for key, value in found.items() if key != "effects"} for found in own]
    assert together == seven.scored(ensemble)
    assert alone[0] != alone[1]
