"""Classifiers cut into blocks, and FuseFL's narrow ResNet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_app.models import build
from fl_app.models.blocks import CUTS, FirstBlock, cut
from fl_app.models.resnet import resnet18_narrow
from fl_app.models.uploaded import uploaded_builders
from strategies.combiners.fused_blocks import adapted
from strategies.core.errors import OptionError

BOTH = [(name, blocks) for name, cuts in CUTS.items() for blocks in cuts if name != "resnet18"]  # as the narrow one


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "blocks"), BOTH)
def test_cut_model_has_the_blocks_and_the_logits_of_the_whole(name: str, blocks: int) -> None:
    model = build(name, num_classes=4, input_shape=(3, 16, 16)).eval()
    images = torch.randn(2, 3, 16, 16)
    expected = model(images)

    parts = cut(name, model, blocks)

    assert [child for child, _ in parts.named_children()] == [*map(str, range(blocks)), "classifier"]
    torch.testing.assert_close(parts(images), expected)
    assert [parts[:number](images).dim() for number in range(1, blocks + 1)] == [4] * (blocks - 1) + [2]


def test_torchvision_s_resnet_is_cut_as_the_narrow_one_with_a_layer_that_flattens() -> None:
    model = build("resnet18", num_classes=4, input_shape=(1, 8, 8)).eval()
    images = torch.randn(2, 1, 8, 8)
    expected = model(images)

    torch.testing.assert_close(cut("resnet18", model, 4)(images), expected)


def test_narrow_resnet_has_the_published_numbers_of_weights_and_the_whole_s_at_its_width() -> None:
    sizes = [size(resnet18_narrow(10, (3, 32, 32), width)) for width in (20, 14, 64)]

    assert sizes == [1_094_750, 537_512, 11_173_962]  # the last is that of resnet18


@pytest.mark.parametrize(("blocks", "published"), [(2, 8_040), (4, 42_140)])
def test_adapters_of_five_clients_have_the_published_size(blocks: int, published: int) -> None:
    parts, maps, found = cut("resnet18-narrow", resnet18_narrow(10, (3, 8, 8)), blocks), torch.zeros(1, 3, 8, 8), 0
    for number in range(1, blocks):
        maps = parts[number - 1].eval()(maps)
        found += size(adapted(nn.Identity(), "conv", members=5, channels=maps.shape[1]))

    assert found == published


def test_lenet_is_cut_after_its_second_pooling() -> None:
    first = FirstBlock(cut("lenet5", build("lenet5", num_classes=10, input_shape=(1, 28, 28)), 2))

    assert first(torch.zeros(3, 1, 28, 28)).shape == (3, 16, 5, 5)
    assert set(first.state_dict()) == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    assert [type(part) for part in first.later] == [nn.Sequential, nn.Linear]


def test_models_that_cannot_be_cut_are_refused_and_not_accepted() -> None:
    with pytest.raises(
        OptionError, match=r"'lenet5' cannot be cut into 4 blocks .*: must be lenet5 into 2; .* into 2, 4"
    ):
        cut("lenet5", build("lenet5", num_classes=10, input_shape=(1, 28, 28)), 4)

    accepted = {blocks: set(uploaded_builders("block", 10, (3, 32, 32), blocks=blocks)) for blocks in (2, 4)}

    assert accepted[2] == {f"{name}+block" for name in CUTS}
    assert accepted[4] == {"resnet18+block", "resnet18-narrow+block"}
