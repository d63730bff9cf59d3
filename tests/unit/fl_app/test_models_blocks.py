"""Classifiers cut into blocks, and FuseFL's narrow ResNet."""

from __future__ import annotations

import pytest
import torch

from fl_app.models import build
from fl_app.models.blocks import CUTS, cut
from fl_app.models.uploaded import uploaded_builders
from strategies.core.errors import OptionError

BOTH = [(name, blocks) for name, cuts in CUTS.items() for blocks in cuts if name != "resnet18"]  # as the narrow one


@pytest.mark.parametrize(("name", "blocks"), BOTH)
def test_cut_model_has_the_blocks_and_the_logits_of_the_whole(name: str, blocks: int) -> None:
    model = build(name, num_classes=4, input_shape=(3, 16, 16)).eval()
    images = torch.randn(2, 3, 16, 16)
    expected = model(images)

    parts = cut(name, model, blocks)

    assert [child for child, _ in parts.named_children()] == [*map(str, range(blocks)), "classifier"]
    torch.testing.assert_close(parts(images), expected)
    assert [parts[:number](images).dim() for number in range(1, blocks + 1)] == [4] * (blocks - 1) + [2]


def test_models_that_cannot_be_cut_are_refused_and_not_accepted() -> None:
    with pytest.raises(
        OptionError, match=r"'lenet5' cannot be cut into 4 blocks .*: must be lenet5 into 2; .* into 2, 4"
    ):
        cut("lenet5", build("lenet5", num_classes=10, input_shape=(1, 28, 28)), 4)

    accepted = {blocks: set(uploaded_builders("block", 10, (3, 32, 32), blocks=blocks)) for blocks in (2, 4)}

    assert accepted[2] == {f"{name}+block" for name in CUTS}
    assert accepted[4] == {"resnet18+block", "resnet18-narrow+block"}
