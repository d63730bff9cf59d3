"""The loop over a model's tensors: what no rule merges, what is refused, and how much memory it takes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from strategies import merge
from strategies.core.checkpoints import OpenFile
from strategies.core.errors import OneShotError, OptionError
from strategies.methods.dare import DareConfig
from strategies.methods.task_arithmetic import TaskArithmeticConfig
from strategies.weights.rules import average, ties
from strategies.weights.states import Rule, merge_states

State = dict[str, Tensor]


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


def averaged(states: Mapping[str, Mapping[str, Tensor]], weights: list[float], **more: Any) -> State:
    return merge_states(states, weights, lambda one: average(one.updates, one.weights), tick=silent, **more)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_batch_normalisation_is_that_of_all_examples_together(scale: float) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(40, 3) * 2 + 5, torch.randn(120, 3) - 3]
    states = {
        str(k): {
            "n.running_mean": part.mean(0),
            "n.running_var": part.var(0, correction=0),
            "n.num_batches_tracked": torch.tensor(7 + k),
        }
        for k, part in enumerate(parts)
    }
    start = {name: torch.zeros_like(value) for name, value in states["0"].items()}
    merged = averaged(states, [40.0, 120.0], start=start, scale=scale)
    whole = torch.cat(parts)
    torch.testing.assert_close(merged["n.running_mean"], whole.mean(0))
    torch.testing.assert_close(merged["n.running_var"], whole.var(0, correction=0))
    assert merged["n.num_batches_tracked"] == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_floating_point_type_is_summed_in_full_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    start = {"w": torch.randn(50).to(dtype)}
    states = {str(k): {"w": (start["w"] + 0.01 * torch.randn(50)).to(dtype)} for k in range(8)}
    merged = averaged(states, [1.0] * 8, start=start)["w"]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.stack([state["w"].to(wide) for state in states.values()]).mean(0)
    assert merged.dtype == dtype
    exact = expected.to(dtype)
    off = (merged.to(wide) - exact.to(wide)).abs()
    spacing = torch.finfo(dtype).eps * exact.abs().to(torch.float64)
    assert bool((off <= spacing).all())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"w": torch.zeros(3), "ids": torch.tensor([1, 3])},
            "tensor 'ids' holds int64 numbers, in which a and b differ",
        ),
        ({"w": torch.zeros(4), "ids": torch.tensor([1, 2])}, r"tensor 'w' of b has shape \[4\]: must be \[3\]"),
        ({"w": torch.zeros(3)}, "a and b differ in 'ids'"),
    ],
)
def test_what_cannot_be_merged_is_refused(other: State, said: str) -> None:
    own = {"w": torch.zeros(3), "ids": torch.tensor([1, 2])}
    assert torch.equal(averaged({"a": own, "b": own}, [1.0, 1.0])["ids"], own["ids"])
    with pytest.raises(OptionError, match=said):
        averaged({"a": own, "b": other}, [1.0, 1.0])


class Counted(Mapping[str, Tensor]):
    """Weights made when they are asked for, which count how many tensors are in memory."""

    alive = most = 0

    def __getitem__(self, name: str) -> Tensor:
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        values = np.full(1000, float(name), np.float32)
        weakref.finalize(values, Counted.free)
        return torch.from_numpy(values)

    @classmethod
    def free(cls) -> None:
        cls.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self)))

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("rule", [lambda one: average(one.updates, one.weights), lambda one: ties(one.updates, 0.2)])
def test_no_more_than_one_tensor_of_all_clients_is_in_memory(rule: Rule) -> None:
    Counted.most = 0
    merged = merge_states({str(k): Counted() for k in range(5)}, [1.0] * 5, rule, start=Counted(), tick=silent)
    assert len(merged) == 20
    assert Counted.alive == 0
    assert 5 <= Counted.most <= 7  # of five clients, the start's, and one that is about to go


class Embedder(nn.Module):
    """No classifier: an embedding, an attention, a norm, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("positions", torch.arange(5))


