"""What a client measures on its own examples, sent with its weights.

The methods ``fisher`` and ``regmean`` weigh numbers or inputs by it; other methods leave it out::

    from oneshot_fl.client.measures import fisher_diagonal

    content["arrays"] = ArrayRecord({**model.state_dict(), **fisher_diagonal(model, train_loader, loss)})

Quantised activations need a range per layer, and only the client has the data to measure it::

    from oneshot_fl.client.measures import calibrate

    content["upload"] = upload_facts(client="hospital-a", ranges=calibrate(model, batches))

A batch of a merge's measures is whatever the loader yields: a tensor, or a tuple, list or dict of them, with the
examples along the first dimension.

Fisher: Matena, Raffel, NeurIPS 2022, https://arxiv.org/abs/2111.09832; with the labels of the examples and not labels
drawn from the model. RegMean: Jin et al., ICLR 2023, https://arxiv.org/abs/2212.09849.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.facts import FISHER_OF, GRAM_OF, GRAM_OF_ROWS, State
from ..core.layout import evaluating
from ..statistics.sums import Statistics, to_arrays
from ..teacher.heads import head_keys, last_linear
from ..uploads.quantization import calibrate as calibrate

MOST = 256  # examples; one backward pass each
MOST_INPUTS = 4096  # of a layer: a matrix of their square is sent


def fisher_diagonal(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor], *, most: int = MOST
) -> dict[str, Tensor]:
    """Return the mean over examples of the square of each parameter's gradient, by ``fisher:`` and its name, float32.

    Args:
        model: Trained; measured in eval mode, and left as it is.
        batches: The client's own examples.
        loss: (model, batch of one example) -> its loss, a scalar.
        most: Examples to measure, the first ones.

    Raises:
        ValueError: There is no example.
    """
    named = {name: value for name, value in model.named_parameters() if value.requires_grad}
    squares = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in named.items()}
    count = 0
    with evaluating(model), torch.enable_grad():
        for one in _single_examples(batches, most):
            gradients = torch.autograd.grad(loss(model, one), list(named.values()), allow_unused=True)
            for name, gradient in zip(named, gradients, strict=True):
                if gradient is not None:
                    squares[name] += gradient.double().square()
            count += 1
    if not count:
        raise ValueError("there is no example to measure the Fisher diagonal on: must be at least 1")
    return {f"{FISHER_OF}{name}": (value / count).float().cpu() for name, value in squares.items()}


def gram_matrices(
    model: nn.Module, batches: Iterable[Any], forward: Callable[[nn.Module, Any], Any]
) -> dict[str, Tensor]:
    """Return the Gram matrix of each linear layer's inputs, by ``gram:`` and the layer's name, float64.

    It is a sum over all examples and positions, with a 1 as the last input of a layer with a bias. In a batch with an
    ``attention_mask`` [B, L], positions of padding are left out of inputs [B, L, D]. Layers of more than 4,096 inputs
    have none, and are averaged.

    Args:
        model: Trained; measured in eval mode, and left as it is.
        batches: The client's own examples.
        forward: (model, batch) runs the model on a batch.
    """
    sums: dict[str, Tensor] = {}
    mask: list[Tensor | None] = [None]

    def include(key: str, bias: bool) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].detach()
            if mask[0] is not None and rows.shape[:2] == mask[0].shape and rows.dim() == 3:
                rows = rows[mask[0].to(rows.device).bool()]
            rows = rows.reshape(-1, rows.shape[-1]).double()
            if bias:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
            found = (rows.T @ rows).cpu()
            sums[key] = sums[key] + found if key in sums else found

        return hook

    hooks = []
    for name, layer in model.named_modules():
        weight, rows_first = getattr(layer, "weight", None), type(layer).__name__ == "Conv1D"
        if not (rows_first or isinstance(layer, nn.Linear)) or weight is None:
            continue
        if weight.shape[0 if rows_first else 1] <= MOST_INPUTS:
            key = f"{GRAM_OF_ROWS if rows_first else GRAM_OF}{name}"
            hooks.append(layer.register_forward_pre_hook(include(key, getattr(layer, "bias", None) is not None)))
    try:
        with evaluating(model), torch.no_grad():
            for batch in batches:
                found = batch.get("attention_mask") if isinstance(batch, Mapping) else None
                mask[0] = found if isinstance(found, Tensor) else None
                forward(model, batch)
    finally:
        for each in hooks:
            each.remove()
    return sums


def _single_examples(batches: Iterable[Any], most: int) -> Iterable[Any]:
    """Yield batches of one example each."""
    left = most
    for batch in batches:
        for k in range(min(left, _length(batch))):
            yield _part(batch, k)
            left -= 1
        if not left:
            return


def _length(batch: Any) -> int:
    if isinstance(batch, Mapping):
        return _length(next(iter(batch.values())))
    return _length(batch[0]) if isinstance(batch, tuple | list) else len(batch)


def _part(batch: Any, k: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _part(value, k) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_part(value, k) for value in batch)
    return batch[k : k + 1]


def sum_inputs(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> State:
    """Return the sums of the inputs of a model's last linear layer, of which the server solves that layer.

    Args:
        model: Ends with a linear layer of C outputs; measured in eval mode, and left as it is.
        batches: Inputs of the model [B, ...], normalised, with labels [B].
        classes: C.

    Returns:
        ``counts`` int64 [C], ``sums`` float32 [C, d], ``gram`` float32 [d (d + 1) / 2].

    Raises:
        OptionError: The model has no such layer, or the layer is not called once per example.
    """
    head_keys(model, classes)
    layer, seen = last_linear(model)[1], list[Tensor]()
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    total = Statistics.zeros(classes, layer.in_features)
    try:
        with evaluating(model), torch.no_grad():
            for inputs, labels in batches:
                seen.clear()
                model(inputs)
                if [tuple(rows.shape) for rows in seen] != [(len(labels), layer.in_features)]:
                    raise OptionError(
                        f"the last linear layer of {type(model).__name__} gets inputs of shapes "
                        f"{[list(rows.shape) for rows in seen]} for {len(labels)} examples: must be "
                        f"{[len(labels), layer.in_features]}, once"
                    )
                total.include(seen[0].cpu(), labels)
    finally:
        hook.remove()
    return {**to_arrays(total), "counts": total.counts.long()}
