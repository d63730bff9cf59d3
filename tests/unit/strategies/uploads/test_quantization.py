"""INT8 against formulas in numpy: the grids, what lies on them, and what a model of such layers computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flwr.app import Array
from torch import Tensor, nn

from fl_app.models import ARCHITECTURES, build
from strategies.core.errors import UploadError
from strategies.uploads.packed import from_wire, pack_member, to_wire, unpack_member
from strategies.uploads.quantization import (
    INPUT,
    affine,
    calibrate,
    dequantize_state,
    quantize_activations,
    quantize_state,
    simulate_int8,
)

Ranges = dict[str, tuple[float, float]]
SHAPE = (2, 6, 6)


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(), nn.Linear(48, 4)
        )
        model(torch.randn(16, *SHAPE) + 1)
        nn.init.normal_(model[1].weight)  # type: ignore[arg-type]
    return model.train()


def inputs(count: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))


def nearest(values: np.ndarray[Any, Any], grid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The point of the grid next to each value, by trying all of them."""
    values = np.asarray(values, dtype=np.float64)
    return grid[np.abs(values[..., None] - grid).argmin(-1)]


def seven_bits(low: float, high: float) -> np.ndarray[Any, Any]:
    """The 128 points of an activation's grid; the formula of torch's observer, written anew."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / 127
    return (np.arange(128) - np.rint(-low / scale)) * scale


def test_weights_become_the_nearest_points_of_a_symmetric_grid_of_eight_bits() -> None:
    weight = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))
    arrays = quantize_state({"w": weight})
    scale = np.abs(weight.double().numpy()).max() / 127.5
    assert arrays["w"].dtype == np.int8
    assert (arrays["w/scale"].dtype, arrays["w/scale"].shape) == (np.float32, ())
    np.testing.assert_allclose(arrays["w/scale"], scale, rtol=1e-6)
    np.testing.assert_allclose(
        dequantize_state(arrays)["w"], nearest(weight.numpy(), scale * np.arange(-128, 128)), rtol=1e-6
    )


def test_quantized_keeps_biases_statistics_and_counters_and_shares_no_memory() -> None:
    model = net()
    state = model.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    arrays = quantize_state(state)
    assert {key for key, array in arrays.items() if array.dtype == np.int8} == {"0.weight", "5.weight"}
    again = dequantize_state(arrays)
    assert list(again) == list(state)
    for key in state:
        assert (again[key].dtype, again[key].shape) == (state[key].dtype, state[key].shape)
        if key not in ("0.weight", "5.weight"):
            assert torch.equal(again[key], state[key])
    for array in (*arrays.values(), *(value.numpy() for value in again.values())):
        array += 1
    assert all(torch.equal(state[key], before[key]) for key in state)


Q = np.ones((2, 2), np.int8)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"w": Q}, "array 'w' of int8 has the scale nan: must be one positive number"),
        ({"w": Q, "w/scale": np.float32(0)}, "has the scale 0.0"),
        ({"w": Q, "w/scale": np.float32("inf")}, "has the scale inf"),
        ({"w": Q, "w/scale": np.ones(2, np.float32)}, r"has the scale \[1.0, 1.0\]"),
        ({"w": Q, "w/scale": np.array("a")}, "array 'w' is not a tensor"),
        ({"w/scale": np.float32(1)}, "array 'w/scale' is a scale of no array: must be one of int8"),
        ({"w": Q.astype(np.float32), "w/scale": np.float32(1)}, "is a scale of one of float32"),
        ({"w": np.array(["a"])}, "array 'w' is not a tensor"),
        ({"w": np.array([None])}, "array 'w' is not a tensor"),
    ],
)
def test_dequantized_of_arrays_that_do_not_fit_says_which(arrays: dict[str, Any], reason: str) -> None:
    with pytest.raises(UploadError, match=reason):
        dequantize_state({"b": np.zeros(2, np.float32), **arrays})


def test_dequantized_weights_after_the_wire_have_the_same_bits() -> None:
    model, ranges = net(), {"0": (-1.0, 2.5), "5": (0.0, 0.1)}
    packed = pack_member("net", model.state_dict(), precision="int8", ranges=ranges)
    arrays, facts = to_wire(3, packed)
    received = {key: Array(value).numpy() for key, value in arrays.items()}
    again = from_wire(3, received, facts, architecture="net", precision="int8")
    assert again.digest == packed.digest
    one, other = dequantize_state(packed.arrays), unpack_member(again, net).state_dict()
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("low", "high"), [(-1.3, 2.9), (0.0, 4.0), (0.5, 4.0), (-7.0, -2.0)])
def test_activations_become_the_nearest_points_of_seven_bits_and_then_stay(low: float, high: float) -> None:
    layer = nn.Sequential(nn.LeakyReLU(1.0))
    quantize_activations(layer, {"0": (low, high)})
    values = torch.linspace(-9, 9, 997)
    rounded = layer(values)
    grid = seven_bits(low, high)
    np.testing.assert_allclose(rounded, nearest(values.numpy(), grid), rtol=1e-5, atol=1e-6)
    assert rounded.unique().numel() == 128
    assert torch.equal(layer(rounded), rounded)
    assert torch.equal(layer(torch.zeros(1)), torch.zeros(1))
    inside = (values >= min(low, 0.0)) & (values <= max(high, 0.0))
    assert (rounded - values)[inside].abs().max() <= (grid[1] - grid[0]) / 2 * (1 + 1e-4) + 1e-6


def by_hand(model: nn.Module, ranges: Ranges, x: Tensor) -> Tensor:
    """The same net, layer by layer, each rounded by trying all points of its grid."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for key in ("0.weight", "5.weight"):
        scale = state[key].abs().max().item() / 127.5
        state[key] = torch.from_numpy(nearest(state[key].numpy(), scale * np.arange(-128, 128))).float()

    def rounded(name: str, values: Tensor) -> Tensor:
        return torch.from_numpy(nearest(values.numpy(), seven_bits(*ranges[name]))).float()

    h = rounded("0", F.conv2d(rounded(INPUT, x), state["0.weight"], state["0.bias"]))
    statistics = state["1.running_mean"], state["1.running_var"]
    h = rounded("1", F.batch_norm(h, *statistics, state["1.weight"], state["1.bias"]))
    h = rounded("2", F.relu(h)).flatten(1)
    return rounded("5", F.linear(h, state["5.weight"], state["5.bias"]))


