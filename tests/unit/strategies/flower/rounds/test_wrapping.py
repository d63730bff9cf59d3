"""Flower strategies under a refinement: which of them fit, what they see, and that they start from the refined one."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import CLASSES, SHAPE, net, records, weights
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Krum, Strategy

from strategies import Dense, Iterative, IterativeConfig
from strategies.core.errors import OptionError
from strategies.flower.messages import read_reply
from strategies.flower.rounds.answers import CheckedAnswer
from strategies.flower.rounds.base import Base
from strategies.flower.rounds.flboost import wrap
from strategies.flower.rounds.global_model import GlobalModel
from strategies.method import Job, Normalization
from strategies.uploads.checks import Signatures

Arrays = dict[str, np.ndarray[Any, Any]]
State = dict[str, torch.Tensor]

JOB = Job(
    (), {"model": net}, "model", CLASSES, SHAPE, Normalization((0.5,), (0.5,)), IterativeConfig(), seed=3
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower collects garbage after every array that q-FedAvg or Bulyan reads, which takes long beside torch."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)


PARAMETERS = [name for name, _ in net().named_parameters()]
EXAMPLES = (10, 30, 20)
LOSSES = (0.5, 1.5, 1.0)


def model_of(base: Base, start: State | None = None) -> GlobalModel:
    module = net()
    module.load_state_dict(start or weights(5))
    return GlobalModel(base, JOB, module)


def answered(
    model: GlobalModel, contents: Mapping[int, RecordDict], states: list[State], **metrics: Any
) -> list[CheckedAnswer]:
    """The answers of some nodes, checked as they are in a run."""
    found = []
    for k, (node, question) in enumerate(contents.items()):
        content = records(states[k], num_examples=EXAMPLES[k % 3], facts={"client": f"c{k}"}, **metrics)
        content["metrics"]["train_loss"] = LOSSES[k % 3]  # type: ignore[index]
        asked = Message(question, dst_node_id=node, message_type="train")
        checked = model.check_answer(content)
        reply = read_reply(checked, Signatures({"model": net}), num_classes=CLASSES, max_bytes=10**7, sender=f"c{k}")
        found.append(CheckedAnswer(f"c{k}", Message(content, reply_to=asked), checked, reply))
    return found


def one_round(model: GlobalModel, number: int, states: list[State], **metrics: Any) -> dict[str, float] | None:
    contents = model.requests(number, {"run-id": "r"}, list(range(1, len(states) + 1)))
    assert len(contents) == len(states)
    return model.take(number, answered(model, contents, states, **metrics))


def numpy_of(state: State) -> Arrays:
    return {name: value.numpy().astype(np.float64) for name, value in state.items()}


def mean_of(states: list[State]) -> Arrays:
    arrays = [numpy_of(state) for state in states]
    return {n: sum(k * a[n] for k, a in zip(EXAMPLES, arrays, strict=False)) / sum(EXAMPLES) for n in arrays[0]}


# Each returns the model after a round from where the round began, what the clients sent, and the strategy's memory,
# which it changes: Reddi et al. 2021, Hsu et al. 2019, Li et al. 2020 and the others, written down here once more.
Step = Callable[[Arrays, list[State], dict[str, Any], int], Arrays]


def plain(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    return mean_of(states)


def momentum(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    mean, found = mean_of(states), {}
    for name in PARAMETERS:
        memory[name] = 0.9 * memory.get(name, 0.0) + (start[name] - mean[name])
        found[name] = start[name] - 0.5 * memory[name]
    return found


def adaptive(kind: str) -> Step:
    def step(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
        mean, found = mean_of(states), {}
        b1, b2, rate = (0.0, 0.0, 0.1) if kind == "adagrad" else (0.9, 0.99, 0.1)
        if kind == "adam":  # Flower's correction of the bias, with the exponent round + 1
            rate *= np.sqrt(1 - b2 ** (number + 1)) / (1 - b1 ** (number + 1))
        for name in PARAMETERS:
            delta = mean[name] - start[name]
            m, v = memory.get(name, (0.0, 0.0))
            m = b1 * m + (1 - b1) * delta
            if kind == "adagrad":
                v = v + delta**2
            elif kind == "adam":
                v = b2 * v + (1 - b2) * delta**2
            else:
                v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
            memory[name] = (m, v)
            found[name] = start[name] + rate * m / (np.sqrt(v) + 0.001)
        return found

    return step


def median(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    arrays = [numpy_of(state) for state in states]
    return {name: np.median([a[name] for a in arrays], axis=0) for name in arrays[0]}


def trimmed(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    arrays = [numpy_of(state) for state in states]
    return {name: np.sort([a[name] for a in arrays], axis=0)[1:-1].mean(axis=0) for name in arrays[0]}


def krum_order(states: list[State], closest: int) -> list[int]:
    flat = [np.concatenate([v.ravel() for n, v in numpy_of(s).items() if "batches" not in n]) for s in states]
    apart = [sorted(float(((one - two) ** 2).sum()) for two in flat)[1 : closest + 1] for one in flat]
    return [int(k) for k in np.argsort([sum(each) for each in apart])]


def krum(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    return numpy_of(states[krum_order(states, max(1, len(states) - 2))[0]])


def multi_krum(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    best = krum_order(states, max(1, len(states) - 2))[:2]
    arrays, counts = [numpy_of(states[k]) for k in best], [EXAMPLES[k % 3] for k in best]
    return {n: sum(c * a[n] for c, a in zip(counts, arrays, strict=True)) / sum(counts) for n in arrays[0]}


def fair(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    lipschitz, q = 1 / 0.1, 0.2
    steps, total = [], 0.0
    for state, loss in zip(map(numpy_of, states), LOSSES, strict=False):
        gradient = {name: lipschitz * (start[name] - state[name]) for name in PARAMETERS}
        norm = sum(float((value**2).sum()) for value in gradient.values())
        steps.append({name: loss**q * value for name, value in gradient.items()})
        total += q * loss ** (q - 1) * norm + lipschitz * loss**q
    return {name: start[name] - sum(step[name] for step in steps) / total for name in PARAMETERS}


MADE: dict[str, tuple[Callable[[], Strategy], Step]] = {
    "FedAvg": (FedAvg, plain),
    "FedProx": (lambda: flower.FedProx(proximal_mu=0.1), plain),
    "FedAvgM": (lambda: FedAvgM(server_learning_rate=0.5, server_momentum=0.9), momentum),
    "FedAdagrad": (flower.FedAdagrad, adaptive("adagrad")),
    "FedAdam": (FedAdam, adaptive("adam")),
    "FedYogi": (lambda: flower.FedYogi(eta=0.1), adaptive("yogi")),
    "FedMedian": (flower.FedMedian, median),
    "FedTrimmedAvg": (lambda: flower.FedTrimmedAvg(beta=0.34), trimmed),
    "Krum": (Krum, krum),
    "MultiKrum": (lambda: flower.MultiKrum(num_nodes_to_select=2), multi_krum),
    "Bulyan": (flower.Bulyan, plain),
    "QFedAvg": (lambda: flower.QFedAvg(client_learning_rate=0.1, q=0.2), fair),
}


def equal_mean(start: Arrays, states: list[State], memory: dict[str, Any], number: int) -> Arrays:
    """Bulyan without malicious nodes takes all values of all clients."""
    arrays = [numpy_of(state) for state in states]
    return {name: np.mean([a[name] for a in arrays], axis=0) for name in arrays[0]}


MADE["Bulyan"] = (flower.Bulyan, equal_mean)


@pytest.mark.parametrize("name", MADE)
def test_second_round_starts_from_the_refined_model(name: str) -> None:
    make, step = MADE[name]
    # Trimming by 0.34 takes one of three away at either end.
    model, memory = model_of(wrap(make())), {}
    start = numpy_of(model.state)
    for number in (1, 2):
        states = [weights(10 * number + k) for k in range(3)]
        assert one_round(model, number, states) is not None
        wanted = step(start, states, memory, number)
        for key in PARAMETERS:
            np.testing.assert_allclose(model.state[key].numpy(), wanted[key], rtol=2e-4, atol=2e-5, err_msg=key)
        # A refinement: another model is the next round's start.
        model.state = {key: value + 0.25 if key in PARAMETERS else value for key, value in model.state.items()}
        start = numpy_of(model.state)


def test_fedavg_sees_the_same_arrays_as_in_flower() -> None:
    seen: list[set[str]] = []

    class Saving(FedAvg):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            seen.append(set(arrays))
            net().load_state_dict(arrays.to_torch_state_dict(), strict=True)  # as people keep a model in every round
            return arrays, metrics

    model, states = model_of(wrap(Saving())), [weights(k) for k in range(3)]
    one_round(model, 1, states)
    assert seen == [set(net().state_dict())]
    contents = [records(state, num_examples=n) for state, n in zip(states, EXAMPLES, strict=True)]
    alone, _ = FedAvg().aggregate_train(1, [Message(c, dst_node_id=1, message_type="train") for c in contents])
    for key, value in alone.to_torch_state_dict().items():
        if value.is_floating_point() and "batches" not in key:
            assert torch.equal(value, model.state[key]), key


# What outlives the process.


@pytest.mark.parametrize("name", MADE)
def test_strategy_goes_on_from_a_checkpoint_with_the_same_bits(name: str) -> None:
    from strategies.run.checkpoint import flatten, unflatten

    whole = model_of(wrap(MADE[name][0]()))
    one_round(whole, 1, [weights(k) for k in range(3)])
    tree = unflatten(*flatten(copy.deepcopy(whole.snapshot())))
    resumed = model_of(wrap(MADE[name][0]()))
    resumed.restore(tree)
    for model in (whole, resumed):
        one_round(model, 2, [weights(20 + k) for k in range(3)])
    assert all(torch.equal(whole.state[key], resumed.state[key]) for key in whole.state)


class Around(Strategy):
    """A strategy around another one, which counts its rounds."""

    def __init__(self, inner: Strategy) -> None:
        self.inner, self.rounds, self.last = inner, 0, ArrayRecord()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        self.rounds += 1
        found = self.inner.aggregate_train(server_round, replies)
        self.last = found[0]
        return found

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Ignore the report."""


