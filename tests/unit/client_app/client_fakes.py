"""The app's clients as nodes of a grid without time, and the strategies that ask them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flower_fakes import FakeGrid
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from client_app import app as client_app
from fl_app.data import open_split
from server_app.settings.build import build_job, build_strategy
from server_app.settings.read import Settings, read_settings

SIDE = 16


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under their names; ``client__batch_size`` stands for ``client.batch-size``."""
    return {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}


def app_settings(**given: Any) -> Settings:
    """Read settings of runs of LeNet-5 in this process."""
    usual = {"compute": "in-process", "device": "cpu", "threads": 1, "model__name": "lenet5", "deadline_s": 5.0}
    return read_settings(dotted({**usual, **given}))


def app_clients(
    settings: Settings,
    count: int,
    wrong: Callable[[Message], Message | None] | None = None,
    *,
    kind: str = "",
    phase: int = 0,
) -> FakeGrid:
    """Return the app's clients; ``wrong`` answers messages of a kind for client 1, after so many of its uploads."""

    def node(number: int) -> Callable[[Message], Message | None]:
        seen = list[str]()

        def answer(message: Message) -> Message | None:
            seen.append(message.metadata.message_type)
            if wrong and number == 1 and seen[-1] == kind and seen.count("train") >= phase:
                return wrong(message)
            facts = {"partition-id": number, "num-partitions": count}
            return client_app.app(message, Context(1, number, facts, RecordDict(), dict(settings.flat)))

        return answer

    return FakeGrid({number + 1: node(number) for number in range(count)})


def app_strategy(settings: Settings, folder: Path) -> Any:
    """Return the strategy of a run in a folder."""
    settings = replace(settings, app=replace(settings.app, run_dir=str(folder)))
    return build_strategy(settings, build_job(settings, open_split("digits", "test", image_size=SIDE), None))


def failing(message: Message) -> Message:
    """Answer as a client whose work failed."""
    record = ConfigRecord({"client": "client-001", "stage": 0, "error": "its disk is full"})
    return Message(RecordDict({"answer": record, "arrays": ArrayRecord()}), reply_to=message)
