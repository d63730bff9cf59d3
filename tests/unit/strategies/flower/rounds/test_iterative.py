"""Federated learning in rounds, on a grid of Python functions: every strategy, faults, resume, sampling."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import (
    CLASSES,
    ONE_THREAD,
    SHAPE,
    SIGNATURES,
    Client,
    DeployedGrid,
    FakeGrid,
    Hostile,
    crashing,
    equal,
    failing,
    in_turn,
    net,
    silent,
    stock,
    weights,
)  # fmt: skip
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from torch import nn

from strategies import Iterative, IterativeConfig
from strategies.client import upload_facts
from strategies.client.corrections import LocalUpdate, read_round
from strategies.client.round_state import RoundState
from strategies.core.errors import OneShotError, OptionError, QuorumError, UploadError
from strategies.flower.messages import count_bytes
from strategies.flower.nodes import Limits, Nodes, Refusals
from strategies.flower.rounds import loop
from strategies.flower.rounds.base import Base, base_of
from strategies.flower.rounds.fednova import FedNova
from strategies.flower.rounds.round_trip import RoundTrip, Terms
from strategies.flower.rounds.stc import Stc
from strategies.method import Normalization
from strategies.rounds.config import TITLES
from strategies.rounds.refinement import Refiner
from strategies.run.traffic import Traffic
from strategies.teacher.average import weighted_mean

State = dict[str, torch.Tensor]
Asked = list[tuple[str, Mapping[str, Any], list[str]]]


def trainer(
    name: str, seed: int, *, place: Path | None = None, examples: int = 10, asked: Asked | None = None
) -> Client:
    """A client that trains two steps by the strategy's rules, on examples of its own."""
    inputs = torch.randn(examples, *SHAPE, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(examples) % CLASSES

    def answer(message: Message) -> Message:
        facts = upload_facts(client=name)
        if message.metadata.message_type == MessageType.QUERY:
            return Message(RecordDict({"upload": facts}), reply_to=message)
        said, sent = read_round(message)
        if asked is not None:
            asked.append((name, said, sorted(sent)))
        model = net()
        update = LocalUpdate(model, said, sent, memory=RoundState(place, name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(1 + seed % 3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model.train()(inputs), labels) + update.penalty(model)
            loss.backward()
            optimizer.step()
            update.step(0.1)
        records, metrics = update.finish(model)
        content = RecordDict({key: ArrayRecord(state) for key, state in records.items()})
        content["metrics"] = MetricRecord({"num-examples": examples, "train-loss": loss.item(), **metrics})
        content["upload"] = facts
        return Message(content, reply_to=message)

    return answer


def three(place: Path | None = None, **more: Any) -> dict[int, Client]:
    names = ((7, "carol", 3), (5, "alice", 1), (6, "bob", 2))
    return {node: trainer(name, seed, place=place, examples=8 + seed, **more) for node, name, seed in names}


def iterative(run_dir: Path, **changes: Any) -> Iterative:
    """A strategy over tiny models; a setting for each argument that it lacks."""
    own_keys = ("min_uploads", "observer", "base", "seed", "refiner", "compute")
    own = {key: changes.pop(key) for key in own_keys if key in changes}
    config = IterativeConfig(**{"rounds": 3, "stc_density": 0.2, **changes})
    return Iterative(
        net, num_classes=CLASSES, input_shape=SHAPE, config=config, run_dir=run_dir, options=ONE_THREAD, **own
    )


def result_of(strategy: Iterative, clients: Mapping[int, Client], **more: Any) -> State:
    return dict(strategy.start(FakeGrid(clients), ArrayRecord(weights(5)), **more).arrays.to_torch_state_dict())


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_rows_without_a_normalization_stay_as_they_are_in_rounds() -> None:
    rows = Iterative(lambda: nn.Sequential(nn.Flatten(), nn.Linear(5, 2)), num_classes=2, input_shape=(5, 1, 1))
    assert rows.job.normalization == Normalization((0.0,) * 5, (1.0,) * 5)
    images = Iterative(net, num_classes=CLASSES, input_shape=SHAPE)
    assert images.job.normalization == Normalization((0.5,), (0.5,))


@pytest.mark.parametrize("name", TITLES)
def test_every_strategy_runs_its_rounds_and_keeps_them(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    scores = iter([30.0, 10.0, 20.0])
    strategy = iterative(run, strategy=name, observer=lambda number, module: {"accuracy": next(scores)})
    result = strategy.start(FakeGrid(three(tmp_path / "disk")))
    state = result.arrays.to_torch_state_dict()
    assert {key: value.dtype for key, value in state.items()} == {k: v.dtype for k, v in net().state_dict().items()}
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert equal(dict(strategy.outcome.state_dict()), dict(state))
    assert (strategy.outcome.state_dict()["1.running_var"] > 0).all()
    rows = rows_of(run)
    assert [(row["epoch"], row["answers"], row["accuracy"]) for row in rows] == [(1, 3, 30), (2, 3, 10), (3, 3, 20)]
    assert all(row["mib_per_client"] == pytest.approx(row["mib_up"] + row["mib_down"]) for row in rows)
    assert rows[0]["mib_up"] < rows[2]["mib_up"]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert json.loads((run / "run.json").read_text())["config"]["strategy"] == name
    assert not (run / "checkpoint").exists()
    assert (run / "student.safetensors").exists()


def test_fedavg_is_the_mean_of_the_answers_by_their_examples(tmp_path: Path) -> None:
    clients = {1: stock(1, num_examples=10), 2: stock(2, num_examples=30)}
    found = result_of(iterative(tmp_path / "run", rounds=1), clients)
    wanted = weighted_mean([weights(1), weights(2)], [10.0, 30.0])
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("name", TITLES)
def test_clients_are_shown_by_name_whatever_their_nodes(tmp_path: Path, name: str) -> None:
    first = result_of(iterative(tmp_path / "a", strategy=name), three(tmp_path / "disk-a"))
    nodes = three(tmp_path / "disk-b").values()  # carol first
    turned = result_of(iterative(tmp_path / "b", strategy=name), dict(enumerate(nodes, start=1)))
    assert equal(first, turned)


class KilledError(Exception):
    """Stands for whatever ends a process."""


def mortal(clients: Mapping[int, Client], server_round: int) -> dict[int, Client]:
    """Clients whose server dies while it waits for the first of them in a round."""

    def wrapped(client: Client) -> Client:
        def answer(message: Message) -> Message | None:
            if message.content["config"].get("server-round") == server_round and message.metadata.dst_node_id == 7:
                raise KilledError
            return client(message)

        return answer

    return {node: wrapped(client) for node, client in clients.items()}


@pytest.mark.parametrize("name", TITLES)
def test_run_that_was_cut_off_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    more = {"strategy": name, "rounds": 4, "server_momentum": 0.9 * (name == "fednova")}
    whole = result_of(iterative(tmp_path / "whole", **more), three(tmp_path / "disk-whole"))
    run, disk = tmp_path / "run", tmp_path / "disk"
    with pytest.raises(KilledError):
        result_of(iterative(run, **more), mortal(three(disk), 3))
    # In the round that was cut off, two of three clients have remembered it already.
    asked: Asked = []
    found = iterative(run, **more)
    assert equal(result_of(found, three(disk, asked=asked)), whole)
    assert sorted({said["server-round"] for _, said, _ in asked}) == [3, 4]
    assert found.report.resumed_at == 2
    assert [row["epoch"] for row in rows_of(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("returned", "kept"),
    [({"loss": torch.tensor(0.5), "each": np.ones(2)}, {"loss": 0.5, "each": [1.0, 1.0]}), ((0.5, {"acc": 1.0}), None)],
    ids=["tensors", "the form of old Flower"],
)
def test_run_goes_on_after_its_scores_whatever_the_projects_function_returns(
    tmp_path: Path, returned: Any, kept: dict[str, Any] | None
) -> None:
    run, more = tmp_path / "run", {"evaluate_fn": lambda number, arrays: returned}
    with pytest.raises(KilledError):
        result_of(iterative(run), mortal(three(), 3), **more)
    result = iterative(run).start(FakeGrid(three()), ArrayRecord(weights(5)), **more)
    assert result.evaluate_metrics_serverapp == ({} if kept is None else dict.fromkeys(range(4), kept))


def test_clients_numbers_take_no_name_of_a_row_of_metrics_and_a_resumed_run_keeps_its_rows(tmp_path: Path) -> None:
    def telling(client: Client) -> Client:
        def answer(message: Message) -> Message | None:
            if (reply := client(message)) is not None and "metrics" in reply.content:
                reply.content["metrics"].update({"epoch": 5, "accuracy": 0.9, "answers": 77.0})
            return reply

        return answer

    told = {node: telling(client) for node, client in three().items()}
    run, more = tmp_path / "run", {"observer": lambda number, model: {"accuracy": 50.0 + number}, "evaluate_every": 2}
    with pytest.raises(KilledError):
        result_of(iterative(run, **more), mortal(told, 3))
    result_of(iterative(run, **more), told)
    rows = rows_of(run)
    assert [(row["epoch"], row["answers"], row.get("accuracy")) for row in rows] == [
        (1, 3, None),
        (2, 3, 52),
        (3, 3, 53),
    ]
    assert {(row["train-epoch"], row["train-accuracy"], row["train-answers"]) for row in rows} == {(5, 0.9, 77)}


def test_fednova_with_momentum_adds_a_share_of_the_last_step() -> None:
    def moved_by_one(start: float) -> RecordDict:
        told = MetricRecord({"num-examples": 5, "travel": 0.3})
        return RecordDict({"arrays": ArrayRecord({"w": torch.tensor([start + 1.0])}), "metrics": told})

    strategy, w = FedNova(server_momentum=0.9), {"w": np.zeros(1, np.float32)}
    ways = []
    for _ in range(3):
        step = strategy.step(w, [moved_by_one(float(w["w"][0]))], num_clients=1)
        ways.append(float(step["w"][0] - w["w"][0]))
        w = step

    assert ways == pytest.approx([1.0, 1.9, 1.0 + 0.9 * 1.9])


def test_finished_run_is_read_and_no_client_asked(tmp_path: Path) -> None:
    whole = result_of(iterative(tmp_path / "run"), three())
    asked: Asked = []
    assert equal(result_of(iterative(tmp_path / "run"), three(asked=asked)), whole)
    assert asked == []
    with pytest.raises(OptionError, match="rounds is 4, but the run in .* began with 3"):
        result_of(iterative(tmp_path / "run", rounds=4), three())


def test_num_rounds_is_the_number_of_rounds(tmp_path: Path) -> None:
    result_of(iterative(tmp_path / "run"), three(), num_rounds=2)
    assert len(rows_of(tmp_path / "run")) == 2


# Faults.


def test_round_goes_on_with_a_quorum(tmp_path: Path, said: list[str]) -> None:
    clients = {**three(), 8: failing("ValueError: no data"), 9: stock(9, architecture="linear")}
    asked: list[int] = []
    found = iterative(tmp_path / "run")
    result_of(found, clients, timeout=5.0)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]
    refused = [json.loads(line) for line in (tmp_path / "run" / "refusals.jsonl").read_text().splitlines()]
    assert [entry["client"] for entry in refused] == ["node-8", "node-9"]  # once, not in every round
    assert refused[0]["reason"] == "ValueError: no data"
    assert "do not fit architecture" in refused[1]["reason"]
    assert asked == []
    assert "refused node-8: ValueError: no data" in said


def bad(content: Callable[[RecordDict], None]) -> Client:
    """A client that trains, and then spoils its answer."""
    good = trainer("mallory", 4)

    def answer(message: Message) -> Message | None:
        reply = good(message)
        assert reply is not None
        if message.metadata.message_type == MessageType.TRAIN:
            content(reply.content)
        return reply

    return answer


def nan(content: RecordDict) -> None:
    state = content["arrays"].to_torch_state_dict()
    state["0.weight"][0] = float("nan")
    content["arrays"] = ArrayRecord(state)


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("fedavg", nan, r"arrays\['0.weight'\] holds NaN or Inf"),
        ("fednova", lambda c: c["metrics"].pop("travel"), r"metrics\['travel'\] is None: must be a positive"),
        ("fednova", lambda c: c["metrics"].update({"travel": 0.0}), r"metrics\['travel'\] is 0.0"),
        ("scaffold", lambda c: c.pop("control"), "array record 'control' is missing"),
        ("scaffold", lambda c: c["control"].pop("0.weight"), "control do not fit .*missing 0.weight"),
        ("stc", lambda c: c.pop("ternary"), "array record 'ternary' is missing"),
        ("stc", lambda c: c["ternary"].pop("bits"), "ternary holds .*'magnitude'"),
        ("fedprox", lambda c: c["metrics"].update({"num-examples": 0}), r"metrics\['num-examples'\] is 0"),
        ("fedavg", lambda c: c["upload"].update({"pretrained": True}), "it trained nothing in this round"),
        ("fedavg", lambda c: c["upload"].update({"client": "alice"}), "two nodes answer under this name"),
    ],
)
def test_spoilt_answer_is_refused_and_the_others_count(
    tmp_path: Path, name: str, spoil: Callable[[RecordDict], None], reason: str
) -> None:
    good = three(tmp_path / "disk-a")
    clean = result_of(iterative(tmp_path / "clean", strategy=name, rounds=1), good)
    run = tmp_path / "run"
    # The last node, so that a second answer under a name is this one.
    found = result_of(iterative(run, strategy=name, rounds=1), {**three(tmp_path / "disk-b"), 9: bad(spoil)})
    (refusal,) = [json.loads(line) for line in (run / "refusals.jsonl").read_text().splitlines()]
    assert re.search(reason, refusal["reason"]), refusal["reason"]
    if name != "scaffold":  # N counts all who are connected
        assert equal(found, clean)


def test_round_in_which_every_client_fails_keeps_the_model(tmp_path: Path, said: list[str]) -> None:
    def sometimes(client: Client) -> Client:
        def answer(message: Message) -> Message | None:
            failed = message.content["config"]["server-round"] % 2 == 0
            return (failing("busy") if failed else client)(message)

        return answer

    states: list[State] = []

    def observer(number: int, module: nn.Module) -> dict[str, float]:
        states.append({key: value.clone() for key, value in module.state_dict().items()})
        return {}

    clients = {node: sometimes(client) for node, client in three().items()}
    result_of(iterative(tmp_path / "run", rounds=6, observer=observer), clients)
    assert [equal(before, after) for before, after in pairwise(states)] == [True, False, True, False, True]
    # Three rounds are lost, but never one after the other.
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 0, 3, 0, 3, 0]
    assert "round 2: 0 usable answers, needs 2: the model stays unchanged" in said


def test_run_whose_clients_answer_no_more_ends_and_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(QuorumError, match="round 3: 0 usable answers, needs 2, for the 3rd time .* can be resumed"):
        result_of(iterative(run, rounds=5), {1: failing("gone"), 2: failing("gone")})
    result_of(iterative(run, rounds=5), three())
    assert [row["answers"] for row in rows_of(run)] == [0, 0, 3, 3, 3]


def test_run_without_clients_says_so(tmp_path: Path) -> None:
    with pytest.raises(QuorumError, match="0 clients are connected after 9 s, min-uploads is 2"):
        result_of(iterative(tmp_path / "run"), {}, timeout=9.0)
    grid = FakeGrid({1: stock(1)}, simulation=False)
    with pytest.raises(QuorumError, match="1 clients are connected after 9 s"):
        iterative(tmp_path / "other").start(grid, timeout=9.0)


def test_late_client_is_asked_again_only_after_its_answer(tmp_path: Path) -> None:
    asked: Asked = []
    grid = FakeGrid(three(asked=asked), delays={7: 75})
    iterative(tmp_path / "run", rounds=4).start(grid, timeout=5.0)
    rounds = [said["server-round"] for name, said, _ in asked if name == "carol"]
    assert rounds[0] == 1
    assert rounds != [1, 2, 3, 4]
    assert rows_of(tmp_path / "run")[0]["answers"] == 2


def refusals_of(run: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (run / "refusals.jsonl").read_text().splitlines()]
    return [(row["client"], row["reason"]) for row in rows]


def test_client_whose_answer_was_lost_is_asked_again_in_its_round(tmp_path: Path) -> None:
    clients = three()
    clients[7] = in_turn(crashing, clients[7])
    result = iterative(tmp_path / "run").start(DeployedGrid(clients), ArrayRecord(weights(5)), timeout=60.0)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]
    assert not (tmp_path / "run" / "refusals.jsonl").exists()
    assert equal(dict(result.arrays.to_torch_state_dict()), result_of(iterative(tmp_path / "clean"), three()))


