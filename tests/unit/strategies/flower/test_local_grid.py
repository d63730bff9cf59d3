"""A Flower project in this process: what its clients see of each other and of the server, and what a run leaves."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_fakes import CLASSES, SHAPE, net, records, strategy, weights
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from strategies import FedENS, simulate
from strategies.client import evaluation
from strategies.client.evaluation import OwnExamples
from strategies.core.errors import ComputeError, OptionError
from strategies.flower.nodes import SETTLE_S
from strategies.scores.exchange import Evaluation

Client = Callable[[Message, Context], Message]


def run(
    client: Client,
    server: Callable[[Grid, Context], Any],
    *,
    clients: int = 2,
    app: ClientApp | None = None,
    **config: Any,
) -> None:
    """Run a server's function over clients that answer training and queries alike."""
    client_app, server_app = app or ClientApp(), ServerApp()
    client_app.train()(client)
    client_app.query()(client)
    server_app.main()(server)
    simulate(server_app, client_app, clients=clients, run_config=config)


def ask(grid: Grid, content: RecordDict | None = None) -> list[Message]:
    """Ask all nodes the same."""
    content = RecordDict() if content is None else content
    return list(grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()]))


def test_clients_get_copies_and_keep_a_state_of_their_own_unless_they_fail() -> None:
    kept: list[RecordDict] = []

    def client(message: Message, context: Context) -> Message:
        count = int(context.state.config_records.get("count", ConfigRecord({"n": 0}))["n"]) + 1  # type: ignore[arg-type]
        context.state["count"] = ConfigRecord({"n": count})
        message.content["config"]["n"] = 7  # type: ignore[index]
        context.run_config["lr"] = 3.0
        if count == 2 and context.node_config["partition-id"] == 1:
            raise ValueError("no\nsecond answer")
        found = RecordDict({"facts": ConfigRecord({"count": count, "part": context.node_config["partition-id"]})})
        kept.append(found)
        return Message(found, reply_to=message)

    def server(grid: Grid, context: Context) -> None:
        assert context.run_config == {"lr": 0.1}
        content = RecordDict({"arrays": ArrayRecord([np.ones(1)]), "config": ConfigRecord({"n": 1})})
        first = ask(grid, content)
        assert content["config"]["n"] == 1  # type: ignore[index]
        kept[0]["facts"]["count"] = 99  # type: ignore[index]
        assert [dict(answer.content["facts"]) for answer in first] == [{"count": 1, "part": 0}, {"count": 1, "part": 1}]  # type: ignore[call-overload]
        assert [answer.metadata.src_node_id for answer in first] == list(grid.get_node_ids())

        well, failed = ask(grid, content)
        assert well.content["facts"]["count"] == 2  # type: ignore[index]
        assert (failed.error.code, failed.error.reason) == (
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "ValueError: no second answer",
        )  # fmt: skip
        assert failed.metadata.reply_to_message_id
        _, again = ask(grid, content)
        assert again.has_error()  # its state is that before the failure: this is its second answer
        assert context.run_config == {"lr": 0.1}
        assert list(grid.push_messages([Message(content, 10**6, "train")])) == []

    run(client, server, lr=0.1)


def test_a_client_sees_torch_as_a_process_of_its_own_and_the_server_finds_it_as_it_was() -> None:
    tiny = torch.full((8,), 1.0e-39)
    seen = []

    def client(message: Message, _: Context) -> Message:
        seen.append((torch.get_num_threads(), torch.is_grad_enabled(), bool((tiny * 0.5).any())))
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        return Message(RecordDict(), reply_to=message)

    def server(grid: Grid, _: Context) -> None:
        with torch.no_grad():
            torch.set_num_threads(2)
            ask(grid)
            assert torch.get_num_threads() == 2
            assert not torch.is_grad_enabled()
            assert bool((tiny * 0.5).any())

    try:
        run(client, server)
    finally:
        torch.set_num_threads(1)
    assert seen == [(1, True, True)] * 2


