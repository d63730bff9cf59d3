"""A node's config: from its SuperNode's command line, or from a file that a simulation plays; loads no torch.

``flower-supernode --node-config`` takes such a file: TOML, one table of these keys. In a deployment every node has its
own. In a rehearsal, ``client.nodes`` names a folder, and simulated client i plays its i-th file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from fl_app.node_policy import NodePolicy
from strategies.core import refusals
from strategies.core.errors import OptionError
from strategies.core.options import check_device
from strategies.core.places import expand_user
from strategies.core.scan import has_suffix, scan
from strategies.core.toml import read_toml_file

# Key of a node's config -> type of its value.
KEYS: Mapping[str, type] = {
    "client": str,
    "partition-id": int,
    "num-partitions": int,
    "data-root": str,
    "checkpoint": str,
    "architecture": str,
    "max-ensemble-mib": float,
    "max-cache-mib": float,
    "read": str,
    "state-dir": str,
    "device": str,
    "max-epsilon": float,
    "max-delta": float,
    "label-counts": str,
    "architectures": str,
    "data-sources": str,
    "may-evaluate": bool,
    "min-test-examples": int,
    "share": str,
}
PATHS = ("data-root", "checkpoint", "state-dir")
# The keys that Flower itself gives a simulated node; a node whose config holds more is a deployed one.
PARTITION = frozenset({"partition-id", "num-partitions"})
_PLACEHOLDER = re.compile(r"client:|partition:(0?[0-9]{1,2}d?)?")  # of a checkpoint's path, with its width
PLACEHOLDERS = "its placeholders must be {client} and {partition}, or with digits {partition:03d}"
WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}

# `oneshot run` sets it for the processes that it starts: the number of simulated clients.
SUPERNODES_VARIABLE = "ONESHOT_NUM_SUPERNODES"


def node_facts(node_config: Mapping[str, Any], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's facts: its own config, or the one that it plays in a rehearsal.

    Args:
        node_config: From Flower; in a simulation it holds the partition alone.

    Raises:
        OptionError: A key is unknown, a value has the wrong type, or "client.nodes" is set outside a simulation.
    """
    place = str(run_config.get("client.nodes", ""))
    if not place:
        return checked_facts(node_config, "the node's config")
    if SUPERNODES_VARIABLE not in os.environ or set(node_config) != PARTITION:
        raise OptionError(refused_in_deployment(place))
    nodes, number = read_nodes(Path(place)), int(node_config["partition-id"])
    if number >= len(nodes):
        raise OptionError(
            f"setting 'client.nodes' is {place!r}, which has {len(nodes)} nodes: node {number} is missing"
        )
    # The device is that of the real machine.
    return {key: value for key, value in nodes[number].items() if key != "device"}


def node_policy(node_config: Mapping[str, Any], facts: Mapping[str, Any]) -> NodePolicy:
    """Return a node's limits for the settings of a run."""
    return NodePolicy.of(facts, deployed=is_deployed(node_config))


def is_deployed(node_config: Mapping[str, Any]) -> bool:
    """Return whether Flower's config of a node is that of a deployed one, not of a simulated one."""
    return not set(node_config) <= PARTITION


def refused_in_deployment(place: str) -> str:
    """Return the error of a server or a client that finds "client.nodes" outside a simulation."""
    return (
        f"setting 'client.nodes' is {place[:200]!r}: must be '' outside `oneshot run`, which simulates these nodes; "
        "a deployed node has its own flower-supernode --node-config"
    )


def read_nodes(place: Path) -> list[dict[str, Any]]:
    """Read the nodes of a rehearsal.

    Args:
        place: A TOML file with one node, or a folder of such files, read in the order of their names.

    Returns:
        The facts of each node; relative paths are resolved beside its file.

    Raises:
        OptionError: A file is missing or not TOML, a key is unknown, or a value has the wrong type. Also: a node has
            neither data nor a checkpoint, or two nodes share a name.
    """
    files = [place] if has_suffix(place, (".toml",)) else []
    if place.is_dir():
        found = scan(place, lambda path: has_suffix(path, (".toml",)))
        found.report("nodes")
        files = [*found.taken]
    if not files:
        raise OptionError(f"setting 'client.nodes' is {str(place)!r}: must be a .toml file, or a folder of .toml files")
    nodes = [_read(file) for file in files]
    named: dict[str, Path] = {}
    for file, facts in zip(files, nodes, strict=True):
        if not facts.keys() & {"partition-id", "data-root", "checkpoint"}:
            raise OptionError(f"{file} names no examples and no model: must set partition-id, data-root or checkpoint")
        name = client_name(facts)
        if name in named:
            raise OptionError(f"{named[name]} and {file} are both client {name!r}: each must have its own name")
        named[name] = file
    return nodes


def simulated_nodes(place: str, count: int) -> list[dict[str, Any]]:
    """Return what the simulated nodes say of themselves: the first ``count`` of "client.nodes", else as Flower's do.

    Raises:
        OptionError: As :func:`read_nodes`.
    """
    if place:
        return read_nodes(Path(place))[:count]
    return [{"partition-id": number, "num-partitions": count} for number in range(count)]


def checked_facts(facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a node's facts, with every key and value checked.

    Raises:
        OptionError: A key is unknown, or a value has the wrong type.
    """
    for key, value in facts.items():
        if key not in KEYS:
            raise OptionError(f"{where} has {key[:80]!r}: must be one of {', '.join(KEYS)}")
        kind = KEYS[key]
        if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
            raise OptionError(f"{where}: {key} is {str(value)[:80]!r}: must be {WORDS[kind]}")
    check_device(facts.get("device") or "auto", f"{where}: device")
    NodePolicy.of(facts, where=where)
    return dict(facts)


def client_name(facts: Mapping[str, Any]) -> str:
    """Return a node's stable name: from its config, else from its partition number."""
    partition_id = facts.get("partition-id", 0)
    return str(facts.get("client", f"client-{partition_id:03d}" if isinstance(partition_id, int) else "client"))


def checkpoint_path(template: str, *, client: str, partition_id: int) -> Path | None:
    """Return the client's checkpoint, with ``{client}`` and ``{partition}`` filled in; None without a template.

    A "~" stays as it is: a deployed node must not tell the server whose home folder that is.

    Raises:
        UploadError: The template has another placeholder.
    """
    if not template:
        return None
    if not has_known_placeholders(template):
        raise refusals.bad_setting("checkpoint", repr(template[:200]), PLACEHOLDERS.removeprefix("must be "))
    return Path(template.format(client=client, partition=partition_id))


def has_known_placeholders(template: str) -> bool:
    """Whether a checkpoint's path has no others than {client} and {partition}.

    Only the number may have a width, of two digits: a server's template must not fill a node's memory.
    """
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:  # a lone brace
        return False
    return all(not conversion and _PLACEHOLDER.fullmatch(f"{name}:{width}") for _, name, width, conversion in parts)


def _read(file: Path) -> dict[str, Any]:
    facts = checked_facts(read_toml_file(file, "node config"), f"node config {file}")
    for key in PATHS:
        if facts.get(key):
            facts[key] = str(file.parent.absolute() / expand_user(facts[key]))
    return facts