def test_round_goes_on_without_a_node_that_is_gone_if_it_has_its_quorum(tmp_path: Path, clock: Any) -> None:
    grid = DeployedGrid({**three(), 9: silent}, away={9: (40, 10**9)})
    iterative(tmp_path / "run", rounds=1).start(grid, timeout=3600.0)
    assert clock.now < 60.0
    reason = "the connection to the node was lost, and it has not come back"
    assert refusals_of(tmp_path / "run") == [("node-9", reason)]


def test_answer_that_cannot_be_inflated_costs_its_node_alone(tmp_path: Path) -> None:
    clean = result_of(iterative(tmp_path / "clean"), three())
    grid = Hostile({**three(), 9: stock(9)}, hostile=[9], error=KeyError("chunk"))
    found = iterative(tmp_path / "run").start(grid, ArrayRecord(weights(5)), timeout=60.0)
    assert equal(dict(found.arrays.to_torch_state_dict()), clean)
    assert refusals_of(tmp_path / "run") == [("node-9", "its answer cannot be read: KeyError: 'chunk'")]
    assert grid.of_type().count(9) == 1


def test_question_for_names_is_no_part_of_the_account(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result_of(iterative(run, rounds=1, fraction=0.4, min_uploads=1), three())
    moved = json.loads((run / "traffic.json").read_text())["phases"]["rounds"]
    assert moved["down"].keys() == moved["up"].keys()
    assert len(moved["down"]) == 2  # of three


def test_silent_client_costs_a_deadline_and_is_named(tmp_path: Path, said: list[str]) -> None:
    result_of(iterative(tmp_path / "run", rounds=2), {**three(), 9: silent}, timeout=5.0)
    assert said.count("refused node-9: no answer within 5 s") == 1


def test_model_that_diverges_ends_the_run_in_one_line(tmp_path: Path) -> None:
    class Diverging(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            state = arrays.to_torch_state_dict() if arrays else {}
            return ArrayRecord({key: value * float("inf") for key, value in state.items()}), metrics

    base = Base(Diverging(min_train_nodes=1, min_available_nodes=1))
    with pytest.raises(OneShotError, match="round 1: the strategy's model holds NaN or Inf; lower"):
        result_of(iterative(tmp_path / "run", base=base), three())


# Who is asked, and with what.


def participants(run: Path, fraction: float, **more: Any) -> list[list[str]]:
    asked: Asked = []
    clients = {node: trainer(f"c{node % 7}", node, asked=asked) for node in more.pop("nodes")}
    result_of(iterative(run, rounds=4, fraction=fraction, min_uploads=1, **more), clients)
    return [sorted(name for name, said, _ in asked if said["server-round"] == number) for number in (1, 2, 3, 4)]


def test_sample_of_clients_follows_from_the_seed_and_their_names(tmp_path: Path) -> None:
    nodes = [3, 4, 5, 6, 7]
    first = participants(tmp_path / "a", 0.4, nodes=nodes)
    assert [len(names) for names in first] == [2, 2, 2, 2]
    assert len({tuple(names) for names in first}) > 1
    # The same names behind other nodes.
    assert participants(tmp_path / "b", 0.4, nodes=[node + 7 for node in reversed(nodes)]) == first
    assert participants(tmp_path / "c", 0.4, nodes=nodes, seed=1) != first
    assert participants(tmp_path / "d", 1.0, nodes=nodes) == [["c0", "c3", "c4", "c5", "c6"]] * 4


def test_request_describes_the_round(tmp_path: Path) -> None:
    asked: Asked = []
    found = iterative(tmp_path / "run", strategy="fedprox", mu=0.3, lr_decay=0.5, rounds=2)
    result_of(found, three(asked=asked), train_config=ConfigRecord({"lr": 0.1}))
    _, said, sent = asked[-1]
    run_id = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    assert said == {
        "lr": 0.1, "server-round": 2, "run-id": run_id, "seed": 0, "iterative": True, "lr-factor": 0.5,
        "num-clients": 3, "proximal-mu": 0.3,
    }  # fmt: skip
    assert sent == ["arrays"]


def test_a_node_that_gets_no_more_questions_is_none_of_the_clients(tmp_path: Path) -> None:
    grid = Hostile({**three(), 9: silent}, hostile=[9], error=KeyError("chunk"))
    iterative(tmp_path / "run", strategy="scaffold", rounds=3).start(grid, timeout=60.0)
    told = [message.content.config_records["config"] for message in grid.asked if "arrays" in message.content]
    assert [said["num-clients"] for said in told] == [3] * 9


def test_bytes_are_those_of_the_messages(tmp_path: Path) -> None:
    grid = FakeGrid(three())
    found = iterative(tmp_path / "run", rounds=2)
    found.start(grid)
    down = sum(count_bytes(message.content) for message in grid.asked)
    traffic = json.loads((tmp_path / "run" / "traffic.json").read_text())["phases"]["rounds"]
    assert sum(traffic["down"].values()) == down
    assert set(traffic["up"]) == {"alice", "bob", "carol"}
    whole = sum(value.numel() * value.element_size() for value in net().state_dict().values())
    assert traffic["up"]["alice"] > 2 * whole


@pytest.mark.parametrize("values", ["ternary", "float16"])
def test_stc_sends_the_update_alone_to_clients_of_the_round_before(tmp_path: Path, values: str) -> None:
    asked: Asked = []
    clients = three(tmp_path / "disk", asked=asked)
    late = FakeGrid({**clients, 9: trainer("dave", 1, place=tmp_path / "disk", asked=asked)}, joins={9: 22})
    iterative(tmp_path / "run", strategy="stc", stc_values=values, rounds=3).start(late)
    found = {(name, said["server-round"]): sent for name, said, sent in asked}
    assert found["alice", 1] == ["arrays"]
    assert found["alice", 2] == found["alice", 3] == ["arrays", "ternary"]
    joined = min(number for name, number in found if name == "dave")
    assert joined > 1
    assert found["dave", joined] == ["arrays"]
    # A client's own sum of updates is the server's model: it could not have answered otherwise.
    assert rows_of(tmp_path / "run")[-1]["answers"] == 4


def test_stc_sends_the_whole_model_where_it_was_refined_since(tmp_path: Path) -> None:
    asked: Asked = []
    refiner = Refiner.of("flboost", iterations=1, batch_size=6, latent=5)
    found = iterative(tmp_path / "run", strategy="stc", rounds=3, refiner=refiner, compute="in-process")
    found.start(FakeGrid(three(tmp_path / "disk", asked=asked)), ArrayRecord(weights(5)))
    assert {tuple(sent) for _, _, sent in asked} == {("arrays",)}
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]


def forgetful(client: Client, disk: Path, name: str) -> Client:
    """A client that loses what it keeps before the second round."""

    def answer(message: Message) -> Message | None:
        if message.content["config"].get("server-round") == 2:
            for path in disk.glob(f"{name}-*"):
                path.unlink()
        try:
            return client(message)
        except UploadError as error:
            return failing(str(error))(message)

    return answer


def test_stc_client_that_lost_its_state_gets_the_whole_model_in_the_round_after(tmp_path: Path) -> None:
    asked: Asked = []
    clients = three(tmp_path / "disk", asked=asked)
    clients[5] = forgetful(clients[5], tmp_path / "disk", "alice")
    iterative(tmp_path / "run", strategy="stc", rounds=3).start(FakeGrid(clients))
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 2, 3]
    assert [sent for name, _, sent in asked if name == "alice"] == [["arrays"], ["arrays", "ternary"], ["arrays"]]