def test_as_int8_rounds_the_input_and_every_layer_by_itself() -> None:
    model = net()
    ranges = calibrate(model, [inputs()])
    got = simulate_int8(copy.deepcopy(model), ranges)(inputs(seed=1))
    expected = by_hand(model, ranges, inputs(seed=1))
    step = affine(*ranges["5"])[0]
    off = (got - expected).abs() / step
    # A sum in another order may fall on the other side of a border between two points.
    assert off.max() < 2
    assert (off < 1e-3).float().mean() > 0.9
    assert not torch.allclose(got, model.eval()(inputs(seed=1)), atol=step / 10)


def test_calibrate_finds_the_smallest_and_largest_output_of_all_batches() -> None:
    model = net().eval()
    first, second = inputs(seed=1), 3 * inputs(seed=2)
    both = torch.cat([first, second])
    conv = model[0](both)  # type: ignore[operator]
    norm = model[1](conv)  # type: ignore[operator]
    expected = {INPUT: both, "0": conv, "1": norm, "2": norm.clamp(min=0), "5": model(both)}
    found = calibrate(model, iter([first, second]))
    assert list(found) == [INPUT, "0", "1", "2", "5"]
    for name, values in expected.items():
        assert found[name] == pytest.approx((values.min().item(), values.max().item()), rel=1e-5), name


SHAPES: dict[str, tuple[int, int, int]] = {"logistic": (5, 1, 1), "mlp": (5, 1, 1), "text-bag": (1, 1, 7)}


QUICK, SLOW = ("lenet5", "cnn5", "resnet8", "resnet8-ds", "mlp", "text-bag"), pytest.mark.slow


def examples(arch: str) -> Tensor:
    shape = SHAPES.get(arch, (3, 20, 20))
    rng = torch.Generator().manual_seed(3)
    if arch == "text-bag":
        return torch.randint(0, 50, (6, *shape), generator=rng)
    return torch.randn(6, *shape, generator=rng)


@pytest.mark.parametrize("arch", [pytest.param(name, marks=() if name in QUICK else SLOW) for name in ARCHITECTURES])
def test_as_int8_of_every_architecture_is_close_and_passes_gradients(arch: str) -> None:
    x = examples(arch)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build(arch, num_classes=2, input_shape=SHAPES.get(arch, (3, 20, 20)))
    ranges = calibrate(model, [x])
    weighty: Callable[[nn.Module], bool] = lambda part: isinstance(part, nn.Conv2d | nn.Linear | nn.BatchNorm2d)  # noqa: E731
    assert {name for name, part in model.named_modules() if weighty(part)} <= set(ranges)
    member, floating = simulate_int8(copy.deepcopy(model), ranges), model.eval()
    x = x.requires_grad_() if x.is_floating_point() else x
    logits, expected = member(x), floating(x)
    spread = (expected.max() - expected.min()).item()
    assert (logits - expected).abs().max().item() < 0.35 * spread
    assert not torch.equal(logits, expected)
    assert all(values.unique().numel() <= 128 for values in logits.detach().T)
    if x.is_floating_point():
        (gradient,) = torch.autograd.grad(logits.square().sum(), x)
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0
