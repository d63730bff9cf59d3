"""A client's part of a round: the server's model trained on by the rules of a strategy, through the app itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from client_fakes import RUN, Ask, reply_of
from flower_fakes import equal
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fl_app.models import build, builders
from strategies.core.seeds import seeded_torch
from strategies.flower.messages import read_reply
from strategies.uploads.checks import Signatures

SIGNATURES = Signatures(builders(10, (1, 16, 16)))
State = dict[str, torch.Tensor]


with seeded_torch(0):
    START = build("lenet5", num_classes=10, input_shape=(1, 16, 16)).state_dict()


@pytest.fixture
def ask(in_a_run: None) -> Ask:
    """Return a function that asks a client for one round, and returns its reply."""

    def asked(
        server_round: int = 1, *, said: dict[str, Any] | None = None, control: State | None = None, **settings: Any
    ) -> Message:
        config = {"iterative": True, "server-round": server_round, "run-id": RUN, "seed": 0, **(said or {})}
        content = RecordDict({"arrays": ArrayRecord(START), "config": ConfigRecord(config)})
        if control is not None:
            content["control"] = ArrayRecord(control)
        return reply_of(content, **{"client__epochs": 1, "client__batch_size": 64, **settings})

    return asked


def arrays_of(reply: Message, name: str = "arrays") -> State:
    return dict(reply.content.array_records[name].to_torch_state_dict())


def test_answer_is_one_that_the_server_accepts_and_tells_how_far_it_went(ask: Ask) -> None:
    reply = ask(client__momentum=0.0)
    checked = read_reply(reply.content, SIGNATURES, num_classes=10, max_bytes=2**20, sender="node-9")
    assert (checked.facts.client, checked.facts.architecture) == ("client-001", "lenet5")
    assert checked.facts.num_examples is not None
    assert checked.facts.label_counts is not None
    assert checked.metrics.keys() == {"train-loss", "train-accuracy", "travel"}
    # As many steps of 0.01 as there are batches of 64; one of a single image is left out.
    steps = checked.facts.num_examples // 64 + (checked.facts.num_examples % 64 > 1)
    assert checked.metrics["travel"] == pytest.approx(0.01 * steps)
    assert set(reply.content) == {"arrays", "metrics", "upload"}
    assert not equal(arrays_of(reply), START)


def test_control_variate_of_the_server_steers_and_the_client_s_own_is_remembered(ask: Ask, tmp_path: Path) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in START.items()}
    first = ask(1, control=zeros, client__momentum=0.0)
    assert equal(arrays_of(first), arrays_of(ask(1, client__momentum=0.0)))
    change = arrays_of(first, "control")
    travel = first.content.metric_records["metrics"]["travel"]
    for name, value in arrays_of(first).items():
        torch.testing.assert_close(change[name], (START[name] - value) / travel)
    names = [path.name for path in (tmp_path / "state" / RUN).glob("*.safetensors")]
    assert names == ["client-001-state-1.safetensors"]
    # c - c_i is now the other way: what it did in the first round is taken off.
    second = ask(2, control=zeros, client__momentum=0.0)
    assert not equal(arrays_of(second), arrays_of(ask(2, client__momentum=0.0)))


def test_feddyn_s_drift_is_remembered_and_pulls_in_the_next_round(ask: Ask, tmp_path: Path) -> None:
    dyn = {"feddyn-alpha": 1.0}
    first = arrays_of(ask(1, said={**dyn, "last-round": 0}))
    assert equal(first, arrays_of(ask(1, said={"proximal-mu": 1.0})))  # h is 0
    (kept,) = (tmp_path / "state" / RUN).glob("*.safetensors")
    assert kept.name == "client-001-state-1.safetensors"
    second = ask(2, said={**dyn, "last-round": 1, "safe-round": 0})
    assert second.content.metric_records["metrics"]["restarted"] == 0.0
    assert not equal(arrays_of(second), arrays_of(ask(2, said={**dyn, "last-round": 0})))
    kept.unlink()
    lost = ask(2, said={**dyn, "last-round": 1, "safe-round": 0})
    assert lost.content.metric_records["metrics"]["restarted"] == 1.0
    assert equal(arrays_of(lost), arrays_of(ask(2, said={"proximal-mu": 1.0})))


@pytest.mark.parametrize(
    ("settings", "said", "reason"),
    [
        ({"client__checkpoint": "x.pt"}, {}, "client.checkpoint is 'x.pt': must be '', because rounds train the model"),
        ({"model__name": "cnn-torch"}, {}, "the server's weights have other names or shapes"),
        ({}, {"run-id": "../../etc"}, "the server's run-id is '../../etc'"),
        ({"data__name": "svhn", "data__root": "nowhere"}, {}, "svhn"),
    ],
)
def test_client_that_cannot_take_part_says_why(
    ask: Ask, settings: dict[str, Any], said: dict[str, Any], reason: str
) -> None:
    facts = ask(said=said, **settings).content.config_records["upload"]
    assert facts["client"] == "client-001"
    assert reason in str(facts["error"])