def test_scaffold_goes_on_from_zero_for_a_client_that_lost_its_state_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(loop, "say", said.append)
    found = {}
    for run in ("whole", "lost"):
        clients = three(disk := tmp_path / run / "disk")
        if run == "lost":
            clients[5] = forgetful(clients[5], disk, "alice")
        found[run] = result_of(iterative(tmp_path / run / "run", strategy="scaffold", rounds=3), clients)
        assert [row["answers"] for row in rows_of(tmp_path / run / "run")] == [3, 3, 3]
    line = "round 2: alice had lost its state of earlier rounds, and continues from zero"
    assert [each for each in said if "from zero" in each] == [line]
    assert any(not torch.equal(found["whole"][key], value) for key, value in found["lost"].items())


def test_stc_server_adds_the_rest_of_an_update_to_the_next(tmp_path: Path) -> None:
    strategy = Stc(density=0.1, fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)
    start = {"w": torch.zeros(40)}
    model, wanted = ArrayRecord(start), torch.zeros(40)
    for number in range(1, 5):
        grid = FakeGrid({1: silent})
        (question,) = strategy.configure_train(number, model, ConfigRecord(), grid)  # type: ignore[arg-type]
        step = torch.randn(40, generator=torch.Generator().manual_seed(number))
        wanted += step
        answer = {"w": model.to_torch_state_dict()["w"] + step}
        content = RecordDict({"arrays": ArrayRecord(answer), "metrics": MetricRecord({"num-examples": 5})})
        found, _ = strategy.aggregate_train(number, [Message(content, reply_to=question)])
        assert found is not None
        assert ((found.to_torch_state_dict()["w"] - model.to_torch_state_dict()["w"]).abs() > 1e-6).sum() == 4
        model = found
    assert strategy.left is not None
    torch.testing.assert_close(model.to_torch_state_dict()["w"] + torch.from_numpy(strategy.left), wanted)


