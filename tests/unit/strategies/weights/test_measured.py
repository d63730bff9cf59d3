"""Merges that weigh by what clients measure: Fisher diagonals and Gram matrices, from the client to the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from strategies import merge
from strategies.client.measures import fisher_diagonal, gram_matrices
from strategies.core.errors import OneShotError, OptionError
from strategies.core.facts import FISHER_OF, GRAM_OF, GRAM_OF_ROWS
from strategies.methods.regmean import RegMeanConfig

State = dict[str, Tensor]


def regression(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(50, 3, generator=generator) * torch.tensor([[1.0, 0.2, 3.0]]) ** seed
    return inputs, inputs @ torch.tensor([[1.0], [2.0], [-1.0]]) * seed + inputs.square().sum(1, keepdim=True) / 5


def squared(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def fitted(seed: int) -> nn.Module:
    """The least-squares fit of one client's examples."""
    inputs, targets = regression(seed)
    rows = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    solution = torch.linalg.lstsq(rows, targets).solution
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.copy_(solution[:3].T)
        model.bias.copy_(solution[3])
    return model


def test_fisher_is_a_mean_of_squares_over_examples_and_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1)).train()
    inputs, targets = regression(1)
    batches = [{"x": inputs[:30], "y": targets[:30]}, {"x": inputs[30:], "y": targets[30:]}]

    def loss(net: nn.Module, batch: Any) -> Tensor:
        return squared(net, (batch["x"], batch["y"]))

    found = fisher_diagonal(model, batches, loss)
    model.eval()
    squares = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    for x, y in zip(inputs, targets, strict=True):
        model.zero_grad()
        squared(model, (x[None], y[None])).backward()
        for name, value in model.named_parameters():
            squares[name] += value.grad.square() / len(inputs)
    assert {name.removeprefix(FISHER_OF) for name in found} == squares.keys()
    for name, expected in squares.items():
        torch.testing.assert_close(found[f"{FISHER_OF}{name}"], expected, rtol=1e-4, atol=1e-7)
    assert len(fisher_diagonal(model, batches, loss, most=1)) == len(found)
    with pytest.raises(ValueError, match="there is no example"):
        fisher_diagonal(model, [], loss)


def test_gram_matrices_are_sums_without_padding_and_know_layers_of_rows() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2))
            self.bias = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    model = nn.Sequential(nn.Linear(3, 3, bias=False), Conv1D())
    x, mask = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    batch = {"x": x, "attention_mask": mask}
    found = gram_matrices(model, [batch, batch], lambda net, one: net(one["x"]))
    rows = x[mask.bool()].double()
    torch.testing.assert_close(found[f"{GRAM_OF}0"], 2 * rows.T @ rows)
    inner = torch.cat([model[0](x)[mask.bool()].double(), torch.ones(6, 1)], dim=1).detach()
    torch.testing.assert_close(found[f"{GRAM_OF_ROWS}1"], 2 * inner.T @ inner)


def measured(model: nn.Module, seed: int) -> State:
    data = [regression(seed)]
    return {
        **model.state_dict(),
        **fisher_diagonal(model, data, squared),
        **gram_matrices(model, data, lambda net, batch: net(batch[0])),
    }


def test_regmean_of_least_squares_fits_is_the_fit_of_all_examples(tmp_path: Path) -> None:
    models = [fitted(seed) for seed in (1, 2)]
    states = [measured(model, seed) for seed, model in enumerate(models, 1)]
    inputs, targets = (torch.cat(parts) for parts in zip(regression(1), regression(2), strict=True))
    rows = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    expected = torch.linalg.lstsq(rows, targets).solution
    for number, state in enumerate(states):
        save_file(state, tmp_path / f"{number}.safetensors")
    files = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for given in (states, files):
        result = merge(given, "regmean", model=lambda: nn.Linear(3, 1), config=RegMeanConfig(1.0), log=str)
        student = result.outcome.student
        torch.testing.assert_close(student["weight"], expected[:3].T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(student["bias"], expected[3], rtol=1e-3, atol=1e-4)
        assert student.keys() == {"weight", "bias"}
    mean = merge(states, "fedavg", log=str).outcome.student
    assert mean.keys() == {"weight", "bias"}
    assert not torch.allclose(mean["weight"], expected[:3].T, atol=1e-2)


def test_fisher_is_the_weighted_mean_of_numbers() -> None:
    states = [measured(fitted(seed), seed) for seed in (1, 2)]
    student = merge(states, "fisher", log=str).outcome.student
    shares = [state[f"{FISHER_OF}weight"] for state in states]
    expected = sum(share * state["weight"] for share, state in zip(shares, states, strict=True)) / sum(shares)
    torch.testing.assert_close(student["weight"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fisher", "regmean"])
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model."])
def test_what_a_wrapped_model_measured_goes_by_the_names_of_the_model(method: str, wrapper: str) -> None:
    def wrapped(state: State) -> State:
        def named(key: str) -> str:
            prefix, colon, name = key.rpartition(":")
            return prefix + colon + (wrapper + name if name else wrapper.removesuffix("."))

        return {named(key): value for key, value in state.items()}

    states = [measured(fitted(seed), seed) for seed in (1, 2)]
    expected = merge(states, method, model=lambda: nn.Linear(3, 1), log=str).outcome.student
    for given in ([wrapped(states[0]), states[1]], [wrapped(state) for state in states]):
        student = merge(given, method, model=lambda: nn.Linear(3, 1), log=str).outcome.student
        assert all(torch.equal(student[key], expected[key]) for key in expected)


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_uploads_that_lack_what_the_method_weighs_by_are_refused(method: str) -> None:
    full, bare = measured(fitted(1), 1), fitted(2).state_dict()
    with pytest.raises(OptionError, match=f"client-001 lack: must be of a run with method={method}, or have weights"):
        merge([full, bare], method, log=str)
    some = {name: value for name, value in measured(fitted(2), 2).items() if name != f"{FISHER_OF}bias"}
    if method == "fisher":
        with pytest.raises(OptionError, match="'fisher:bias' is missing from the uploads of client-001"):
            merge([full, some], method, log=str)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f"{FISHER_OF}weight", torch.ones(3)),
        (f"{FISHER_OF}weight", torch.full((1, 3), torch.inf)),
        (f"{FISHER_OF}other", torch.ones(3)),
        (f"{GRAM_OF}other", torch.eye(3, dtype=torch.float64)),
    ],
)
def test_what_is_measured_must_fit_the_model(name: str, value: Tensor) -> None:
    states = [measured(fitted(seed), seed) for seed in (1, 2)]
    with pytest.raises(OneShotError, match=name):
        merge([states[0], {**states[1], name: value}], "fisher", log=str)
