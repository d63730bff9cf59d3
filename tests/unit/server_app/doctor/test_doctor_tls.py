from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import PrivateFormat
from doctor_keys import NOW, Authority, write_key

from server_app.doctor import DoctorFinding
from server_app.doctor.network import ServerFiles, node_key, server_certificate
from strategies.core.errors import OptionError

AUTHORITY = Authority()
NAMES = ("server.example.org", "127.0.0.1")


def wrong(findings: Iterable[DoctorFinding]) -> dict[str, DoctorFinding]:
    """Return the findings that are not ok, by check; every one of them says what to do."""
    found = {finding.check: finding for finding in findings if finding.level != "ok"}
    assert all(finding.fix for finding in found.values())
    return found


def files(folder: Path) -> ServerFiles:
    return ServerFiles.of(str(folder))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return AUTHORITY.issue(tmp_path / "keys", *NAMES)


def test_certificates_when_a_file_is_absent_or_none_are_errors(keys: Path) -> None:
    (keys / "ca.crt").write_text("hello")
    (keys / "server.pem").unlink()

    found = wrong(server_certificate(files(keys), ()))

    assert "not a certificate" in found["certificate ca.crt"].found
    assert "No such file" in found["certificate server.pem"].found


@pytest.mark.parametrize(
    ("later", "level", "said"),
    [(-5, "error", "not yet"), (0, "ok", ""), (340, "warning", "days left"), (400, "error", "expired")],
)
def test_a_certificate_is_judged_by_its_dates(keys: Path, later: float, level: str, said: str) -> None:
    found = list(server_certificate(files(keys), ("127.0.0.1",), NOW + timedelta(days=later)))

    (own,) = [finding for finding in found if finding.check == "certificate server.pem"]
    assert own.level == level
    assert said in own.found


@pytest.mark.parametrize(
    ("names", "asked", "level"),
    [
        (("a.example.org", "127.0.0.1"), "A.example.org", "ok"),
        (("*.example.org", "127.0.0.1"), "a.example.org", "ok"),
        (("*.example.org", "127.0.0.1"), "a.b.example.org", "error"),
        (("a.example.org", "127.0.0.1"), "10.0.0.7", "error"),
        (("10.0.0.7", "127.0.0.1"), "10.0.0.7", "ok"),
        ((), "a.example.org", "error"),
        (("a.example.org", "127.0.0.1"), "", "skipped"),
    ],
)
def test_a_certificate_is_for_the_name_that_nodes_use(
    tmp_path: Path, names: tuple[str, ...], asked: str, level: str
) -> None:
    folder = AUTHORITY.issue(tmp_path / "keys", *names)

    found = list(server_certificate(files(folder), (asked,) if asked else ()))

    check = f"certificate for {asked}" if asked else "certificate's names"
    assert [finding.level for finding in found if finding.check == check] == [level]


def test_a_certificate_that_is_not_for_loopback_is_an_error(tmp_path: Path) -> None:
    folder = AUTHORITY.issue(tmp_path / "keys", "server.example.org")

    assert list(wrong(server_certificate(files(folder), ("server.example.org",)))) == ["certificate for 127.0.0.1"]


def test_a_certificate_of_another_authority_or_key_is_an_error(keys: Path, tmp_path: Path) -> None:
    other = Authority().issue(tmp_path / "other", *NAMES)
    (keys / "ca.crt").write_bytes((other / "ca.crt").read_bytes())

    assert list(wrong(server_certificate(files(keys), NAMES))) == [f"certificate for {name}" for name in NAMES]
    (keys / "server.key").write_bytes((other / "server.key").read_bytes())
    assert list(wrong(server_certificate(files(keys), NAMES))) == ["server key server.key"]


@pytest.mark.parametrize(("mode", "level"), [(0o644, "error"), (0o640, "warning"), (0o400, None)])
def test_a_private_key_that_others_can_read_is_named(keys: Path, mode: int, level: str | None) -> None:
    (keys / "server.key").chmod(mode)

    found = wrong(server_certificate(files(keys), ("127.0.0.1",)))

    assert [finding.level for finding in found.values()] == ([level] if level else [])


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_a_node_key_of_a_nist_curve_is_ok(tmp_path: Path, curve: ec.EllipticCurve) -> None:
    path = write_key(tmp_path / "node.key", ec.generate_private_key(curve))

    assert [finding.level for finding in node_key(path)] == ["ok"]


def test_a_node_key_that_flower_would_refuse_is_an_error(tmp_path: Path) -> None:
    edwards = write_key(tmp_path / "a.key", ed25519.Ed25519PrivateKey.generate())
    pem = write_key(tmp_path / "b.key", ec.generate_private_key(ec.SECP384R1()), PrivateFormat.PKCS8)
    (tmp_path / "c.key").write_text("ecdsa-sha2-nistp384 AAAA a@b")

    said = [next(iter(wrong(node_key(path)).values())) for path in (edwards, pem, tmp_path / "c.key", tmp_path / "d")]

    assert [finding.level for finding in said] == ["error"] * 4
    words = ("Ed25519", "b.key", "c.key", "No such file")
    assert all(word in finding.found for word, finding in zip(words, said, strict=True))


def test_the_option_for_certificates_takes_a_folder_or_three_files() -> None:
    assert ServerFiles.of("keys").key == Path("keys/server.key")
    assert ServerFiles.of("a, b ,c") == ServerFiles(Path("a"), Path("b"), Path("c"))
    with pytest.raises(OptionError, match="must be a folder that holds"):
        ServerFiles.of("a,b")
