"""Trains the clients of a long run one after the other, without Flower, and goes on where it was cut off.

    python tests/bench/clients.py FOLDER --clients 10 "data.name=fashion-mnist client.epochs=300 seed=0"

Each client gets its file ``FOLDER/<client>.safetensors``, with the weights that it has in a run of the same settings.
A run with ``client.checkpoint='FOLDER/{client}.safetensors'`` uploads them. Several commands share a GPU: each with
``--only`` and numbers of clients.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from measure import say

from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from fl_app.config import AppConfig
from server_app.settings.catalogue import merge_settings
from server_app.settings.read import Settings, known_options, read_settings
from strategies.run.files import save_weights

SUFFIX = ".safetensors"


def train_missing(folder: Path, settings: Sequence[str], *, clients: int, only: Collection[int] = ()) -> None:
    """Train the clients that have no file yet, on one thread."""
    torch.set_num_threads(1)
    read = _read(settings)
    folder.mkdir(parents=True, exist_ok=True)
    for number, node in enumerate(_nodes(read.app, clients)):
        file = folder / f"{node.client}{SUFFIX}"
        if (not only or number in only) and not file.exists():
            trained, state = prepare_upload(read.app, node, _asked(read), {})
            save_weights(file, state)
            if trained.facts.num_examples is not None:
                say(f"{node.client}: {trained.facts.num_examples} examples, accuracy {trained.accuracy:.4f}")


def missing(folder: Path, settings: Sequence[str], *, clients: int) -> list[int]:
    """Return the numbers of the clients that have no file yet."""
    nodes = enumerate(_nodes(_read(settings).app, clients))
    return [number for number, node in nodes if not (folder / f"{node.client}{SUFFIX}").exists()]


def write_map(folder: Path, settings: Sequence[str], *, clients: int) -> tuple[str, Path]:
    """Write what ``oneshot import`` cannot know of trained clients, their label counts; return their architecture."""
    read, file = _read([*settings, f"client.checkpoint='{folder}/{{client}}{SUFFIX}'"]), folder / "map.toml"
    told = []
    for node in _nodes(read.app, clients):
        trained, _ = prepare_upload(read.app, node, _asked(read), {})
        assert trained.facts.label_counts is not None, node.client
        told.append(f'["{node.client}{SUFFIX}"]\nlabel-counts = {list(trained.facts.label_counts)}\n')
    file.write_text("\n".join(told))
    return read.app.model.name, file


def _read(settings: Sequence[str]) -> Settings:
    return read_settings(merge_settings(settings, {option.key: option.kind for option in known_options()}))


def _nodes(config: AppConfig, clients: int) -> Iterator[Node]:
    for number in range(clients):
        yield Node.of({"partition-id": number, "num-partitions": clients}, config)


def _asked(read: Settings) -> TrainRequest:
    """Return the server's request; a method may ask the clients to keep examples from training."""
    asks = read.plan.asks
    return TrainRequest("", 1, read.app.seed, asks.holdout, asks.holdout_per_class)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="+", help="files and key=value pairs, as for oneshot run")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--only", type=int, nargs="+", default=[], help="numbers of those to train; default: all")
    words = parser.parse_args()
    train_missing(words.folder, words.settings, clients=words.clients, only=words.only)