def test_scaffold_keeps_the_mean_of_the_clients_control_variates(tmp_path: Path) -> None:
    base = base_of(IterativeConfig(strategy="scaffold"))
    disk = tmp_path / "disk"
    result_of(iterative(tmp_path / "run", strategy="scaffold", base=base), three(disk))
    control: Any = base.strategy.control  # type: ignore[attr-defined]
    own = [RoundState(disk, name).before(4)[1] for name in ("alice", "bob", "carol")]
    assert set(control) == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    for name, value in control.items():
        mean = sum(each[f"own.{name}"].numpy() for each in own) / 3
        np.testing.assert_allclose(value, mean, rtol=1e-3, atol=1e-5)
        assert np.abs(value).max() > 0


def test_fedadam_steps_along_parameters_and_averages_buffers(tmp_path: Path) -> None:
    clients = {1: stock(1, num_examples=10), 2: stock(2, num_examples=30)}
    found = result_of(iterative(tmp_path / "run", strategy="fedadam", rounds=1, server_lr=0.1), clients)
    start, mean = weights(5), weighted_mean([weights(1), weights(2)], [10.0, 30.0])
    for key in ("0.weight", "4.bias", "1.weight"):
        delta = (mean[key] - start[key]).double()
        # Flower corrects the bias with the exponent round + 1.
        rate = 0.1 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2)
        wanted = start[key] + rate * 0.1 * delta / ((0.01 * delta**2).sqrt() + 0.001)
        torch.testing.assert_close(found[key], wanted.float(), rtol=1e-4, atol=1e-5)
    for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(found[key], mean[key])


