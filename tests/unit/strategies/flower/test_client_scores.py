"""The clients' scores of a model: what each answer must hold, and that no answer costs more than the scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flower_fakes import FakeGrid, answering, silent, strategy, weights
from flwr.app import ArrayRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from strategies import FLBoost
from strategies.flower.evaluation import ClientEvaluation
from strategies.flower.rounds.refinement import Refiner

HUGE = 10**400  # a whole number beyond every float


def scores(**metrics: Any) -> RecordDict:
    return RecordDict({"metrics": MetricRecord(metrics)})


def reply(node: int, content: RecordDict) -> Message:
    return Message(content, reply_to=Message(RecordDict(), dst_node_id=node, message_type=MessageType.EVALUATE))


def told(node: int, examples: Any, acc: Any) -> Message:
    return reply(node, scores(**{"num-examples": examples, "acc": acc}))


@pytest.mark.parametrize(
    ("answers", "wanted", "line"),
    [
        ([(1, 0, 0.0), (2, 0, 0.0)], None, "refused node-2: scores: metrics['num-examples'] is 0"),
        ([(1, 5, 0.5), (2, 0, 0.0)], 0.5, "refused node-2: scores: metrics['num-examples'] is 0"),
        ([(1, 5, 0.5), (2, -5, 0.5)], 0.5, "refused node-2: scores: metrics['num-examples'] is -5"),
        ([(1, 5, 0.5), (2, float("nan"), 0.5)], 0.5, "refused node-2: scores: metrics['num-examples'] is nan"),
        ([(1, 5, 0.5), (2, 5, float("nan"))], 0.5, "refused node-2: scores: metrics['acc'] is nan"),
        ([(1, 5, 0.5), (2, 5, [0.5])], 0.5, "refused node-2: scores: they are not those of the others"),
        ([(1, 5, [0.5]), (2, 5, 0.5), (4, 5, 0.5)], 0.5, "refused node-1: scores: they are not those of the others"),
        ([(1, 5, HUGE), (2, 5, HUGE)], None, "round 1: the clients' scores cannot be averaged: OverflowError: "),
    ],
)
def test_average_is_that_of_the_usable_scores_and_never_an_error(
    answers: list[tuple[Any, ...]], wanted: float | None, line: str, said: list[str]
) -> None:
    lost = Message(Error(code=2, reason="no"), reply_to=told(3, 5, 0.5))
    found = ClientEvaluation(1.0).aggregate(1, [*(told(*answer) for answer in answers), lost])
    assert found == (None if wanted is None else {"acc": wanted})
    assert any(each.startswith(line) for each in said)


def test_scores_of_an_honest_round_are_flower_s_own_to_the_bit() -> None:
    replies = [told(1, 7, 0.1), told(2, 11, 0.7), told(3, 13, 0.3)]
    assert ClientEvaluation(1.0).aggregate(1, replies) == FedAvg().aggregate_evaluate(1, replies)


# In a run.


def test_no_name_of_a_client_s_number_steers_a_terminal(tmp_path: Path, said: list[str]) -> None:
    steering = "\x1b[2Jdone"

    hostile = answering(RecordDict({**scores(**{"num-examples": 5, steering: 1.0}), "arrays": ArrayRecord(weights(1))}))
    base = FedAvg(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
    refiner = Refiner.of("flboost", iterations=1, batch_size=6, latent=5)
    run: Any = strategy(FLBoost, tmp_path / "run", base=base, refiner=refiner)
    run.start(FakeGrid({1: hostile, 2: silent}), ArrayRecord(weights(5)), num_rounds=2)
    assert sum(r"clients_\x1b[2Jdone 1" in line and line.startswith("round") for line in said) == 2
    assert sum(r"answers 1, \x1b[2Jdone 1" in line for line in said) == 2
    assert all(map(str.isprintable, said))
