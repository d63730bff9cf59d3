"""Federated learning in rounds, on a grid of Python functions: every strategy, faults, resume, sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from flower_fakes import (
    CLASSES,
    SHAPE,
    SIGNATURES,
    Client,
    DeployedGrid,
    FakeGrid,
    KilledError,
    crashing,
    equal,
    failing,
    in_turn,
    lines_of,
    named,
    net,
    spoilt,
    stock,
    strategy,
    trains_in_rounds,
    weights,
)  # fmt: skip
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn

from strategies import Iterative, IterativeConfig
from strategies.client.corrections import LocalUpdate
from strategies.core.errors import OptionError, QuorumError
from strategies.flower.nodes import Nodes, Refusals
from strategies.flower.rounds.config import TITLES
from strategies.flower.rounds.round_trip import RoundTrip
from strategies.run.traffic import Traffic

State = dict[str, torch.Tensor]
Asked = list[tuple[str, Mapping[str, Any], Mapping[str, State]]]


def trainer(name: str, seed: int, *, examples: int = 10, build: Callable[[], nn.Module] = net, **more: Any) -> Client:
    """A client that trains a few steps by the strategy's rules, on examples of its own."""
    inputs = torch.randn(examples, *SHAPE, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(examples) % CLASSES

    def loss_of(model: nn.Module, update: LocalUpdate) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs), labels) + update.penalty(model)

    return trains_in_rounds(name, build, loss_of, steps=1 + seed % 3, examples=examples, **more)


def three(place: Path | None = None, **more: Any) -> dict[int, Client]:
    names = ((7, "carol", 3), (5, "alice", 1), (6, "bob", 2))
    return {node: trainer(name, seed, place=place, examples=8 + seed, **more) for node, name, seed in names}


def iterative(run_dir: Path, **changes: Any) -> Iterative:
    """A strategy over tiny models; a setting for each argument that it lacks."""
    own_keys = ("min_uploads", "observer", "base", "seed", "classes")
    own = {key: changes.pop(key) for key in own_keys if key in changes}
    config = IterativeConfig(**{"rounds": 3, "stc_density": 0.2, **changes})
    found: Any = strategy(Iterative, run_dir, config=config, **own)
    return found


def result_of(run: Iterative, clients: Mapping[int, Client], **more: Any) -> State:
    return dict(run.start(FakeGrid(clients), ArrayRecord(weights(5)), **more).arrays.to_torch_state_dict())


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return lines_of(run_dir, "metrics")


def refusals_of(run: Path) -> list[tuple[str, str]]:
    return [(row["client"], row["reason"]) for row in lines_of(run, "refusals")]


@pytest.mark.parametrize("name", TITLES)
def test_every_strategy_runs_its_rounds_and_keeps_them(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    scores = iter([30.0, 10.0, 20.0])
    found = iterative(run, strategy=name, observer=lambda number, module: {"accuracy": next(scores)})
    result = found.start(FakeGrid(three(tmp_path / "disk")))
    state = result.arrays.to_torch_state_dict()
    assert {key: value.dtype for key, value in state.items()} == {k: v.dtype for k, v in net().state_dict().items()}
    assert all(bool(value.isfinite().all()) for value in state.values())
    assert equal(dict(found.outcome.state_dict()), dict(state))
    assert (found.outcome.state_dict()["1.running_var"] > 0).all()
    rows = rows_of(run)
    assert [(row["epoch"], row["answers"], row["accuracy"]) for row in rows] == [(1, 3, 30), (2, 3, 10), (3, 3, 20)]
    assert all(row["mib_per_client"] == pytest.approx(row["mib_up"] + row["mib_down"]) for row in rows)
    assert rows[0]["mib_up"] < rows[2]["mib_up"]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert json.loads((run / "run.json").read_text())["config"]["strategy"] == name
    assert not (run / "checkpoint").exists()
    assert (run / "student.safetensors").exists()


def mortal(clients: Mapping[int, Client], server_round: int) -> dict[int, Client]:
    """Clients whose server dies while it waits for the first of them in a round."""

    def wrapped(client: Client) -> Client:
        def answer(message: Message) -> Message | None:
            if message.content["config"].get("server-round") == server_round and message.metadata.dst_node_id == 7:
                raise KilledError
            return client(message)

        return answer

    return {node: wrapped(client) for node, client in clients.items()}


@pytest.mark.parametrize("name", ["fedadam", "scaffold", "stc"])  # memory of the server, of clients, of both
def test_run_that_was_cut_off_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    more = {"strategy": name, "rounds": 3}
    whole = result_of(iterative(tmp_path / "whole", **more), three(tmp_path / "disk-whole"))
    run, disk = tmp_path / "run", tmp_path / "disk"
    with pytest.raises(KilledError):
        result_of(iterative(run, **more), mortal(three(disk), 2))
    # In the round that was cut off, two of three clients have remembered it already.
    asked: Asked = []
    found = iterative(run, **more)
    assert equal(result_of(found, three(disk, asked=asked)), whole)
    assert sorted({said["server-round"] for _, said, _ in asked}) == [2, 3]
    assert found.report.resumed_at == 1
    assert [row["epoch"] for row in rows_of(run)] == [1, 2, 3]


def test_finished_run_is_read_and_no_client_asked(tmp_path: Path) -> None:
    whole = result_of(iterative(tmp_path / "run"), three())
    asked: Asked = []
    assert equal(result_of(iterative(tmp_path / "run"), three(asked=asked)), whole)
    assert asked == []
    with pytest.raises(OptionError, match="rounds is 4, but the run in .* began with 3"):
        result_of(iterative(tmp_path / "run", rounds=4), three())


# Faults.


def test_round_goes_on_with_a_quorum(tmp_path: Path, said: list[str]) -> None:
    clients = {**three(), 8: failing("ValueError: no data"), 9: stock(9, architecture="linear")}
    result_of(iterative(tmp_path / "run"), clients, timeout=5.0)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]
    (first, reason), (second, other) = refusals_of(tmp_path / "run")  # once, not in every round
    assert (first, second, reason) == ("node-8", "node-9", "ValueError: no data")
    assert "do not fit architecture" in other
    assert "refused node-8: ValueError: no data" in said


