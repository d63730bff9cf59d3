"""The names of the clients behind Flower's nodes: node ids are random in every run, names and their order are not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from logging import INFO, WARNING
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import ConfigRecord, Message
from flwr.common.logger import log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from ..core import refusals
from ..core.errors import OptionError
from ..core.facts import CLIENT_NAME

# The names that the server's operator gives to clients, by the public keys of their nodes.
#
# The file is in the format of ssh's ``authorized_keys``; ``deploy/make_keys.py`` writes it.


VARIABLE = "ONESHOT_NODE_KEYS"


def read_node_keys() -> dict[bytes, str] | None:
    """Return the client of every public key; None if ``$ONESHOT_NODE_KEYS`` names no file.

    Returns:
        Public key, in PEM as the SuperLink reports it -> client.

    Raises:
        OptionError: The file cannot be read, a line is no key with a name, or a key or a name stands twice.
    """
    if not (place := os.environ.get(VARIABLE, "")):
        return None
    try:
        lines = Path(place).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{VARIABLE} names {place}, which cannot be read: {error}") from error
    found: dict[bytes, str] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            key, name = _read(line, f"{place}, line {number}")
            if key in found or name in found.values():
                raise OptionError(f"{place}, line {number}: the key or the name {name!r} stands twice")
            found[key] = name
    return found


def _read(line: str, where: str) -> tuple[bytes, str]:
    kind, _, rest = line.strip().partition(" ")
    encoded, _, name = rest.partition(" ")
    try:
        key = load_ssh_public_key(f"{kind} {encoded}".encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise OptionError(f"{where}: must be a public key of ssh and a client's name, KIND KEY NAME") from error
    if not CLIENT_NAME.fullmatch(name):
        raise OptionError(f"{where}: {name[:80]!r} is not a client's name: must match {CLIENT_NAME.pattern}")
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), name


_BY_RANK = (
    "their nodes' order of registration stands for them: each round asks the same clients in every run of a "
    "simulation, and in a deployment while its SuperNodes stay registered"
)
_BY_ID = "each round asks other clients in every run"


class ClientNames:
    """Names of the clients by node, and ranks of the nodes whose clients have none.

    Flower's simulation registers its nodes in the order of their partitions, so that a rank there is a partition.
    Where ``$ONESHOT_NODE_KEYS`` names a file, the public key of a node decides its client's name.

    Attributes:
        barred: Nodes that get no more questions, because an answer of theirs could not be read.
    """

    def __init__(self) -> None:
        self.barred: set[int] = set()
        self._names: dict[int, str] = {}
        self._ranks: dict[int, int] = {}
        self._introduced: set[int] = set()
        self._warned = False
        self._keys = read_node_keys()

    @property
    def keyed(self) -> bool:
        """Whether keys name the nodes, so that every answer must bear a name."""
        return self._keys is not None

    @property
    def enrolled(self) -> int | None:
        """The number of clients that the keys name; None without keys, when there may be any number."""
        return None if self._keys is None else len(self._keys)

    def identify(self, infos: Iterable[NodeInfo]) -> None:
        """Name the connected nodes by their public keys, if there is a file of them; bar nodes that are not in it."""
        if self._keys is None:
            return
        for info in infos:
            if info.node_id in self._names or info.node_id in self.barred:
                continue
            if (client := self._keys.get(info.public_key)) is not None:
                self._names[info.node_id] = client
            else:
                self.barred.add(info.node_id)
                log(WARNING, "node-%d gets no questions: its key is in no line of $%s", info.node_id, VARIABLE)

    def name_of(self, node: int) -> str | None:
        """Return the name of the client on a node; None while it is unknown."""
        return self._names.get(node)

    def is_ranked(self, node: int) -> bool:
        """Return whether a node's time of registration is known."""
        return node in self._ranks

    def describe(self, node: int, claimed: str = "") -> str:
        """Return a text for a client: its own name, else the one it claims, else its node's rank, else its node."""
        unnamed = f"unnamed-{self._ranks[node]:03d}" if node in self._ranks else f"node-{node}"
        return self._names.get(node, claimed or unnamed)

    def in_order(self, nodes: Iterable[int]) -> list[int]:
        """Return nodes in the order of their clients' names; nodes without one last, in the order of registration."""
        last = len(self._ranks)
        return sorted(
            nodes,
            key=lambda node: (node not in self._names, self._names.get(node, ""), self._ranks.get(node, last), node),
        )

    def rank(self, nodes: Iterable[int], grid: Grid) -> None:
        """Give new nodes their ranks, behind the known ones, in the order of their registration."""
        new = {node for node in nodes if node not in self._ranks}
        infos = grid.get_nodes() if new and hasattr(grid, "get_nodes") else ()
        known = [(info.registered_at, info.node_id) for info in infos if info.node_id in new and info.registered_at]
        # A time without fractions of a second is a shorter text, and would sort wrongly.
        for _, node in sorted((datetime.fromisoformat(when), node) for when, node in known):
            self._ranks[node] = len(self._ranks)

    def pin(self, node: int, client: str) -> None:
        """Record the name of the client on a node; a node keeps its name.

        Without node authentication a client that starts again is a new node, which Flower lists beside the old one for
        a while. So a name may move to another node, unless keys name the nodes.

        Raises:
            UploadError: The node has another name.
        """
        own = self._names.setdefault(node, client)
        if own != client:
            raise refusals.changed_name(client, own).of(own)

    def unnamed(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that have neither sent a name nor answered the question for it."""
        return [node for node in nodes if node not in self._names and node not in self._introduced]

    def take_names(self, replies: Iterable[tuple[int, Message]]) -> None:
        """Take the nodes' answers to the question for names; log once that some clients have no name."""
        unnamed = 0
        for node, reply in replies:
            self._introduced.add(node)
            facts = ConfigRecord() if reply.has_error() else reply.content.config_records.get("upload", ConfigRecord())
            name = facts.get("client")
            if isinstance(name, str) and CLIENT_NAME.fullmatch(name):
                self._names.setdefault(node, name)
            else:
                unnamed += 1
        if unnamed and not self._warned:
            self._warned = True
            ranked = self._introduced - set(self._names) <= set(self._ranks)
            log(INFO, "%d clients have no names, so %s", unnamed, _BY_RANK if ranked else _BY_ID)
