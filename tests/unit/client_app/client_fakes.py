"""The app's client asked by itself, its nodes in a grid without time, and the strategies that ask them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flower_fakes import FakeGrid
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from PIL import Image

from client_app import app as client_app
from client_app.keeping import Trained
from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.config import AppConfig
from fl_app.data import normalize, open_split
from server_app.settings.build import build_job, build_strategy
from server_app.settings.read import Settings, read_settings
from strategies.core.options import flatten

SIDE = 16
RUN = "0123456789abcdef" * 2
State = Mapping[str, torch.Tensor]
Ask = Callable[..., Message]


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under their names; ``client__batch_size`` stands for ``client.batch-size``."""
    return {key.replace("__", ".").replace("_", "-"): value for key, value in settings.items()}


def reply_of(
    content: RecordDict, kind: str = MessageType.TRAIN, *, node: Mapping[str, Any] | None = None, **settings: Any
) -> Message:
    """Return the reply of the app's client to a message of any content under any settings; by default, of 1 of 4."""
    facts = {"partition-id": 1, "num-partitions": 4} if node is None else dict(node)
    config = {**flatten(AppConfig()), **dotted(settings)}
    context = Context(run_id=1, node_id=9, node_config=facts, state=RecordDict(), run_config=config)
    return client_app.app(Message(content, dst_node_id=9, message_type=kind), context)


def sent_by(partition_id: int, config: AppConfig, **asked: Any) -> tuple[Trained, State]:
    """Return what one of three simulated clients sends; without a run, nothing is kept."""
    node = Node.of({"partition-id": partition_id, "num-partitions": 3}, config)
    request = TrainRequest(**{"run_id": "", "server_round": 1, "seed": 0, **asked})
    trained, state = prepare_upload(config, node, request, {})
    return trained, {key: value.clone() for key, value in state.items()}


def image_folder(
    root: Path, classes: tuple[str, ...], *, images: int = 3, halves: tuple[str, ...] = ("train", "test")
) -> Path:
    """Write images in a folder per class."""
    for half in halves:
        for number, name in enumerate(classes):
            (root / half / name).mkdir(parents=True)
            for image in range(images):
                Image.new("RGB", (8, 8), (40 * number, 9 * image, 0)).save(root / half / name / f"{image}.png")
    return root


def accuracy(model: Any, count: int) -> float:
    """Return the accuracy of a model on so many held-out digits."""
    split = open_split("digits", "test", image_size=SIDE)
    data = split.take(torch.arange(count))
    with torch.no_grad():
        return float((model(normalize(data.images, *split.normalization)).argmax(1) == data.labels).float().mean())


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