def test_rounds_leave_python_s_random_numbers_alone(tmp_path: Path) -> None:
    random.seed(3)
    before = random.getstate()
    result_of(iterative(tmp_path / "run"), three())
    assert random.getstate() == before


def test_observer_is_asked_every_so_many_rounds_and_at_the_end(tmp_path: Path) -> None:
    numbers: list[int] = []
    calls: list[int] = []

    def observer(number: int, module: nn.Module) -> dict[str, float]:
        numbers.append(number)
        return {"accuracy": 1.0}

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        calls.append(number)
        return MetricRecord({"accuracy": 0.5})

    found = iterative(tmp_path / "run", rounds=5, evaluate_every=2, observer=observer)
    result = found.start(FakeGrid(three()), evaluate_fn=evaluate)
    assert numbers == [2, 4, 5]
    assert calls == [0, 2, 4, 5]
    assert sorted(result.evaluate_metrics_serverapp) == calls
    assert ["accuracy" in row for row in rows_of(tmp_path / "run")] == [False, True, False, True, True]


# Flower's abstract steps, for a caller that owns the loop; wrong arguments.


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedyogi"])
def test_own_loop_ends_with_the_bits_of_start(tmp_path: Path, name: str) -> None:
    whole = result_of(iterative(tmp_path / "whole", strategy=name, rounds=2), three(tmp_path / "disk-a"))
    found, grid = iterative(tmp_path / "run", strategy=name, rounds=2), FakeGrid(three(tmp_path / "disk-b"))
    arrays: ArrayRecord | None = ArrayRecord(weights(5))
    for number in (1, 2):
        assert arrays is not None
        messages = found.configure_train(number, arrays, ConfigRecord(), grid)  # type: ignore[arg-type]
        arrays, metrics = found.aggregate_train(number, grid.send_and_receive(messages, timeout=5.0))
        assert metrics is not None
        assert "train-loss" in metrics
    assert arrays is not None
    assert equal(dict(arrays.to_torch_state_dict()), whole)
    found.close()


