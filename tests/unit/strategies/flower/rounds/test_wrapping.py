"""Flower strategies under a refinement: which of them fit, what they see, and that they start from the refined one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from flower_fakes import CLASSES, SHAPE, FakeGrid, net, records, silent, weights
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
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


MADE: dict[str, Callable[[], FedAvg]] = {
    "FedAvg": FedAvg,
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "FedAvgM": lambda: FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
    "FedAdagrad": flower.FedAdagrad,
    "FedAdam": FedAdam,
    "FedYogi": lambda: flower.FedYogi(eta=0.1),
    "FedMedian": flower.FedMedian,
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.34),  # of three it takes one away at either end
    "Krum": Krum,
    "MultiKrum": lambda: flower.MultiKrum(num_nodes_to_select=2),
    "Bulyan": flower.Bulyan,
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1, q=0.2),
}


def alone(strategy: FedAvg, number: int, start: State, states: list[State]) -> State:
    """Return what Flower's own strategy makes of a round that begins with these arrays."""
    begun = ArrayRecord(start)
    if isinstance(strategy, FedAvgM):
        strategy.current_arrays = begun  # which it takes of the first round alone
    asked = strategy.configure_train(number, begun, ConfigRecord(), FakeGrid(dict.fromkeys((1, 2, 3), silent)))  # type: ignore[arg-type]
    replies = []
    for message, state, count, loss in zip(asked, states, EXAMPLES, LOSSES, strict=True):
        content = records({name: state[name] for name in start}, num_examples=count, train_loss=loss)
        replies.append(Message(content, reply_to=message))
    arrays, _ = strategy.aggregate_train(number, replies)
    assert arrays is not None
    return dict(arrays.to_torch_state_dict())


@pytest.mark.parametrize("name", MADE)
def test_every_round_starts_from_the_refined_model_in_the_strategy_s_own_arithmetic(name: str) -> None:
    base, twin = wrap(MADE[name]()), MADE[name]()
    model, start = model_of(base), weights(5)
    shown = PARAMETERS if base.sees == "parameters" else [n for n, v in start.items() if v.is_floating_point()]
    for number in (1, 2):
        states = [weights(10 * number + k) for k in range(3)]
        assert one_round(model, number, states) is not None
        wanted = alone(twin, number, {key: start[key] for key in shown}, states)
        for key in PARAMETERS:
            torch.testing.assert_close(model.state[key], wanted[key].float(), rtol=2e-4, atol=2e-5, msg=key)
        # A refinement: another model is the next round's start.
        start = {key: value + 0.25 if key in PARAMETERS else value for key, value in model.state.items()}
        model.state = start


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
    plain, _ = FedAvg().aggregate_train(1, [Message(c, dst_node_id=1, message_type="train") for c in contents])
    for key, value in plain.to_torch_state_dict().items():
        if value.is_floating_point() and "batches" not in key:
            assert torch.equal(value, model.state[key]), key


# What outlives the process.


@pytest.mark.parametrize("name", MADE)
def test_strategy_goes_on_from_a_checkpoint_with_the_same_bits(name: str) -> None:
    from strategies.run.checkpoint import flatten, unflatten

    whole = model_of(wrap(MADE[name]()))
    one_round(whole, 1, [weights(k) for k in range(3)])
    tree = unflatten(*flatten(copy.deepcopy(whole.snapshot())))
    resumed = model_of(wrap(MADE[name]()))
    resumed.restore(tree)
    for model in (whole, resumed):
        one_round(model, 2, [weights(20 + k) for k in range(3)])
    assert all(torch.equal(whole.state[key], resumed.state[key]) for key in whole.state)


class Around(FedAvg):
    """A strategy around another one."""

    def __init__(self, inner: Strategy) -> None:
        super().__init__()
        self.inner = inner


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
