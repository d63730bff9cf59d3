"""A client's identity, the server's request to it, and what it reports of its labels; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_app.node_config import checkpoint_path, client_name
from fl_app.node_policy import FREE, NodePolicy
from fl_app.project import function_of
from strategies.core import refusals
from strategies.core.clients import FOLDER_KEY, read_float, read_int, read_test_share
from strategies.core.facts import CLIENT_NAME, EXPECTED, UNNAMED, Agreement, read_agreement
from strategies.core.options import is_own

if TYPE_CHECKING:
    from fl_app.config import AppConfig, ClientConfig
    from fl_app.privacy import PrivacyConfig

# The tasks whose uploads can carry noise.
PRIVATE_TASKS = ("classifier", "statistics")


@dataclass(frozen=True)
class Node:
    """A client's identity, data and model.

    Attributes:
        has_data: Whether it holds training examples; one that trains has those of its default place at the least.
        state_dir: Its folder for trained models; empty for the default place.
    """

    client: str
    partition_id: int
    num_partitions: int
    architecture: str
    checkpoint: str
    data_root: str
    has_data: bool
    state_dir: str = ""
    device: str = ""
    policy: NodePolicy = FREE

    @classmethod
    def of(cls, facts: Mapping[str, Any], config: AppConfig, policy: NodePolicy = FREE) -> Node:
        """Read the facts of :func:`fl_app.node_config.node_facts`; the app's settings give the rest, within the policy.

        Raises:
            UploadError: The name is not valid, so the server would refuse the upload; or the policy does not permit the
                settings' checkpoint, architecture or attack.
        """
        client = client_name(facts)
        if not CLIENT_NAME.fullmatch(client):
            raise refusals.bad_name("client", client, CLIENT_NAME.pattern)
        partition_id = int(facts.get("partition-id", 0))
        given = str(facts.get("checkpoint", ""))
        checkpoint = given or config.client.checkpoint
        if checkpoint and not given:
            named = checkpoint_path(config.client.checkpoint, client=client, partition_id=partition_id)
            policy.check_readable("client.checkpoint", named or Path())
        architecture = str(facts.get("architecture", "")) or config.model.of_client(partition_id)
        policy.check_architecture(architecture)
        if policy.deployed and is_own(architecture) and not architecture.startswith("hf:"):
            with policy.reading(f"architecture {architecture!r}"):
                function_of(architecture, "architecture")
        policy.check_attack(config.attack.of(client))
        return cls(
            client=client,
            partition_id=partition_id,
            num_partitions=int(facts.get("num-partitions", 1)),
            architecture=architecture,
            checkpoint=checkpoint,
            # A folder of the run that the node may not read is one of other machines; it has its default place.
            data_root=policy.data_root(str(facts.get("data-root", "")), config.data.root),
            has_data=not checkpoint or "partition-id" in facts or "data-root" in facts,
            state_dir=policy.state_dir(config.client.state_dir),
            device=str(facts.get("device", "")),
            policy=policy,
        )

    def training(self, client: ClientConfig) -> ClientConfig:
        """Return the settings of its local training: the app's, on its own device if it names one."""
        return replace(client, device=self.device) if self.device else client


@dataclass(frozen=True)
class TrainRequest:
    """The server's request beside the weights; another strategy's request may lack any of it.

    Attributes:
        run_id: The run folder's id; empty if the server keeps no run, and then the client keeps nothing either.
        holdout: Share of the client's examples held out of training for requests after the upload, in [0, 1).
        test_share: Share of each class that is never trained on, and scored at the end, in [0, 0.5].
        expected: The server's classes and preprocessing, as far as it names them.
        task: The kind of model to train and send: a key of :data:`client_app.tasks.TASKS`.
        folders: The digest of each folder of Hugging Face that is a model of the run, by the architecture's name.
        sums: What the client measures for a merge of weights: "fisher", "gram", or empty for nothing.
    """

    run_id: str
    server_round: int
    seed: int
    holdout: float = 0.0
    per_class: bool = False
    calibrate: bool = False
    task: str = "classifier"
    sums: str = ""
    test_share: float = 0.0
    expected: Agreement = UNNAMED
    folders: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, said: Mapping[str, Any], seed: int) -> TrainRequest:
        """Read a request's config; ``seed`` is the app's own, used if the server sends none.

        Raises:
            UploadError: A number, or a list of names, is none.
        """
        return cls(
            str(said.get("run-id", "")),
            read_int(said, "server-round", 1),
            read_int(said, "seed", seed),
            read_float(said, "holdout", 0.0),
            bool(said.get("holdout-per-class", False)),
            bool(said.get("calibrate", False)),
            str(said.get("task", "classifier")),
            str(said.get("sums", "")),
            read_test_share(said),
            read_agreement(said, EXPECTED),
            {key.removeprefix(FOLDER_KEY): str(said[key]) for key in said if key.startswith(FOLDER_KEY)},
        )


def check_question(privacy: PrivacyConfig, request: TrainRequest) -> None:
    """Refuse a request whose answer would be outside the guarantee.

    Raises:
        UploadError: Names the request.
    """
    if not privacy.on:
        return
    refused = {
        f"task {request.task!r}": request.task not in PRIVATE_TASKS,
        "a second round of uploads": request.server_round != 1,
        "answers on held-out examples": bool(request.holdout),
        "the ranges of activations, for INT8": request.calibrate,
        "what is measured for a merge": bool(request.sums),
        "an upload to a run without an id, which cannot be sent again": not request.run_id,
    }
    for what, found in refused.items():
        if found:
            refuse(privacy, what)


def refuse(privacy: PrivacyConfig, what: str) -> None:
    """Refuse a request outside the guarantee, if privacy is on.

    Raises:
        UploadError: Privacy is on.
    """
    if privacy.on:
        raise refusals.not_private(what)


PRESENT = 1 / 5  # of an equal share: with ten classes, 2 % of the examples


def reported_counts(counts: tuple[int, ...], config: ClientConfig, policy: NodePolicy = FREE) -> tuple[int, ...] | None:
    """Return the label counts that a client reports; None if it reports none.

    Args:
        counts: Its examples per class [C].
        config: ``share_label_counts`` and ``label_counts_as``.
        policy: The most that the node reports; nothing with a privacy budget, because the counts carry no noise.

    Returns:
        Integers [C] with the sum of ``counts``.
    """
    if not reports_counts(config, policy):
        return None
    return equal_parts(counts) if "presence" in (config.label_counts_as, policy.label_counts) else counts


def reports_counts(config: ClientConfig, policy: NodePolicy) -> bool:
    """Say whether a client reports label counts at all."""
    return config.share_label_counts and policy.tells_counts


def check_shares_counts(config: ClientConfig, policy: NodePolicy, *, what: str) -> None:
    """Refuse an upload that holds exact label counts where the client does not report them as numbers.

    Raises:
        UploadError: It says what the upload is.
    """
    if not (config.share_label_counts and policy.tells_numbers) or config.label_counts_as == "presence":
        raise refusals.counts_not_shared(what)


def equal_parts(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the examples divided equally over the present classes; the remainder goes to the first of them.

    A class is present if it has more than :data:`PRESENT` times an equal share of the examples.
    """
    total = sum(counts)
    present = [count > PRESENT * total / len(counts) for count in counts]
    each, over = divmod(total, max(1, sum(present)))
    before = accumulate(present, initial=0)
    return tuple(there * (each + (earlier < over)) for there, earlier in zip(present, before, strict=False))
