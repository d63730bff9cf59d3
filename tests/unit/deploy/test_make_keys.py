"""The script that makes a federation's keys: what it makes, with which modes, and that it replaces nothing."""

from __future__ import annotations

import datetime
import ipaddress
import runpy
import shutil
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from store_faults import Faults, disk_full

from strategies.flower.names import VARIABLE, read_node_keys

SCRIPT = Path(__file__).parents[3] / "deploy" / "make_keys.py"
main: Callable[[list[str]], int] = runpy.run_path(str(SCRIPT))["main"]
ASKED = ["--server", "server.example.org", "--server", "192.0.2.7", "--node", "hospital-a", "--node", "hospital-b"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    assert main([str(folder), *ASKED]) == 0
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def test_keys_when_made_are_exactly_those_that_each_machine_needs(keys: Path) -> None:
    assert sorted(contents(keys)) == [
        ".gitignore", "authority/ca.key", "ca.crt", "hospital-a/ca.crt", "hospital-a/node.key", "hospital-b/ca.crt",
        "hospital-b/node.key", "public/hospital-a.pub", "public/hospital-b.pub", "public/node_keys", "server/ca.crt",
        "server/server.key", "server/server.pem",
    ]  # fmt: skip
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.rglob("*.key")} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.rglob("*") if path.is_dir()} == {0o700}
    assert all(b"PRIVATE" not in text for name, text in contents(keys).items() if not name.endswith(".key"))


def test_server_certificate_names_the_server_and_its_own_machine_and_verifies(keys: Path) -> None:
    made, authority = certificate(keys / "server" / "server.pem"), certificate(keys / "ca.crt")
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["server.example.org", "localhost"]
    addresses = [ipaddress.ip_address("192.0.2.7"), ipaddress.ip_address("127.0.0.1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    made.verify_directly_issued_by(authority)
    left = made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 824 <= left.days <= 825
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server" / "server.pem", keys / "server" / "server.key")


def test_the_list_of_node_keys_binds_each_key_to_the_name_of_its_file(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (keys / "public" / "hospital-b.pub").read_text().rsplit(" ", 1)[0]
    (keys / "public" / "hospital-b.pub").write_text(f"{own} someone@machine\n")  # as ssh-keygen writes it
    assert main([str(keys), *ASKED]) == 0
    monkeypatch.setenv(VARIABLE, str(keys / "public" / "node_keys"))
    names = ("hospital-a", "hospital-b")
    assert read_node_keys() == {try_load_public_key(keys / "public" / f"{name}.pub"): name for name in names}


def test_a_second_call_adds_a_node_and_replaces_nothing(keys: Path) -> None:
    before = contents(keys)
    assert main([str(keys), *ASKED, "--node", "hospital-c"]) == 0
    after = contents(keys)
    listed = "public/node_keys"
    assert after.pop(listed).startswith(before.pop(listed))
    assert {name: after[name] for name in before} == before
    added = {"hospital-c/ca.crt", "hospital-c/node.key", "public/hospital-c.pub"}
    assert after.keys() - before.keys() == added


def test_a_node_that_has_its_private_key_keeps_its_public_one(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (keys / "hospital-a" / "node.key").unlink()  # it lies on the node's machine alone
    theirs = ec.generate_private_key(ec.SECP384R1()).public_key()
    sent = theirs.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (keys / "public" / "hospital-d.pub").write_bytes(sent)
    lost = contents(keys)["public/hospital-b.pub"]
    (keys / "public" / "hospital-b.pub").unlink()
    before = contents(keys)

    capsys.readouterr()
    assert main([str(keys), *ASKED, "--node", "hospital-d"]) == 0
    assert "of hospital-a:  its private key is not here; remove " in capsys.readouterr().out

    after = contents(keys)
    assert {name: after[name] for name in before if name != "public/node_keys"} == {
        name: text for name, text in before.items() if name != "public/node_keys"
    }
    assert after.keys() - before.keys() == {"hospital-d/ca.crt", "public/hospital-b.pub"}
    assert after["public/hospital-b.pub"] == lost


def test_renewal_replaces_the_server_s_certificate_and_nothing_else(keys: Path) -> None:
    before = contents(keys)
    assert main([str(keys), "--server", "other.example.org", "--renew-server", "--days", "30"]) == 0
    after = contents(keys)
    assert {name for name in after if after[name] != before[name]} == {"server/server.key", "server/server.pem"}
    made = certificate(keys / "server" / "server.pem")
    made.verify_directly_issued_by(certificate(keys / "ca.crt"))
    key = load_pem_private_key((keys / "server" / "server.key").read_bytes(), None)
    assert made.public_key() == key.public_key()


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["--node", "hospital-a"], "--server is missing"),
        (["--server", "a.org", "--days", "0"], "--days 0: must be 1 to 3650"),
        (["--server", "a.org", "--days", "-5"], "--days -5: must be 1 to 3650"),
        (["--server", "a.org", "--days", "99999999"], "--days 99999999: must be 1 to 3650"),
        (["--server", "server.example.org:9092"], "without a port"),
        (["--server", "a.org", "--node", "../etc"], "node '../etc': must be a name"),
        (["--server", "a.org", "--node", "server"], "node 'server': must be a name"),
    ],
)
def test_keys_that_cannot_be_made_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str], line: str
) -> None:
    assert main([str(tmp_path / "keys"), *asked]) == 1
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "keys" / "server").exists()


def test_keys_when_the_disk_refused_some_of_them_are_made_by_a_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, folder = Faults(monkeypatch), tmp_path / "keys"
    for number in range(faults.count(lambda: main([str(tmp_path / "whole"), *ASKED]))):
        with faults.at(number, disk_full, last=10**9):
            assert main([str(folder), *ASKED]) == 1
        assert main([str(folder), *ASKED]) == 0
        public = try_load_public_key(folder / "public" / "hospital-a.pub")
        private = load_ssh_private_key((folder / "hospital-a" / "node.key").read_bytes(), None)
        assert public_key_to_bytes(private.public_key()) == public  # type: ignore[arg-type]
        shutil.rmtree(folder)