def silent(message: Message, _: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def test_simulation_runs_in_a_second_thread_and_under_asyncio_one_at_a_time_and_leaves_the_process_alone() -> None:
    found: list[int] = []

    def server(grid: Grid, context: Context) -> None:
        found.append(len(ask(grid)))
        found.append(context.run_id)
        with pytest.raises(ComputeError, match="another simulation runs in this process"):
            run(silent, server)

    def state() -> list[object]:
        seeds = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[union-attr]
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        identity = TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id
        return [*seeds, Path.cwd(), list(sys.path), dict(os.environ), signals, identity, threading.active_count()]

    before = state()
    thread = threading.Thread(target=run, args=(silent, server))
    thread.start()
    thread.join()

    async def notebook() -> None:
        run(silent, server)

    asyncio.run(notebook())
    with pytest.raises(ZeroDivisionError):
        run(silent, lambda *_: 1 // 0)
    assert found[::2] == [2, 2]
    assert found[1] != found[3]  # what clients keep under a run's id is not found by the next
    assert state() == before


def trained(message: Message, context: Context) -> Message:
    return Message(records(weights(int(context.node_config["partition-id"]))), reply_to=message)  # type: ignore[arg-type]


def test_clients_of_another_project_score_an_ensemble_and_their_own_models_by_one_line(tmp_path: Path) -> None:
    app, found, kept = ClientApp(), list[Evaluation](), list[torch.nn.Module]()

    def place_of(context: Context) -> int:
        return int(context.node_config["partition-id"])

    def examples(context: Context) -> OwnExamples:
        if place_of(context) == 2:
            raise ZeroDivisionError("no examples")
        draw = torch.Generator().manual_seed(place_of(context))
        return OwnExamples(torch.randn(30, *SHAPE, generator=draw), torch.arange(30) % CLASSES, CLASSES)

    def own(context: Context) -> torch.nn.Module:
        model = net()
        model.load_state_dict(weights(place_of(context)))
        return model

    evaluation.serve(
        app, model=net, examples=examples, own=own, client=lambda context: f"node-{context.node_id}",
        state_dir=str(tmp_path / "state"),
    )  # fmt: skip

    def server(grid: Grid, _: Context) -> None:
        ours = strategy(FedENS, tmp_path / "run")
        ours.start(grid)
        kept.append(ours.outcome)
        found.append(ours.score_on_clients(grid, timeout=60))

    run(trained, server, app=app, clients=3)
    [scored], [ensemble] = found, kept
    [(node, reason)] = scored.refused.items()
    assert node.startswith("node-")
    assert "no examples" in reason
    assert len(scored.clients) == 2
    for client in scored.clients:
        assert client.sums.keys() == {"own", "fedavg", "result"}
    contexts = [Context(0, 0, {"partition-id": place}, RecordDict(), {}) for place in range(2)]
    right = [int((ensemble(examples(one).inputs).argmax(1) == examples(one).labels).sum()) for one in contexts]
    pooled = scored.pooled("result")
    assert pooled is not None
    assert (pooled.examples, pooled.correct) == (60, sum(right))


def test_flower_s_own_strategy_and_one_of_ours_run_over_it_and_wait_for_nobody(tmp_path: Path) -> None:
    arrays = ArrayRecord(net().state_dict())

    def server(grid: Grid, _: Context) -> None:
        result = FedAvg(fraction_evaluate=0.0, weighted_by_key="num-examples").start(grid, arrays, num_rounds=1)
        mean = {key: (weights(0)[key] + value) / 2 for key, value in weights(1).items()}
        for key, value in result.arrays.to_torch_state_dict().items():
            assert torch.allclose(value.double(), mean[key].double()), key
        began = time.monotonic()
        strategy(FedENS, tmp_path / "run").start(grid, arrays)
        assert time.monotonic() - began < SETTLE_S  # all nodes are known at once

    run(trained, server)
    assert len((tmp_path / "run" / "uploads.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_ends_the_run_and_a_client_that_exits_costs_its_answer_alone(interruption: type[BaseException]) -> None:
    answers: list[Message] = []

    def client(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0:
            raise interruption
        return Message(RecordDict(), reply_to=message)

    def server(grid: Grid, _: Context) -> None:
        answers.extend(ask(grid))

    if interruption is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            run(client, server)
    else:
        run(client, server)
        assert [answer.has_error() for answer in answers] == [True, False]
    run(silent, server)  # the process is free again
    assert not answers[-1].has_error()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"clients": "2"}, "clients is '2': must be a whole number, at least 1"),
        ({"clients": 0}, "clients is 0: must be a whole number"),
        ({"server_app": ClientApp()}, "server_app is ClientApp: must be a ServerApp"),
        ({"client_app": ServerApp()}, "client_app is ServerApp: must be a ClientApp"),
        ({"server_app": ServerApp()}, "server_app has no main function"),
    ],
)
def test_apps_that_cannot_run_are_refused(changed: dict[str, Any], line: str) -> None:
    server = ServerApp()
    server.main()(lambda _, __: None)
    with pytest.raises(OptionError, match=line):
        simulate(**{"server_app": server, "client_app": ClientApp(), "clients": 1, **changed})


def test_a_clientapp_that_returns_no_message_is_told_so() -> None:
    answers: list[Message] = []
    run(lambda message, _: None, lambda grid, _: answers.extend(ask(grid)))  # type: ignore[arg-type, return-value]
    assert {answer.error.reason for answer in answers} == {
        "TypeError: the ClientApp returned NoneType: must be a Message"
    }
