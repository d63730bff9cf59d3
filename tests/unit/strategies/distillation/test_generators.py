import pytest
import torch
from torch import nn

from strategies.core.seeds import generator as rng
from strategies.distillation.generators import DenseGenerator, PixelConv, UpsampleConv


def plain(fast: DenseGenerator, channels: int, side: int) -> nn.Sequential:
    """The generator as the papers write it, with the same weights."""
    s = side // 4
    model = nn.Sequential(
        nn.Linear(fast.project.in_features, 128 * s * s),
        nn.Unflatten(1, (128, s, s)),
        nn.BatchNorm2d(128),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 128, 3, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.LeakyReLU(0.2),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, channels, 3, padding=1),
        nn.Sigmoid(),
    )
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), fast.parameters(), strict=True):
            mine.copy_(theirs)
    return model


def test_generator_for_colour_images_of_32_has_the_published_number_of_parameters() -> None:
    assert sum(p.numel() for p in DenseGenerator(256, (3, 32, 32)).parameters()) == 2_328_899


def test_upsample_conv_equals_upsampling_then_convolution_forward_and_backward() -> None:
    fast = UpsampleConv(5, 7).double()
    convolution = nn.Conv2d(5, 7, 3, padding=1, bias=False).double()
    convolution.weight.data.copy_(fast.weight.data)
    slow = nn.Sequential(nn.Upsample(scale_factor=2), convolution)
    x = torch.randn(2, 5, 6, 4, dtype=torch.float64, generator=rng(1)).requires_grad_()
    y = torch.randn(2, 7, 12, 8, dtype=torch.float64, generator=rng(2))
    torch.testing.assert_close(fast(x), slow(x), rtol=0, atol=1e-12)
    ours = torch.autograd.grad((fast(x) * y).sum(), (x, fast.weight))
    theirs = torch.autograd.grad((slow(x) * y).sum(), (x, convolution.weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pixel_conv_equals_the_convolution_with_its_weights_forward_and_backward(
    channels: int, channels_last: bool
) -> None:
    fast = PixelConv(5, channels).double()
    x = torch.randn(2, 5, 6, 4, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    results = []
    for call in (fast, lambda x: nn.functional.conv2d(x, fast.weight, fast.bias, padding=1)):
        inputs = x.clone().requires_grad_()
        made = call(inputs)
        gradients = torch.autograd.grad(made.square().sum(), [inputs, fast.weight, fast.bias])
        results.append([made, *gradients])
    torch.testing.assert_close(*results)


def test_generator_equals_the_plain_form_forward_and_backward() -> None:
    fast = DenseGenerator(16, (3, 16, 16))
    fast.reset(rng(3))
    slow = plain(fast, 3, 16)
    noise, weight = torch.randn(8, 16, generator=rng(4)), torch.randn(8, 3, 16, 16, generator=rng(5))
    torch.testing.assert_close(fast(noise), slow(noise), rtol=0, atol=1e-5)
    ours = torch.autograd.grad((fast(noise) * weight).mean(), list(fast.parameters()))
    theirs = torch.autograd.grad((slow(noise) * weight).mean(), list(slow.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


def test_reset_follows_the_law_and_depends_on_the_generator_only() -> None:
    model = DenseGenerator(256, (1, 16, 16))
    model(torch.randn(4, 256, generator=rng(0)))
    model.reset(rng(7))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if name.endswith("bias"):
            assert not value.any(), name
        else:
            centre = 1.0 if "norm" in name else 0.0
            assert float(value.mean()) == pytest.approx(centre, abs=0.01), name
            assert float(value.std()) == pytest.approx(0.02, rel=0.3), name
    assert not model.norm0.running_mean.any()  # type: ignore[union-attr]
    model(torch.randn(4, 256, generator=rng(0)))
    model.reset(rng(7))
    assert all(torch.equal(value, first[name]) for name, value in model.state_dict().items())
    model.reset(rng(8))
    assert not torch.equal(model.project.weight, first["project.weight"])
