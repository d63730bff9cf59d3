"""A method of another kind of uploads: its request to the clients, and its refusals on arrival."""

from __future__ import annotations

from pathlib import Path

from flower_fakes import FakeGrid, linear, named, records, strategy
from flwr.app import Message

from strategies import FedENS


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
