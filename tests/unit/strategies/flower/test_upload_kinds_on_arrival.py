"""A method of another kind of uploads: its request to the clients, and its refusals on arrival."""

from __future__ import annotations

from pathlib import Path

import torch
from flower_fakes import CLASSES, SHAPE, Client, FakeGrid, linear, named, net, records, strategy
from flwr.app import Message
from torch import nn

from strategies import FedENS, FedOV


def wider() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES + 1))


def test_fedov_asks_for_open_set_classifiers_and_refuses_others_on_arrival(tmp_path: Path) -> None:
    tasks: list[object] = []

    def client(name: str, model: nn.Module, architecture: str) -> Client:
        def answer(message: Message) -> Message:
            tasks.append(message.content.config_records["config"]["task"])
            facts = {"client": name, "architecture": architecture}
            return Message(records(model.state_dict(), facts=facts), reply_to=message)

        return answer

    nodes = {1: client("alice", wider(), "net+unknown"), 2: client("bob", wider(), "net+unknown")}
    nodes[3] = client("carol", net(), "net")
    models = {"net": net, "net+unknown": wider}
    found = strategy(FedOV, tmp_path / "run", model=models, student="net")

    found.start(FakeGrid(nodes))

    assert tasks == ["open-set"] * 3
    assert [upload.client for upload in found.report.job.uploads] == ["alice", "bob"]
    [refused] = found.folder.round(1).refused()
    found.close()
    assert (refused["client"], refused["reason"]) == (
        "carol", "upload.architecture is 'net', known here are net+unknown",
    )  # fmt: skip
    assert found.outcome(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)


def test_finite_weights_whose_outputs_overflow_cost_their_client_alone(tmp_path: Path) -> None:
    def eve(message: Message) -> Message:
        state = {key: value.new_full(value.shape, 3e38) for key, value in linear().state_dict().items()}
        return Message(records(state, facts={"client": "eve", "architecture": "linear"}), reply_to=message)

    found = strategy(FedENS, tmp_path / "run", model={"linear": linear})

    honest = {2: named("alice", 1, architecture="linear"), 3: named("bob", 2, architecture="linear")}
    found.start(FakeGrid({1: eve, **honest}))

    assert [upload.client for upload in found.report.job.uploads] == ["alice", "bob"]
    [refused] = found.folder.round(1).refused()
    found.close()
    assert refused["client"] == "eve"
    assert "outputs for normal noise are not (largest value 3e+38)" in refused["reason"]
