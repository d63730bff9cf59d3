"""A node's config, parsed as Flower parses it, and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fl_app.config import AppConfig
from fl_app.ledger import Ledger
from fl_app.node_config import checked_facts, checkpoint_path, client_name, node_policy
from fl_app.node_policy import NodePolicy
from server_app.doctor import DoctorFinding
from strategies.core.errors import OptionError, StoreError, UploadError
from strategies.core.facts import CLIENT_NAME
from strategies.core.places import expand_user, state_root
from strategies.core.toml import read_toml, read_toml_file

# Flower's own expression for one pair.
_PAIR = re.compile(r"(\S+?)=(\'[^\']*\'|\"[^\"]*\"|\S+)")


@dataclass(frozen=True)
class NodeConfig:
    """A node's config."""

    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: str) -> NodeConfig:
        """Read a TOML file, or pairs as ``flower-supernode --node-config`` takes them.

        Raises:
            OptionError: The file cannot be read, the text is not TOML, a key is unknown, or a value is out of range.
        """
        return cls(checked_facts(_values(given), "node config"))

    @property
    def client(self) -> str:
        """The node's name; by default it follows from the partition number."""
        return client_name(self.facts)

    @property
    def policy(self) -> NodePolicy:
        """The limits that the node sets for the settings of a run."""
        return node_policy(self.facts, self.facts)

    @property
    def partition_id(self) -> int:
        """The number of its part of the training set."""
        return int(self.facts.get("partition-id", 0))

    @property
    def num_partitions(self) -> int:
        """The number of parts of the training set."""
        return int(self.facts.get("num-partitions", 1))

    @property
    def has_data(self) -> bool:
        """Whether it holds examples; a node with a checkpoint needs none."""
        return "partition-id" in self.facts or "data-root" in self.facts

    def data_root(self, of_run: str) -> str:
        """Return the folder of its data: its own, else that of the run's settings if it may read it, else empty."""
        return self.policy.data_root(str(self.facts.get("data-root", "")), of_run)

    def refusals(self, app: AppConfig, architecture: str) -> Iterator[DoctorFinding]:
        """Return what the node's own limits refuse of the planned run; a budget alone refuses nothing here."""
        policy, template = self.policy, "" if self.facts.get("checkpoint") else app.client.checkpoint
        checks = {
            "data source": partial(policy.check_source, app.data.name),
            f"architecture {architecture}": partial(policy.check_architecture, architecture),
        }
        if template:
            checks["checkpoint"] = partial(policy.check_readable, "client.checkpoint", self.filled(template))
        for name, check in checks.items():
            try:
                check()
            except UploadError as error:
                fix = "correct the node's config, or the setting"
                yield DoctorFinding("error", f"{name}: limits", str(error), fix=fix)

    def filled(self, template: str) -> Path:
        """Return the path of a checkpoint with the node's name and the number of its part.

        Raises:
            UploadError: The template has another placeholder.
        """
        return expand_user(checkpoint_path(template, client=self.client, partition_id=self.partition_id) or "")

    def look(self) -> Iterator[DoctorFinding]:
        """Check the node's name, and show its config."""
        if not CLIENT_NAME.fullmatch(self.client):
            wanted = f"a name that matches {CLIENT_NAME.pattern}"
            yield DoctorFinding("error", "node config client", repr(self.client[:80]), wanted, "rename it")
        elif "client" not in self.facts:
            fix = 'for example client="hospital-a"; the server treats two nodes with one name as one client'
            found = f"no client: its name will be {self.client}"
            yield DoctorFinding("warning", "node config", found, "its own name", fix)
        else:
            yield DoctorFinding("ok", "node config", ", ".join(f"{key}={value}" for key, value in self.facts.items()))

    def budget(self) -> Iterator[DoctorFinding]:
        """Return how much of the node's privacy budget is spent; nothing without a budget."""
        if (most := self.policy.max_epsilon) is None:
            return
        ledger = Ledger.of(state_root(self.policy.state), self.client)
        try:
            epsilon, delta = ledger.spent()
        except StoreError as error:
            fix = "put back a copy of this file; until then the node sends no private upload"
            yield DoctorFinding("error", "privacy budget", str(error), "a ledger as it was written", fix)
            return
        found = f"epsilon {epsilon:g} of {most:g} and delta {delta:g} of {self.policy.max_delta:g} are spent"
        yield DoctorFinding("ok" if epsilon < most else "warning", "privacy budget", f"{found} ({ledger.path})")


def _values(given: str) -> dict[str, Any]:
    if given.endswith(".toml"):
        return read_toml_file(expand_user(given), "node config")
    try:
        return read_toml("\n".join(f"{key} = {value}" for key, value in _PAIR.findall(given)))
    except ValueError as error:
        raise OptionError(
            f"node config {given[:200]!r} cannot be read: {error}; must be key=value pairs with texts in quotes, for "
            'example client="hospital-a" partition-id=0'
        ) from error
