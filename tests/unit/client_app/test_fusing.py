"""FuseFL with the app's clients: its stages after the upload, from messages to the fused result; and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from client_fakes import SIDE, accuracy, app_clients, app_settings, app_strategy, failing
from flower_fakes import FakeGrid, equal
from flwr.app import Message

from client_app import fusefl
from client_app.keeping import KeptModel
from client_app.node import Node, TrainRequest
from client_app.work import load_examples, prepare_upload
from fl_app.data import normalize
from fl_app.models import build
from fl_app.models.client_nets import cut
from server_app.settings.read import Settings
from strategies.core.errors import QuorumError, UploadError
from strategies.core.seeds import seeded_torch
from strategies.run.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("in_a_run")

RUN, CLIENTS = "a" * 32, 3
SETTINGS: dict[str, Any] = {
    "method": "fusefl", "data__partition": "iid", "data__limit": 150, "client__epochs": 2, "client__batch_size": 10,
    "client__optimizer": "adam", "client__lr": 0.003, "fusefl__draws": 64,
}  # fmt: skip


def settings_of(**changes: Any) -> Settings:
    return app_settings(**{**SETTINGS, **changes})


def clients(settings: Settings, wrong: Callable[[Message], Message | None] | None = None) -> FakeGrid:
    return app_clients(settings, CLIENTS, wrong, kind="train.fusefl")


def test_clients_train_block_by_block_and_the_result_is_the_fused_network_of_their_blocks(tmp_path: Path) -> None:
    settings = settings_of(client__epochs=8)
    strategy, grid = app_strategy(settings, tmp_path / "run"), clients(settings)

    strategy.start(grid, timeout=60.0)

    report = strategy.report
    kinds = [message.metadata.message_type for message in grid.asked]
    assert kinds == ["train"] * CLIENTS + ["train.fusefl"] * 2 * CLIENTS
    told = [message.content.config_records["config"] for message in grid.asked]
    assert {tuple(each["expected-classes"]) for each in told} == {tuple(map(str, range(10)))}
    assert report.outcome.work["exchanges"] == 2
    assert report.outcome.ensemble.combiner == "fused-blocks"
    assert [upload.architecture for upload in report.job.uploads] == ["lenet5+block"] * CLIENTS
    # What a client keeps of stage 2 is what it sent: its block in the result, and its share of the classifier.
    weights, heads = report.outcome.ensemble.weights, []
    for number, upload in enumerate(report.job.uploads):
        kept = KeptModel("", RunFolder.open(tmp_path / "run", write=False).id, upload.client, 2).load()
        assert torch.equal(weights[f"stages.0.{number}.block.fc1.weight"], kept[1]["1.block.fc1.weight"])
        assert weights[f"stages.0.{number}.adapter.weight"].shape == (16, 16 * CLIENTS, 1, 1)
        heads.append(kept[1]["classifier.weight"])
        for other, sender in enumerate(report.job.uploads):
            assert torch.equal(kept[1]["frozen.1.conv1.weight"][other], sender.read()["conv1.weight"])
    assert not torch.allclose(weights["classifier.weight"], torch.stack(heads).mean(0))  # it was calibrated
    assert accuracy(strategy.outcome, 200) > 0.6


def test_run_without_a_client_s_answer_stops_and_resumes_after_the_last_exchange_with_the_same_bits(
    tmp_path: Path,
) -> None:
    settings = settings_of(checkpoint_s=0.0, client__epochs=1)
    whole = app_strategy(settings, tmp_path / "whole")
    whole.start(clients(settings), timeout=60.0)

    def answered(message: Message) -> Message:
        return failing(message) if int(message.content["config"]["stage"]) == 3 else settled(message)

    grid = clients(settings, answered)
    settled = clients(settings).nodes[2]
    with pytest.raises(QuorumError, match=r"calibration: 2 usable answers .*, needs 3.*The run can be resumed"):
        app_strategy(settings, tmp_path / "run").start(grid, timeout=60.0)
    refusals = RunFolder.open(tmp_path / "run", write=False).round(1).refused()
    again, honest = app_strategy(settings, tmp_path / "run"), clients(settings)
    again.start(honest, timeout=60.0)

    assert any("its disk is full" in str(line) for line in refusals)
    assert [int(message.content["config"]["stage"]) for message in honest.asked] == [3] * CLIENTS
    found, wanted = again.report.outcome.ensemble.weights, whole.report.outcome.ensemble.weights
    assert equal(found, wanted)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Settings, Node]:
    """A client that has trained and uploaded its first block."""
    folder = tmp_path_factory.mktemp("state")
    settings = settings_of(client__state_dir=str(folder))
    node = Node.of({"partition-id": 0, "num-partitions": CLIENTS}, settings.app)
    prepare_upload(settings.app, node, TrainRequest(RUN, 1, 0, task="block"), {})
    return settings, node


def question(settings: Settings, *, members: int = 2, stage: int = 2, **changes: Any) -> tuple[dict[str, Any], Any]:
    with seeded_torch(5):
        firsts = [
            cut("lenet5", build("lenet5", num_classes=10, input_shape=(1, SIDE, SIDE)), 2)[0] for _ in range(members)
        ]
    states = [first.state_dict() for first in firsts]
    said = {"stage": stage, "adapter": "conv", "run-id": RUN, "seed": 0, **changes}
    return said, {key: torch.stack([state[key] for state in states]) for key in states[0]}


def test_a_stage_is_a_step_on_the_loss_above_the_frozen_outputs(trained: tuple[Settings, Node]) -> None:
    settings, node = trained
    client = replace(settings.app.client, epochs=1, batch_size=500, optimizer="sgd", momentum=0.0, clip=0.0, lr=0.1)
    config = replace(settings.app, client=client)
    said, sent = question(settings)

    found = fusefl.answer(config, node, said, sent)
    still = fusefl.answer(replace(config, client=replace(client, lr=1e-9)), node, said, sent)  # where it began

    kept = KeptModel(node.state_dir, RUN, node.client, 1).load()
    torch.testing.assert_close(still["block.fc1.weight"], kept[1]["1.fc1.weight"])
    own = load_examples(config, node, TrainRequest(RUN, 1, 0))
    data = own.split.take(own.train)
    x, firsts = normalize(data.images, *own.split.normalization), []
    for k in range(2):  # LeNet-5's first block, by its formula; 16 pixels a side are padded twice
        maps = F.relu(F.max_pool2d(F.conv2d(x, sent["conv1.weight"][k], sent["conv1.bias"][k], padding=2), 2))
        firsts.append(
            F.relu(F.max_pool2d(F.conv2d(maps, sent["conv2.weight"][k], sent["conv2.bias"][k], padding=2), 2))
        )
    start = {key: value.clone().requires_grad_() for key, value in still.items()}
    mixed = F.conv2d(torch.cat(firsts, 1), start["adapter.weight"], start["adapter.bias"])
    hidden = F.relu(F.linear(mixed.flatten(1), start["block.fc1.weight"], start["block.fc1.bias"]))
    features = F.relu(F.linear(hidden, start["block.fc2.weight"], start["block.fc2.bias"]))
    logits = F.linear(features, start["classifier.weight"], start["classifier.bias"])
    F.cross_entropy(logits, data.labels).backward()  # type: ignore[no-untyped-call]

    assert found.keys() == start.keys()
    for key, value in start.items():
        assert value.grad is not None
        torch.testing.assert_close(found[key], value.detach() - 0.1 * value.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"stage": 1}, r"the server's stage is 1: must be 2 to 3 \(client.blocks\)"),
    ({"stage": 4}, "the server's stage is 4: must be 2 to 3"),
    ({"adapter": "sum"}, "the server's adapter is 'sum', for 1 blocks: must be one of conv, mean"),
    ({"run-id": "b" * 32}, "lacks the model that it trained up to block 1 of this run"),
])  # fmt: skip
def test_questions_that_do_not_fit_are_refused(
    trained: tuple[Settings, Node], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UploadError, match=reason):
        fusefl.answer(trained[0].app, trained[1], *question(trained[0], **changes))


def test_blocks_of_another_model_or_too_many_of_them_are_refused(trained: tuple[Settings, Node]) -> None:
    (settings, node), (said, sent) = trained, question(trained[0])

    with pytest.raises(UploadError, match=r"the server's blocks 1 do not fit this client's: .*conv1"):
        fusefl.answer(settings.app, node, said, {**sent, "conv1.weight": sent["conv1.weight"][:, :3]})
    with pytest.raises(UploadError, match="the clients' blocks are 0.0 MiB: must be at most 0.001 MiB on this node"):
        fusefl.answer(settings.app, node, said, sent, max_mib=0.001)


@pytest.mark.parametrize("shape", [(2, 5000, 0), (2,), (2, 5, 10, 1, 1)])
def test_an_adapter_of_other_channels_than_the_block_below_has_is_refused(
    trained: tuple[Settings, Node], shape: tuple[int, ...]
) -> None:
    (settings, node), (said, sent) = trained, question(trained[0])
    block = fusefl.answer(settings.app, node, said, sent)
    both = {key: torch.stack([value, value]) for key, value in block.items() if not key.startswith("classifier")}

    with pytest.raises(UploadError, match=r"the server's blocks 2 do not fit .* \['adapter.weight'\]"):
        fusefl.answer(settings.app, node, {**said, "stage": 3}, {**both, "adapter.weight": torch.zeros(shape)})
