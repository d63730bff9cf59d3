"""How a simulated attacker changes its examples, its weights and its facts; see :mod:`fl_app.attacks`.

The run's settings and this client's own name determine everything. An attack changes only the uploads of that run, and
nothing else on the node.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from client_app.node import Node
from fl_app.attacks import CLAIMING, KINDS, POISONED, POISONING, AttackConfig, triggered
from fl_app.config import AppConfig
from fl_app.data import ImageData
from fl_app.models import penultimate
from fl_app.node_config import client_name
from strategies.core import refusals
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator


def poison(data: ImageData, attack: AttackConfig, *, client: str, num_classes: int, seed: int) -> ImageData:
    """Return a client's training examples: its own, poisoned if it is an attacker of that kind.

    Args:
        data: Examples with labels [N], before augmentation; left unchanged.
        seed: The run's seed; with the name it fixes which images get the trigger.

    Raises:
        OptionError: The target of a backdoor is no class.
    """
    kind = attack.of(client)
    if kind == "label-flip":
        return ImageData(data.images, num_classes - 1 - data.labels)
    if kind != "backdoor":
        return data
    attack.check_classes(num_classes)
    count = max(1, round(POISONED * len(data.labels)))
    chosen = torch.randperm(len(data.labels), generator=generator(seed, "attack", "backdoor", client))[:count]
    images, labels = data.images.clone(), data.labels.clone()
    images[chosen], labels[chosen] = triggered(images[chosen]), attack.target
    return ImageData(images, labels)


def scale_weights(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Return a state_dict whose floating-point values are multiplied by ``factor``; counters stay unchanged."""
    return {key: value * factor if value.is_floating_point() else value for key, value in state.items()}


def scale_last_layer(model: torch.nn.Module, factor: float) -> None:
    """Multiply the weights and the bias of a model's last linear layer by ``factor``, in place.

    Raises:
        OptionError: The model has no linear layer.
    """
    with torch.no_grad():
        for parameter in penultimate(model).parameters():
            parameter.mul_(factor)


def exaggerate_claims(facts: UploadFacts, attack: AttackConfig) -> UploadFacts:
    """Return the facts that a client reports of its training: the true ones, unless it is an attacker that claims more.

    A claim is ``attack.factor`` times the true number of examples. ``claim`` multiplies the count of every class that
    the client holds, with at least one example each; ``claim-uniform`` divides the sum equally over all classes.
    """
    counts = facts.label_counts
    if (kind := attack.of(facts.client)) not in CLAIMING or not counts:
        return facts
    if kind == "claim-uniform":
        each, over = divmod(max(1, round(attack.factor * sum(counts))), len(counts))
        counts = tuple(each + (number < over) for number in range(len(counts)))
    else:
        counts = tuple(max(int(count > 0), round(attack.factor * count)) for count in counts)
    return replace(facts, num_examples=sum(counts), label_counts=counts)


def choose_victim(node: Node, config: AppConfig) -> Node:
    """Return the client whose upload an attacker copies: the next honest one in cyclic order.

    Only a simulation permits it: there every client can read the examples of all, and is named after its own part.

    Raises:
        UploadError: This client is not simulated, or all clients are attackers.
    """
    if config.client.nodes or node.client != _name(node.partition_id):
        others = ", ".join(kind for kind in KINDS if kind != "copy")
        rule = f"one of {others} for {node.client}; only in a simulation can a client read those of another"
        raise refusals.bad_setting("attack.kind", "'copy'", rule)
    following = [(node.partition_id + step) % node.num_partitions for step in range(1, node.num_partitions)]
    for partition_id in following:
        if config.attack.of(_name(partition_id)) == "none":
            architecture = config.model.of_client(partition_id)
            return replace(node, client=_name(partition_id), partition_id=partition_id, architecture=architecture)
    raise refusals.no_honest_client()


def check_trains(attack: AttackConfig, client: str) -> None:
    """Refuse an attack by a client that uploads a checkpoint unchanged.

    Raises:
        UploadError: The client is an attacker.
    """
    if (kind := attack.of(client)) != "none":
        raise refusals.bad_setting("attack.kind", repr(kind), "'none' for a client that uploads a checkpoint")


def check_rounds(attack: AttackConfig, client: str) -> None:
    """Refuse an attack that works on a single upload where a client answers round by round.

    Raises:
        UploadError: Names the attacks that work in rounds.
    """
    if (kind := attack.of(client)) not in ("none", *POISONING):
        raise refusals.bad_setting("attack.kind", repr(kind), f"one of none, {', '.join(POISONING)} in rounds")


def _name(partition_id: int) -> str:
    """Return the name of a simulated client."""
    return client_name({"partition-id": partition_id})
