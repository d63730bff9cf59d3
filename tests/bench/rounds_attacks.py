"""What one client of five can do in one round of each strategy: ``python tests/bench/rounds_attacks.py``.

Five clients of the client app on digits, in this process. In round 3 of 6 the first multiplies its change by 10,000, by
-1 or by -10,000, SCAFFOLD's control variate alike; FedNova's attacker also divides its travel. The table has the
accuracy after the last round. ``RATIOS=1`` prints the largest honest change in medians of its round instead, for the
bound of :mod:`strategies.core.bounds`.
Fewer: ``ROUNDS_STRATEGIES=fedavg,scaffold ROUNDS_SEEDS=0 ROUNDS_SETTINGS="data.alpha=0.05"``.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.supercore.task_identity import TaskIdentity
from measure import row, say

from client_app.app import introduce, upload
from server_app.settings.build import build_job, build_strategy, held_out
from server_app.settings.read import default_settings, known_options, read_settings
from server_app.settings.text import merge_settings
from strategies.core import bounds
from strategies.core.errors import OneShotError
from strategies.core.options import Scalar
from strategies.rounds.config import TITLES

CLIENTS, STRUCK = 5, 3
ATTACKS = {"none": 1.0, "x 1e4": 1e4, "x -1": -1.0, "x -1e4": -1e4}
WIDTHS = (18, *(10 for _ in ATTACKS))


class LocalGrid:
    """Flower's grid over the client app's functions in this process.

    Args:
        settings: The run's, which every client gets.
        factor: What the first client's change in round 3 is multiplied by.
    """

    pull_interval = 0.001

    def __init__(self, settings: Mapping[str, Scalar], factor: float) -> None:
        self._settings, self._factor, self._asked = dict(settings), factor, 0
        self._answers: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the nodes, 1 to 5."""
        return list(range(1, CLIENTS + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let every client answer at once."""
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answers."""
        return [self._answers.pop(key) for key in list(message_ids) if key in self._answers]

    def _push(self, message: Message) -> str:
        self._asked += 1
        key, node = f"message-{self._asked}", message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = key
        place = {"partition-id": node - 1, "num-partitions": CLIENTS}
        context = Context(1, node, place, RecordDict(), self._settings)
        work = introduce if message.metadata.message_type == MessageType.QUERY else upload
        reply = work(message, context)
        said = message.content.config_records["config"]
        if node == 1 and said.get("server-round") == STRUCK and self._factor != 1.0:
            strike(message.content, reply.content, self._factor)
        self._answers[key] = reply
        return key


def strike(sent: RecordDict, answer: RecordDict, factor: float) -> None:
    """Multiply a client's change of the model, and of its control variate, in place."""
    if "ternary" in answer:
        code = dict(answer["ternary"].items())  # type: ignore[union-attr]
        code["magnitude"] = type(code["magnitude"])(code["magnitude"].numpy() * np.float32(factor))
        answer["ternary"] = ArrayRecord(code)
        return
    start = sent.array_records["arrays"].to_torch_state_dict()
    end = answer.array_records["arrays"].to_torch_state_dict()
    moved = {name: value + factor * (end[name] - value) for name, value in start.items() if value.is_floating_point()}
    answer["arrays"] = ArrayRecord({**end, **moved})
    if "control" in answer:
        control = answer.array_records["control"].to_torch_state_dict()
        answer["control"] = ArrayRecord({name: factor * value for name, value in control.items()})
    metrics = next(iter(answer.metric_records.values()))
    if "travel" in metrics and abs(factor) > 1:
        metrics["travel"] = float(metrics["travel"]) / abs(factor)  # type: ignore[arg-type]


def final(name: str, seed: int, factor: float) -> float:
    """Return the accuracy in % after the last round; NaN for a run that ended with an error."""
    own: dict[str, Scalar] = {
        "method": "iterative", "iterative.strategy": name, "seed": seed, "iterative.rounds": 6, "data.name": "digits",
        "data.alpha": 0.1, "client.epochs": 3, "client.share-label-counts": True, "threads": 1, "device": "cpu",
    }  # fmt: skip
    kinds = {option.key: option.kind for option in known_options()}
    given = merge_settings([os.environ.get("ROUNDS_SETTINGS", "")], kinds)
    with tempfile.TemporaryDirectory() as place:
        here: dict[str, Scalar] = {"run-dir": f"{place}/run", "client.state-dir": f"{place}/state"}
        flat = {**default_settings(), **own, **given, **here}
        settings = read_settings(flat)
        images, split = held_out(settings)
        strategy = build_strategy(settings, build_job(settings, split, images))
        try:
            strategy.start(LocalGrid(flat, factor), timeout=600.0)  # type: ignore[arg-type]
        except OneShotError as error:
            say(f"  {name}: {error}")
            return float("nan")
        last = [line for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines() if line][-1]
        return float(json.loads(last)["accuracy"])


def largest_ratio(name: str, seed: int) -> float:
    """Return the largest change of an honest client in medians of its round."""
    seen: list[float] = [0.0]
    known = bounds.bounded

    def heard(*given: Any) -> Any:
        found, ratios = known(*given)
        seen.extend(ratios)
        return found, ratios

    bounds.bounded = heard
    try:
        final(name, seed, 1.0)
    finally:
        bounds.bounded = known
    return max(seen)


def main() -> None:
    """Print a row for each strategy."""
    FLOWER_LOGGER.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for key in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, key, 1)
    names = os.environ.get("ROUNDS_STRATEGIES", ",".join(TITLES)).split(",")
    seeds = [int(seed) for seed in os.environ.get("ROUNDS_SEEDS", "0,1").split(",")]
    if "RATIOS" in os.environ:
        for name in names:
            row([name, f"{max(largest_ratio(name, seed) for seed in seeds):.2f}"], (18, 10))
        return
    row(["strategy", *ATTACKS], WIDTHS)
    for name in names:
        found = [" ".join(f"{final(name, seed, factor):.1f}" for seed in seeds) for factor in ATTACKS.values()]
        row([name, *found], WIDTHS)


if __name__ == "__main__":
    main()
