"""Trains the clients of a long run one after the other, without Flower, and goes on where it was cut off.

    python tests/bench/clients.py FOLDER --clients 10 "data.name=fashion-mnist client.epochs=300 seed=0"

Each client gets its file ``FOLDER/<client>.safetensors``, with the weights that it has in a run of the same settings.
A run with ``client.checkpoint='FOLDER/{client}.safetensors'`` uploads them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import say

from client_app.node import Asked, Node
from client_app.work import trained_model
from server_app.settings.read import known_options, read_settings
from server_app.settings.text import merge_settings
from strategies.run.files import save_weights


def train_missing(folder: Path, settings: list[str], *, clients: int) -> None:
    """Train the clients that have no file yet, on one thread.

    Args:
        folder: Receives a file per client; made if it is missing.
        settings: Files and key=value pairs, as for ``oneshot run``.
        clients: Number of partitions.
    """
    torch.set_num_threads(1)
    read = read_settings(merge_settings(settings, {o.key: o.kind for o in known_options()}))
    config = read.app
    asks = read.method.asks(read.method_config)  # a method may ask the clients to keep examples from training
    asked = Asked("", 1, config.seed, asks.holdout, asks.holdout_per_class)
    folder.mkdir(parents=True, exist_ok=True)
    for partition_id in range(clients):
        node = Node.of({"partition-id": partition_id, "num-partitions": clients}, config)
        file = folder / f"{node.client}.safetensors"
        if not file.exists():
            trained, state = trained_model(config, node, asked, {})
            save_weights(file, state)
            if trained is not None:
                say(f"{node.client}: {trained.num_examples} examples, accuracy {trained.accuracy:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", help="key=value pairs, as for oneshot run")
    parser.add_argument("--clients", type=int, default=10)
    words = parser.parse_args()
    train_missing(words.folder, [words.settings], clients=words.clients)
