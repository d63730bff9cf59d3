"""INT8 quantisation after training: a quarter of the bytes, for models that are sent to be asked and not trained.

The form is FENS's (Allouah et al., NeurIPS 2024), torch's static quantisation with min-max observers. The grid is
``r = S (q - Z)``, one scale S and one zero point Z per tensor: Eq. (1) of Jacob et al., *Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference*, CVPR 2018.

- Weights: q in -128 .. 127, Z = 0, S = max|w| / 127.5. Only they are stored and sent as integers.
- Activations: q in 0 .. 127, seven bits, S and Z from the smallest and the largest value on the client's own data.

The arithmetic of a quantised model runs in float32. The input and the output of every convolution, linear layer, batch
normalisation and activation module are rounded to their grid. Nothing is folded, sums of residual blocks are float32,
and the logits are the values on their grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..core import refusals
from ..core.layout import evaluating
from ..method import State

Arrays = Mapping[str, npt.NDArray[Any]]
Ranges = Mapping[str, tuple[float, float]]

# The name of the input's range, beside the layers' names.
INPUT = "<input>"
# Behind the name of a quantised tensor: its scale.
SCALE = "/scale"
# Half the width of eight bits, and the width of seven.
HALF_WIDTH = 127.5
STEPS = 127
# No grid is finer, so that a tensor of zeros has one too.
FINEST = float(np.finfo(np.float32).eps)

_ACTIVATIONS = (
    nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.LeakyReLU, nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.SiLU, nn.Tanh,
)  # fmt: skip
_LAYERS = (_ConvNd, nn.Linear, _BatchNorm, *_ACTIVATIONS)


def quantize_state(state: State) -> dict[str, npt.NDArray[Any]]:
    """Return weights as they are sent; equal weights give equal bits on every machine.

    Args:
        state: Finite weights. Float32 tensors of two and more dimensions are quantised; biases, batch normalisation
            and counters stay as they are.

    Returns:
        A quantised tensor as int8 under its own name, its scale as float32 [] under that name and ``/scale``; the
        others under their own.

    Raises:
        UploadError: A tensor's name looks like that of a quantised one.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for key, value in state.items():
        array = value.detach().cpu().numpy()
        if array.dtype == np.int8 or key.endswith(SCALE):
            raise refusals.looks_quantized(key, array.dtype, SCALE)
        if array.dtype == np.float32 and array.ndim >= 2:
            scale = np.float32(max(np.abs(array).max(initial=0.0) / np.float32(HALF_WIDTH), FINEST))
            arrays[key] = np.rint(array / scale).clip(-128, 127).astype(np.int8)
            arrays[f"{key}{SCALE}"] = np.asarray(scale)
        else:
            arrays[key] = array.copy()
    return arrays


def dequantize_state(arrays: Arrays) -> State:
    """Return float weights, the inverse of :func:`quantize_state` up to half a step of each grid.

    Raises:
        UploadError: An int8 array has no positive scale, a scale has no int8 array, or an array is no tensor.
    """
    state: State = {}
    for key, array in arrays.items():
        try:
            if key.endswith(SCALE):
                _check_scaled(key, arrays.get(key.removesuffix(SCALE)))
            elif array.dtype == np.int8:
                state[key] = torch.from_numpy(array.astype(np.float32) * _scale(arrays, key))
            else:
                state[key] = torch.from_numpy(np.array(array))
        except (TypeError, ValueError) as error:
            raise refusals.no_torch_array(key, error) from error
    return state


def affine(low: float, high: float) -> tuple[float, int]:
    """Return the scale and the zero point in 0 .. 127 of a range of activations, widened to hold 0.

    So that 0, which padding and ReLU make, lies on the grid: ``S = (high - low) / 127``, ``Z = round(-low / S)``.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max((high - low) / STEPS, FINEST)
    return scale, round(-low / scale)


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest output of each layer, which :func:`quantize_activations` needs.

    Args:
        model: Asked in eval mode; it is as before when this returns.
        batches: Normalised inputs [B, ...], on the model's device.

    Returns:
        Layer name -> (smallest, largest), of the layers that were called; one that is called twice has one range for
        both. The input's is under :data:`INPUT`, unless it is of whole numbers, such as tokens.

    Raises:
        UploadError: A layer's output is not finite.
    """
    ranges: dict[str, tuple[float, float]] = {}

    def see(name: str, values: Tensor) -> None:
        low, high = (float(bound) for bound in torch.aminmax(values))
        if not math.isfinite(low) or not math.isfinite(high):
            raise refusals.activations_overflow(name)
        known = ranges.get(name, (low, high))
        ranges[name] = (min(low, known[0]), max(high, known[1]))

    with _watch_layers(model, see):
        for batch in batches:
            model(batch)
    return ranges


def simulate_int8(model: nn.Module, ranges: Ranges | None = None) -> nn.Module:
    """Let a model compute like its quantised form from now on, in eval mode.

    In place, because a copy would not be whole where a function of the model closes over it.

    Args:
        model: Any module from inputs [B, ...] to logits [B, C].
        ranges: What :func:`calibrate` found; without it only the weights are quantised.

    Returns:
        The model. It can be copied and pickled as before, and its gradients reach the input.
    """
    model.load_state_dict(dequantize_state(quantize_state(model.state_dict())))
    quantize_activations(model, ranges or {})
    return model.eval()


def quantize_activations(model: nn.Module, ranges: Ranges) -> None:
    """Round the input and the layers' outputs to seven bits from now on, by hooks, in place.

    The gradient goes straight through the rounding; where a value is clipped to its range it is 0.

    Args:
        ranges: Of each layer, the smallest and the largest output; names of no such layer change nothing.
    """
    if INPUT in ranges:
        model.register_forward_pre_hook(partial(_round_input, *affine(*ranges[INPUT])))
    for name, layer in _layers(model):
        if name in ranges:
            layer.register_forward_hook(partial(_round_output, *affine(*ranges[name])))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, _LAYERS))


@contextmanager
def _watch_layers(model: nn.Module, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Show the input and the layers' outputs to a function while a block of code runs, with the model in eval mode."""
    hooks = [model.register_forward_pre_hook(lambda _, args: see(INPUT, args[0]) if _is_real(args) else None)]
    for name, layer in _layers(model):
        hooks.append(layer.register_forward_hook(lambda _, __, output, name=name: see(name, output)))
    try:
        with evaluating(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


# Hooks are functions of the module, so that a model with them can be pickled.
def _round_input(scale: float, zero_point: int, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_round(args[0], scale, zero_point), *args[1:]) if _is_real(args) else args


def _round_output(scale: float, zero_point: int, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    return _round(output, scale, zero_point)


def _round(values: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return ``S (q - Z)`` with ``q = clip(round(r / S) + Z, 0, 127)`` for r [...]."""
    return torch.fake_quantize_per_tensor_affine(values, scale, zero_point, 0, STEPS)


def _is_real(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()


def _scale(arrays: Arrays, key: str) -> np.float32:
    scale = np.asarray(arrays.get(f"{key}{SCALE}", np.nan), dtype=np.float32)
    if scale.size != 1 or not 0 < float(scale.reshape(())) < math.inf:
        raise refusals.bad_scale(key, scale.tolist())
    return np.float32(scale.reshape(()))


def _check_scaled(key: str, array: npt.NDArray[Any] | None) -> None:
    if array is None or array.dtype != np.int8:
        found = "no array" if array is None else f"one of {array.dtype}"
        raise refusals.scale_of_none(key, found)
