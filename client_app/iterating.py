"""A client's part of one round of many: train the server's model further, by the rules of its strategy.

A round is short and requested once, so its trained model is not kept. Only the strategy's state is stored between
rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from client_app.attacking import check_rounds, poison
from client_app.keeping import Trained
from client_app.node import Node, TrainRequest, refuse
from client_app.training.local import Training, hits, minimise
from client_app.training.losses import loss_of
from client_app.training.widened import widen
from client_app.work import State, load_examples
from fl_app.config import AppConfig
from fl_app.models import build
from strategies.client.corrections import LocalUpdate
from strategies.client.round_state import RoundState
from strategies.core import refusals
from strategies.core.clients import read_float
from strategies.core.facts import UploadFacts
from strategies.core.processor import flush_subnormals
from strategies.core.seeds import derive_seed, initial_torch


@flush_subnormals()
def local_round(
    config: AppConfig, node: Node, request: TrainRequest, said: Mapping[str, Any], sent: Mapping[str, State]
) -> tuple[Trained, dict[str, State], dict[str, float]]:
    """Return a client's answer: the facts of its training, array records by name, and metrics.

    Raises:
        OneShotError: The data set or architecture is missing, or the server's weights do not fit this client.
    """
    if node.checkpoint:
        raise refusals.bad_setting(
            "client.checkpoint", repr(node.checkpoint[:200]), "'', because rounds train the model"
        )
    check_rounds(config.attack, node.client)
    refuse(config.privacy, "training in rounds")
    node.policy.check_private(0.0)
    own, client = load_examples(config, node, request), config.client
    split, factor = own.split, read_float(said, "lr-factor", 1.0)
    client = replace(client, lr=client.lr * factor, final_lr=client.final_lr * factor)
    with initial_torch(request.seed, node.architecture):
        model = build(node.architecture, num_classes=split.num_classes, input_shape=split.input_shape)
    memory = RoundState.of(node.state_dir, request.run_id, node.client)
    momentum = client.momentum if client.optimizer == "sgd" else 0.0
    update = LocalUpdate(model, said, sent, momentum=momentum, memory=memory, label_counts=own.label_counts)
    kind, classes = client.augmentation, split.num_classes
    data = poison(split.take(own.train), config.attack, client=node.client, num_classes=classes, seed=request.seed)
    criterion, kind = loss_of(client, data.labels), split.augmentation if kind == "data-set" else kind
    forward = widen(model)

    def objective(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = forward(inputs)
        return criterion(logits, labels) + update.penalty(model, logits, labels), hits(logits, labels)

    seed = derive_seed(request.seed, "client", node.client, request.server_round)
    with counted_steps(model, update.step):
        last = minimise(model, Training(data, client, split.normalization, kind, seed), objective)
    size, counts = len(own.train), own.label_counts
    facts = UploadFacts(node.client, node.architecture, size, counts, agreement=split.agreement)
    trained = Trained(facts, last.loss, last.accuracy)
    return trained, *update.finish(model)


@contextmanager
def counted_steps(model: nn.Module, step: Callable[..., None]) -> Iterator[None]:
    """Call ``step(lr, at_rest=)`` for every optimiser step on a model's parameters.

    At rest the optimiser has no state before the step, as where ``client.momentum-epochs`` has cleared it.
    """
    parameters = {id(parameter) for parameter in model.parameters()}

    def count(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
        for group in optimizer.param_groups[:1]:
            if id(group["params"][0]) in parameters:
                step(float(group["lr"]), at_rest=not optimizer.state)

    handle = register_optimizer_step_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()