# Refusals.

DP = (flower.DifferentialPrivacyServerSideFixedClipping, flower.DifferentialPrivacyClientSideFixedClipping)
DP_ADAPTIVE = (
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (FedAvg, "base is the class FedAvg: must be a strategy that returns one model"),
        (3, "base is a int: must be"),
        (flower.FedXgbBagging(), "FedXgbBagging, which cannot be refined: it returns trees"),
        (flower.FedXgbCyclic(), "FedXgbCyclic, which cannot be refined: it returns trees"),
        *[(kind(FedAvg(), 1.0, 1.0, 2), f"{kind.__name__}, which cannot be refined: it adds its noise") for kind in DP],
        *[(kind(FedAvg(), 1.0, 20), f"{kind.__name__}, which cannot.*LocalDpMod") for kind in DP_ADAPTIVE],
        (Around(DP[0](FedAvg(), 1.0, 1.0, 2)), "a Around around DifferentialPrivacyServerSideFixedClipping"),
        (Dense(net, num_classes=CLASSES, input_shape=SHAPE), "Dense, which cannot be refined: it runs a server stage"),
        (Iterative(net, num_classes=CLASSES, input_shape=SHAPE), "Iterative, which cannot be refined"),
        (FedAvg(fraction_train=0.0), "fraction_train 0.0, so it trains nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_strategy_that_cannot_be_refined_is_refused_in_a_line(base: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        wrap(base)


# Who is asked.


def test_every_strategy_of_flower_is_wrapped_or_refused() -> None:
    refused = {kind.__name__ for kind in (*DP, *DP_ADAPTIVE)} | {"FedXgbBagging", "FedXgbCyclic"}
    names = {name for name in flower.__all__ if name not in ("Result", "Strategy")}
    assert names == refused | set(MADE)
    assert not re.search("FedXgb", " ".join(MADE))
