"""What a simulated attacker does to its examples, to its weights and to what it tells; see :mod:`fl_app.attacks`.

Everything follows from the run's settings and this client's own name. It changes what is sent in that run and nothing
else on the node.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from client_app.keeping import Trained
from client_app.node import Node
from fl_app.attacks import CLAIMING, KINDS, POISONING, AttackConfig, triggered
from fl_app.config import AppConfig
from fl_app.data import ImageData
from fl_app.models import penultimate
from fl_app.node_config import client_name
from strategies.core.errors import UploadError
from strategies.core.seeds import generator


def poisoned(data: ImageData, attack: AttackConfig, *, client: str, num_classes: int, seed: int) -> ImageData:
    """Return what a client trains on: its own examples, unless it is an attacker that poisons them.

    Args:
        data: Examples with labels [N], before augmentation; left unchanged.
        attack: Who does what.
        client: The client's name.
        num_classes: C.
        seed: Of the run; with the name it fixes which images get the trigger.

    Raises:
        OptionError: The target of a backdoor is no class.
    """
    kind = attack.of(client)
    if kind == "label-flip":
        return ImageData(data.images, num_classes - 1 - data.labels)
    if kind != "backdoor":
        return data
    attack.check_classes(num_classes)
    count = max(1, round(attack.poisoned * len(data.labels)))
    chosen = torch.randperm(len(data.labels), generator=generator(seed, "attack", "backdoor", client))[:count]
    images, labels = data.images.clone(), data.labels.clone()
    images[chosen], labels[chosen] = triggered(images[chosen]), attack.target
    return ImageData(images, labels)


def scaled(state: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    """Return a state_dict whose real numbers are multiplied by ``factor``; counters stay as they are."""
    return {key: value * factor if value.is_floating_point() else value for key, value in state.items()}


def last_layer_scaled(model: torch.nn.Module, factor: float) -> None:
    """Multiply the weights and the bias of a model's last linear layer by ``factor``, in place.

    Raises:
        OptionError: The model has no linear layer.
    """
    with torch.no_grad():
        for parameter in penultimate(model).parameters():
            parameter.mul_(factor)


def claimed(trained: Trained, attack: AttackConfig, client: str) -> Trained:
    """Return what a client says of its training: the truth, unless it is an attacker that claims more.

    A claim is ``attack.factor`` times the examples: of every class that it has, one at least; or as many of each class.
    """
    counts = trained.label_counts
    if (kind := attack.of(client)) not in CLAIMING or not counts:
        return trained
    if kind == "claim-uniform":
        each, over = divmod(max(1, round(attack.factor * sum(counts))), len(counts))
        counts = tuple(each + (number < over) for number in range(len(counts)))
    else:
        counts = tuple(max(int(count > 0), round(attack.factor * count)) for count in counts)
    return replace(trained, num_examples=sum(counts), label_counts=counts)


def copied(node: Node, config: AppConfig) -> Node:
    """Return the client whose upload an attacker copies: the next one in order that is none, the first after the last.

    Only a simulation has it, where every client holds the examples of all and is named after its own part.

    Raises:
        UploadError: This client is no simulated one, or all are attackers.
    """
    if config.client.nodes or node.client != _name(node.partition_id):
        raise UploadError(
            f"attack.kind is 'copy': allowed for {node.client} are {_others('copy')}; only in a simulation "
            "has a client the examples of another"
        )
    following = [(node.partition_id + step) % node.num_partitions for step in range(1, node.num_partitions)]
    for partition_id in following:
        if config.attack.of(_name(partition_id)) == "none":
            architecture = config.model.of_client(partition_id)
            return replace(node, client=_name(partition_id), partition_id=partition_id, architecture=architecture)
    raise UploadError("attack.clients names every client: allowed with 'attack.kind' 'copy' are all but one")


def check_trains(attack: AttackConfig, client: str) -> None:
    """Refuse an attack by a client that uploads a checkpoint as it is.

    Raises:
        UploadError: Says so.
    """
    if (kind := attack.of(client)) != "none":
        raise UploadError(f"attack.kind is {kind!r}: allowed for a client that uploads a checkpoint is none")


def check_rounds(attack: AttackConfig, client: str) -> None:
    """Refuse an attack that is made for one upload where a client answers round by round.

    Raises:
        UploadError: Says which attacks are allowed.
    """
    if (kind := attack.of(client)) not in ("none", *POISONING):
        raise UploadError(f"attack.kind is {kind!r}: allowed in rounds are none, {', '.join(POISONING)}")


def _name(partition_id: int) -> str:
    """Return the name of a simulated client."""
    return client_name({"partition-id": partition_id})


def _others(kind: str) -> str:
    return ", ".join(name for name in KINDS if name != kind)