def test_own_loop_lets_clients_forget_states_that_no_resume_needs(tmp_path: Path) -> None:
    clients, found = three(tmp_path / "disk"), iterative(tmp_path / "run", strategy="scaffold", rounds=9)
    grid, arrays = FakeGrid(clients), ArrayRecord(weights(5))
    for number in range(1, 6):
        messages = found.configure_train(number, arrays, ConfigRecord(), grid)  # type: ignore[arg-type]
        made, _ = found.aggregate_train(number, grid.send_and_receive(messages, timeout=5.0))
        assert made is not None
        arrays = made
    found.close()
    assert sorted(path.stem for path in (tmp_path / "disk").glob("bob-*")) == ["bob-state-4", "bob-state-5"]


def test_own_loop_without_a_quorum_keeps_the_arrays(tmp_path: Path) -> None:
    found, grid = iterative(tmp_path / "run"), FakeGrid({1: failing("no"), 2: trainer("bob", 2)})
    with pytest.raises(OptionError, match=r"replies came before any request: must be configure_train\(\)"):
        found.aggregate_train(1, [])
    messages = found.configure_train(1, ArrayRecord(weights(5)), ConfigRecord(), grid)  # type: ignore[arg-type]
    assert found.aggregate_train(1, grid.send_and_receive(messages, timeout=5.0)) == (None, None)
    found.close()


