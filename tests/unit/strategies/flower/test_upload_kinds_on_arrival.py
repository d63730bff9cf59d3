"""A method of another kind of uploads: its request to the clients, and its refusals on arrival."""

from __future__ import annotations

from pathlib import Path

import torch
from flower_fakes import CLASSES, SHAPE, Client, FakeGrid, net, records, strategy
from flwr.app import Message
from torch import nn

from strategies import FedOV


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


def test_models_whose_names_say_no_kind_are_taken_as_what_the_method_works_on(tmp_path: Path) -> None:
    def stock(message: Message) -> Message:
        return Message(records(wider().state_dict()), reply_to=message)

    found = strategy(FedOV, tmp_path / "run", model=wider)

    found.start(FakeGrid({1: stock, 2: stock}))

    assert len(found.report.job.uploads) == 2
    assert found.outcome(torch.zeros(2, *SHAPE)).shape == (2, CLASSES)