def tuned(base: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Embedder()
    model.load_state_dict(
        {
            name: value + 0.1 * torch.randn(value.shape).abs() if value.is_floating_point() else value
            for name, value in base.state_dict().items()
        }
    )
    return model


BASE = Embedder()
MODELS = {name: tuned(BASE, seed) for seed, name in enumerate("abc")}
METHODS = ("fedavg", "task-arithmetic", "ties", "dare", "tsv")


@pytest.mark.parametrize("method", METHODS)
def test_any_module_state_dict_and_file_merges_to_the_same_without_classes(method: str, tmp_path: Path) -> None:
    of_modules = merge(MODELS, method, start=BASE, log=str)
    assert isinstance(of_modules.student, Embedder)
    found = of_modules.outcome.student
    assert found is not None
    for name, model in MODELS.items():
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in MODELS}
    states = {name: model.state_dict() for name, model in MODELS.items()}
    for others in (files, states):
        same = merge(others, method, start=BASE.state_dict(), log=str)
        assert same.outcome.student is not None
        assert all(torch.equal(value, found[name]) for name, value in same.outcome.student.items())
        with pytest.raises(OptionError, match="result.outcome.student; for a module give model="):
            _ = same.student
        same.save(tmp_path / method)
    of_modules.save(tmp_path / method)
    assert torch.equal(OpenFile(tmp_path / method / "student.safetensors")["norm.weight"], found["norm.weight"])


def test_task_arithmetic_is_fedavg_at_one_and_the_start_at_zero() -> None:
    sizes = {"a": 10, "b": 30, "c": 60}
    whole, none = (
        merge(MODELS, "task-arithmetic", start=BASE, num_examples=sizes, config=TaskArithmeticConfig(s), log=str)
        for s in (1.0, 0.0)
    )
    mean = merge(MODELS, "fedavg", num_examples=sizes, log=str)
    name = "attention.in_proj_weight"
    assert whole.outcome.student is not None
    assert none.outcome.student is not None
    assert mean.outcome.student is not None
    torch.testing.assert_close(whole.outcome.student[name], mean.outcome.student[name])
    assert torch.equal(none.outcome.student[name], BASE.state_dict()[name])


@pytest.mark.parametrize("rule", ["average", "ties", "tsv"])
def test_dare_without_drops_is_its_rule_and_draws_by_the_seed(rule: str) -> None:
    plain = merge(MODELS, "task-arithmetic" if rule == "average" else rule, start=BASE, log=str)
    kept, drawn, again, other = (
        merge(MODELS, "dare", start=BASE, config=DareConfig(drop=drop, rule=rule), seed=seed, log=str).outcome.student
        for drop, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1))
    )
    name = "embedding.weight"
    assert kept is not None
    assert drawn is not None
    assert again is not None
    assert other is not None
    assert plain.outcome.student is not None
    assert torch.equal(kept[name], plain.outcome.student[name])
    assert torch.equal(drawn[name], again[name])
    assert not torch.equal(drawn[name], other[name])


def wider() -> nn.Module:
    model = Embedder()
    model.embedding = nn.Embedding(12, 8)
    return model


@pytest.mark.parametrize(
    ("models", "more", "said"),
    [
        (MODELS, {}, "needs that every client started from the same weights, which are known: give them as start="),
        ({**MODELS, "d": wider().state_dict()}, {"start": BASE, "model": Embedder}, r"float64\[12, 8\]"),
        ({"a": BASE.state_dict(), "b": {}}, {"start": BASE}, "model 'b'.*attention.in_proj_bias"),
        ({"a": {**BASE.state_dict(), "norm.weight": torch.full((8,), torch.nan)}}, {"start": BASE}, "norm.weight"),
    ],
)
def test_models_that_do_not_share_a_start_and_a_form_are_refused(models: Any, more: Any, said: str) -> None:
    with pytest.raises(OneShotError, match=said):
        merge(models, "ties", log=str, **more)


def test_a_method_of_classifiers_still_needs_classes_and_shapes() -> None:
    with pytest.raises(OptionError, match="'tally' needs num_classes and input_shape"):
        merge(MODELS, "tally", log=str)
    with pytest.raises(OptionError, match="input_shape is missing"):
        merge(MODELS, "ties", start=BASE, num_classes=3, log=str)