def test_base_that_wants_more_nodes_than_there_are_loses_the_round_and_does_not_wait(tmp_path: Path) -> None:
    base = Base(FedAvg(min_train_nodes=5, min_available_nodes=5))
    with pytest.raises(QuorumError, match="round 3: 0 usable answers"):
        result_of(iterative(tmp_path / "run", base=base, rounds=9), three())


def test_own_strategies_have_nothing_to_say_without_replies() -> None:
    everyone: dict[str, Any] = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}
    assert FedNova(**everyone).aggregate_train(1, []) == (None, None)
    assert Stc(density=0.1, **everyone).aggregate_train(1, []) == (None, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"min_uploads": 0}, "min_uploads is 0"),
        ({"rounds": 0}, "'iterative.rounds' is 0"),
        ({"fraction": 0.0}, "'iterative.fraction' is 0.0"),
        ({"strategy": "fedsgd"}, "'iterative.strategy' is 'fedsgd': must be one of 'fedavg'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        iterative(tmp_path / "run", **change)


def test_wrong_initial_arrays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="initial_arrays have other names or shapes than model 'model'"):
        iterative(tmp_path / "run").start(FakeGrid({}), ArrayRecord(weights(1, "linear")))


def test_report_before_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no outcome yet"):
        _ = iterative(tmp_path / "run").report


# Clients and their nodes.


def test_a_client_whose_supernode_started_again_counts_once() -> None:
    grid = DeployedGrid({5: stock(1), 6: stock(2)})
    nodes, terms = Nodes(grid, Refusals(None), Traffic()), Terms(1, Limits(5.0), num_classes=10)
    trip = RoundTrip(nodes, run_id="", signatures={"net": SIGNATURES["net"]}, terms=terms)
    nodes.names.pin(5, "alice")
    nodes.names.pin(6, "bob")
    assert (trip.nodes(1, fraction=1.0, seed=0), trip.most) == ([5, 6], 2)

    grid.nodes[9] = stock(2)
    trip.nodes(2, fraction=1.0, seed=0)
    assert trip.most == 3  # perhaps another client
    nodes.names.pin(9, "bob")
    assert trip.most == 2

    grid.nodes[11] = stock(3)
    trip.nodes(3, fraction=1.0, seed=0)
    assert trip.most == 3
    nodes.names.barred.add(11)
    assert trip.most == 2