@cache
def clean(name: str) -> State:
    """Return the model that one round of good answers makes."""
    with TemporaryDirectory() as place:
        run, disk = Path(place) / "run", Path(place) / "disk"
        return result_of(iterative(run, strategy=name, rounds=1), three(disk))


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
        ("fedprox", lambda c: c["metrics"].update({"num-examples": 0}), "num-examples is 0"),
        ("fedavg", lambda c: c["upload"].update({"pretrained": True}), "it trained nothing in this round"),
        ("fedavg", lambda c: c["upload"].update({"client": "alice"}), "two nodes answer under this name"),
    ],
)
def test_spoilt_answer_is_refused_and_the_others_count(
    tmp_path: Path, name: str, spoil: Callable[[RecordDict], None], reason: str
) -> None:
    run = tmp_path / "run"
    # The last node, so that a second answer under a name is this one.
    clients = {**three(tmp_path / "disk"), 9: spoilt(trainer("mallory", 4), spoil)}
    found = result_of(iterative(run, strategy=name, rounds=1), clients)
    ((_, told),) = refusals_of(run)
    assert re.search(reason, told), told
    if name != "scaffold":  # N counts all who are connected
        assert equal(found, clean(name))


def test_client_whose_answer_was_lost_is_asked_again_in_its_round(tmp_path: Path) -> None:
    clients = three()
    clients[7] = in_turn(crashing, clients[7])
    result = iterative(tmp_path / "run").start(DeployedGrid(clients), ArrayRecord(weights(5)), timeout=60.0)
    assert [row["answers"] for row in rows_of(tmp_path / "run")] == [3, 3, 3]
    assert not (tmp_path / "run" / "refusals.jsonl").exists()
    assert equal(dict(result.arrays.to_torch_state_dict()), result_of(iterative(tmp_path / "clean"), three()))


# Who is asked, and with what.


def participants(run: Path, fraction: float, nodes: Iterable[int], **more: Any) -> list[list[str]]:
    asked: Asked = []
    clients = {node: trainer(f"c{node % 7}", node, asked=asked) for node in nodes}
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


@pytest.mark.parametrize("values", ["ternary", "float16"])
def test_stc_sends_the_update_alone_to_clients_of_the_round_before(tmp_path: Path, values: str) -> None:
    asked: Asked = []
    clients = three(tmp_path / "disk", asked=asked)
    late = FakeGrid({**clients, 9: trainer("dave", 1, place=tmp_path / "disk", asked=asked)}, joins={9: 22})
    iterative(tmp_path / "run", strategy="stc", stc_values=values, rounds=3).start(late)
    found = {(name, said["server-round"]): sorted(sent) for name, said, sent in asked}
    assert found["alice", 1] == ["arrays"]
    assert found["alice", 2] == found["alice", 3] == ["arrays", "ternary"]
    joined = min(number for name, number in found if name == "dave")
    assert joined > 1
    assert found["dave", joined] == ["arrays"]
    # A client's own sum of updates is the server's model: it could not have answered otherwise.
    assert rows_of(tmp_path / "run")[-1]["answers"] == 4


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
    assert equal(dict(arrays.to_torch_state_dict()), whole)
    found.close()


# Clients and their nodes.


def test_a_client_whose_supernode_started_again_counts_once() -> None:
    grid = DeployedGrid({5: stock(1), 6: stock(2)})
    nodes, signatures = Nodes(grid, Refusals(None), Traffic()), {"net": SIGNATURES["net"]}
    trip = RoundTrip(nodes, run_id="", signatures=signatures, quorum=1, timeout=5.0, num_classes=10)
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


def test_run_whose_clients_answer_no_more_ends_and_can_be_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(QuorumError, match="round 3: 0 usable answers, needs 2, for the 3rd time .* can be resumed"):
        result_of(iterative(run, rounds=5), {1: failing("gone"), 2: failing("gone")})
    result_of(iterative(run, rounds=5), three())
    assert [row["answers"] for row in rows_of(run)] == [0, 0, 3, 3, 3]


def test_a_client_with_other_classes_is_refused_before_it_trains(tmp_path: Path) -> None:
    names, work = [f"class {number}" for number in range(CLASSES)], list[str]()
    clients = {1: named("a", 1, classes=names, work=work), 2: named("b", 2, work=work)}
    clients[3] = named("c", 3, classes=names[::-1], work=work)
    result_of(iterative(tmp_path / "run", rounds=1, min_uploads=2, classes=names), clients)
    assert sorted(work) == ["a", "b"]
    ((_, reason),) = refusals_of(tmp_path / "run")
    assert f"class 0 is '{names[-1]}' here and 'class 0' there, the same names in another order" in reason
