"""Uploads that clients train in this process, and their run folders; sums of a tiny backbone's features unless told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from client_app.node import Node, TrainRequest
from client_app.work import prepare_upload
from server_app.settings.build import build_job
from server_app.settings.read import default_settings, read_settings
from server_app.settings.server_data import open_half
from strategies.core.facts import UploadFacts
from strategies.run.run_folder import RunFolder
from strategies.uploads.checks import Signatures, check_outputs

CLIENTS = 4
SETTINGS: dict[str, Any] = {
    "compute": "in-process", "device": "cpu", "threads": 1, "method": "ridge", "data.limit": 600,
    "features.backbone": "tiny_backbone:make",
}  # fmt: skip
Sent = dict[str, dict[str, torch.Tensor]]
Uploads = tuple[Sent, dict[str, UploadFacts]]


def sent_by_clients(given: dict[str, Any], run: str = "", task: str = "statistics", clients: int = CLIENTS) -> Uploads:
    settings, states, facts = read_settings(given), {}, {}
    for partition_id in range(clients):
        node = Node.of({"partition-id": partition_id, "num-partitions": clients}, settings.app)
        trained, states[node.client] = prepare_upload(settings.app, node, TrainRequest(run, 1, 0, task=task), {})
        facts[node.client] = replace(trained.facts, label_counts=None) if settings.app.privacy.on else trained.facts
    return states, facts


def stored(path: Path, given: dict[str, Any], states: Sent, facts: dict[str, UploadFacts]) -> Path:
    settings = read_settings(given)
    split = open_half(settings, "test")
    job = build_job(settings, split, None)
    signatures = Signatures(job.builders)
    about = {
        "method": given["method"], "seed": 0, "student": job.student, "num-classes": split.num_classes,
        "input-shape": list(job.input_shape),
        "normalization": [job.normalization.mean, job.normalization.std], "settings": {**default_settings(), **given},
        "num-supernodes": len(states),
    }  # fmt: skip
    with RunFolder.create(path, about) as folder:
        for name, state in states.items():
            architecture = facts[name].architecture
            wanted = signatures[architecture]
            assert {key: (tuple(v.shape), str(v.dtype)[6:]) for key, v in state.items()} == dict(wanted)
            build, size = job.builders[architecture], facts[name].num_examples
            check_outputs(architecture, state, build, job.input_shape, num_examples=size)
            folder.round(1).accept(facts[name], state)
    return path
