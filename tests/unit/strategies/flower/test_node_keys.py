"""Names by public keys: a node is the client that the operator's file says, or gets no questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flower_fakes import DeployedGrid, failing, lines_of, named, silent, stock, strategy
from flwr.proto.node_pb2 import NodeInfo

from strategies import FedENS
from strategies.client import failure
from strategies.core.errors import OptionError, QuorumError
from strategies.flower.names import VARIABLE, ClientNames, read_node_keys
from strategies.flower.nodes import Nodes, Refusals
from strategies.run.traffic import Traffic

KEYS = {name: ec.generate_private_key(ec.SECP384R1()).public_key() for name in ("alice", "bob", "mallory")}
PEM = {name: key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for name, key in KEYS.items()}
LINES = {name: key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() for name, key in KEYS.items()}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "node_keys"
    found.write_text(f"# the hospitals\n\n{LINES['alice']} alice\n{LINES['bob']} bob\n")
    monkeypatch.setenv(VARIABLE, str(found))
    return found


class KeyedGrid(DeployedGrid):
    """A grid whose nodes show their public keys."""

    owners: Mapping[int, str] = {1: "alice", 2: "bob", 3: "mallory"}

    def get_nodes(self) -> list[Any]:
        ids = self.get_node_ids()
        return [NodeInfo(node_id=n, public_key=PEM[self.owners[n]], last_activated_at="0") for n in ids]


@pytest.mark.usefixtures("file")
def test_a_node_whose_key_is_not_in_the_file_gets_no_questions() -> None:
    nodes = Nodes(KeyedGrid({1: silent, 3: silent}), Refusals(None), Traffic())  # type: ignore[arg-type]

    assert set(nodes.connected()) == {1, 3}
    assert nodes.names.barred == {3}


@pytest.mark.usefixtures("file")
def test_an_upload_without_a_name_is_refused_where_keys_name_the_nodes(tmp_path: Path) -> None:
    run = strategy(FedENS, tmp_path / "run", min_uploads=1)
    run.start(KeyedGrid({1: named("alice", 1), 2: stock(2)}), timeout=5.0)  # type: ignore[arg-type]

    assert [upload.client for upload in run.report.job.uploads] == ["alice"]
    (refused,) = lines_of(tmp_path / "run", "refusals")
    assert refused["client"] == "bob"
    assert "and was 'bob' before: must keep its name" in refused["reason"]


@pytest.mark.usefixtures("file")
def test_a_failure_is_that_of_the_node_s_key_whatever_name_it_claims(tmp_path: Path) -> None:
    def claiming(message: Any) -> Any:
        return failure(message, client="alice", reason="the disk is damaged")

    run = strategy(FedENS, tmp_path / "run", min_uploads=2)
    with pytest.raises(QuorumError, match=r"1 uploads arrived, min-uploads is 2\. Missing: bob: the disk is damaged"):
        run.start(KeyedGrid({1: named("alice", 1), 2: claiming}), timeout=5.0)  # type: ignore[arg-type]


@pytest.fixture
def nodes(file: Path) -> dict[int, Any]:
    """Three nodes with keys, of which one fails."""
    file.write_text(file.read_text() + f"{LINES['mallory']} mallory\n")
    return {1: named("alice", 1), 2: named("bob", 2), 3: failing("no examples")}


def test_without_a_file_names_are_the_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    names = ClientNames()
    names.identify([NodeInfo(node_id=1, public_key=PEM["alice"])])

    names.pin(1, "whatever")
    assert read_node_keys() is None
    assert names.barred == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ssh-rsa nonsense alice", "line 1: must be a public key of ssh and a client's name"),
        ("{alice} ../alice", "line 1: '../alice' is not a client's name"),
        ("{alice}", "line 1: '' is not a client's name"),
        ("{alice} a\n{alice} b", "line 2: the key or the name 'b' stands twice"),
        ("{alice} a\n{bob} a", "line 2: the key or the name 'a' stands twice"),
    ],
)
def test_a_file_with_a_mistake_is_one_line_that_names_its_place(file: Path, text: str, message: str) -> None:
    file.write_text(text.format(**LINES))
    with pytest.raises(OptionError, match=message):
        read_node_keys()


def test_a_client_that_fails_does_not_end_the_phase_while_another_has_yet_to_connect(
    nodes: dict[int, Any], tmp_path: Path, clock: Any
) -> None:
    run = strategy(FedENS, tmp_path / "run", min_uploads=2)
    run.start(KeyedGrid(nodes, joins={2: 100}), timeout=3600.0)  # type: ignore[arg-type]

    assert [upload.client for upload in run.report.job.uploads] == ["alice", "bob"]
    assert clock.now < 3600.0


def test_a_quorum_that_no_client_is_left_to_meet_ends_the_phase_before_the_deadline(
    nodes: dict[int, Any], tmp_path: Path, clock: Any
) -> None:
    run = strategy(FedENS, tmp_path / "run", min_uploads=3)
    with pytest.raises(QuorumError, match="2 uploads arrived, min-uploads is 3. Missing: mallory: "):
        run.start(KeyedGrid(nodes), timeout=3600.0)  # type: ignore[arg-type]
    assert clock.now < 20.0
