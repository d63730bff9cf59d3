"""Certificates and keys for Flower: the server's certificate, its key and its CA, and a node's own key."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID

from server_app.doctor.findings import DoctorFinding
from strategies.core.errors import OptionError
from strategies.core.places import expand_user

SOON = timedelta(days=30)
MAKE = "make new ones with deploy/make_keys.py, or use those that were made for this machine"
# The readers raise these on files of another format or of an unknown kind.
UNREADABLE = (NotImplementedError, TypeError, UnsupportedAlgorithm, ValueError)
# The curves of keys with which Flower lets a node register.
CURVES = (ec.SECP192R1, ec.SECP224R1, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_NAMES = ("ca.crt", "server.pem", "server.key")


@dataclass(frozen=True)
class ServerFiles:
    """The SuperLink's --ssl-ca-certfile, --ssl-certfile and --ssl-keyfile."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, given: str) -> ServerFiles:
        """Read the option: a folder with the usual file names, or the three files, comma-separated.

        Raises:
            OptionError: The option is neither.
        """
        parts = [expand_user(part.strip()) for part in given.split(",")]
        if len(parts) == 1:
            return cls(*(parts[0] / name for name in _NAMES))
        if len(parts) != len(_NAMES):
            raise OptionError(
                f"--certificates is {given!r}: must be a folder that holds {', '.join(_NAMES)}, or these three "
                "files, comma-separated"
            )
        return cls(*parts)


def server_certificate(
    files: ServerFiles, names: tuple[str, ...], now: datetime | None = None
) -> Iterator[DoctorFinding]:
    """Check the server's certificate: its dates, names, CA and key.

    Args:
        files: The three files.
        names: Hosts or addresses by which nodes reach the server; empty if unknown.
        now: The time; None reads the clock.
    """
    now = now or datetime.now(UTC)
    ca, own = _certificate(files.ca), _certificate(files.certificate)
    for path, found in ((files.ca, ca), (files.certificate, own)):
        yield _dates(path, found, now) if isinstance(found, x509.Certificate) else found
    if not isinstance(ca, x509.Certificate) or not isinstance(own, x509.Certificate):
        return
    yield _issued(files, ca, own)
    yield _names_of(files.certificate, own, names)
    yield from _loopback(files.certificate, own)
    yield from _server_key(files, own)


def root_certificate(path: Path, now: datetime | None = None) -> Iterator[DoctorFinding]:
    """Check a node's copy of the CA's certificate.

    Args:
        path: The node's --root-certificates.
        now: The time; None reads the clock.
    """
    found = _certificate(path)
    yield _dates(path, found, now or datetime.now(UTC)) if isinstance(found, x509.Certificate) else found


def node_key(path: Path) -> Iterator[DoctorFinding]:
    """Check a node's private key, which Flower reads as an OpenSSH key of a NIST curve without a password."""
    name, wanted = f"node key {path.name}", "an OpenSSH private key, of a NIST curve, without a password"
    make = f"ssh-keygen -t ecdsa -b 384 -N '' -f {path.name} (or deploy/make_keys.py), then register its .pub again"
    data = _read(path, name)
    if isinstance(data, DoctorFinding):
        yield data
        return
    try:
        key = serialization.load_ssh_private_key(data, None)
    except UNREADABLE as error:
        what = "a PEM key, no OpenSSH key" if b"BEGIN" in data[:40] and b"OPENSSH" not in data[:40] else str(error)
        what = "a public key" if data.startswith(b"ecdsa-") else what
        yield DoctorFinding("error", name, f"{path}: {what}", wanted, make)
        return
    curve = key.curve.name if isinstance(key, ec.EllipticCurvePrivateKey) else type(key).__name__.strip("_")
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVES):
        yield DoctorFinding("error", name, f"{path}: a key of {curve}", wanted, make)
    else:
        yield DoctorFinding("ok", name, f"{path}: {curve}", wanted)
    yield from _mode(path, name)


def _certificate(path: Path) -> x509.Certificate | DoctorFinding:
    data = _read(path, f"certificate {path.name}")
    if isinstance(data, DoctorFinding):
        return data
    try:
        found = x509.load_pem_x509_certificate(data)
        found.public_key()  # raises for a key of an unknown kind
        return found
    except UNREADABLE:
        return DoctorFinding(
            "error", f"certificate {path.name}", f"{path}: not a certificate", "a PEM certificate", MAKE
        )


def _read(path: Path, name: str) -> bytes | DoctorFinding:
    try:
        return expand_user(path).read_bytes()
    except OSError as error:
        fix = f"put it there, readable for this user; {MAKE}"
        return DoctorFinding("error", name, f"{path}: {error.strerror}", "a readable file", fix)


def _dates(path: Path, found: x509.Certificate, now: datetime) -> DoctorFinding:
    name = f"certificate {path.name}"
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    shown = f"{path}: valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    if now < begin:
        fix = f"wait, or set this machine's clock, which shows {now:%Y-%m-%d %H:%M} UTC"
        return DoctorFinding("error", name, f"{shown}: not yet valid", fix=fix)
    if now > end:
        return DoctorFinding("error", name, f"{shown}: expired", fix=MAKE)
    if end - now < SOON:
        return DoctorFinding(
            "warning", name, f"{shown}: {(end - now).days} days left", "30 days", f"before it expires, {MAKE}"
        )
    return DoctorFinding("ok", name, shown)


def _issued(files: ServerFiles, ca: x509.Certificate, own: x509.Certificate) -> DoctorFinding:
    try:
        own.verify_directly_issued_by(ca)
    except (*UNREADABLE, InvalidSignature):
        found = f"{files.certificate} was not signed by {files.ca}: nodes will refuse the server"
        return DoctorFinding("error", "certificate's CA", found, fix=f"use two that belong together, or {MAKE}")
    return DoctorFinding("ok", "certificate's CA", f"{files.certificate.name} is signed by {files.ca.name}")


def _names_of(path: Path, own: x509.Certificate, names: tuple[str, ...]) -> DoctorFinding:
    known = _subject_names(own)
    shown, check = ", ".join(known) or "none", "certificate's names"
    if not names:
        fix = "give --address HOST:PORT" if known else MAKE
        level: str = "skipped" if known else "error"
        return DoctorFinding(level, check, f"{path} is for {shown}", "the host that nodes connect to", fix)  # type: ignore[arg-type]
    lost = [name for name in names if not any(_matches(name, entry) for entry in known)]
    if lost:
        fix = f"make a certificate for {', '.join(names)} (deploy/make_keys.py), or connect to {shown}"
        return DoctorFinding("error", check, f"{path} is for {shown}, not for {', '.join(lost)}", fix=fix)
    return DoctorFinding("ok", check, f"{path} is for {shown}")


def _loopback(path: Path, own: x509.Certificate) -> Iterator[DoctorFinding]:
    if not any(_matches("127.0.0.1", entry) for entry in _subject_names(own)):
        found = f"{path} is not for 127.0.0.1, by which the processes of a SuperLink with --host 0.0.0.0 reach it"
        yield DoctorFinding("error", "certificate's loopback", found, fix=f"add 127.0.0.1 to its names; {MAKE}")


def _subject_names(own: x509.Certificate) -> list[str]:
    try:
        extension = own.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME).value
    except x509.ExtensionNotFound:
        return []
    assert isinstance(extension, x509.SubjectAlternativeName)  # noqa: S101  the class of this identifier
    return [*extension.get_values_for_type(x509.DNSName),
            *(str(address) for address in extension.get_values_for_type(x509.IPAddress))]  # fmt: skip


def _matches(name: str, entry: str) -> bool:
    try:
        return ipaddress.ip_address(name) == ipaddress.ip_address(entry)
    except ValueError:
        name, entry = name.lower(), entry.lower()
        return name == entry or (entry.startswith("*.") and name.partition(".")[2] == entry[2:])


def _server_key(files: ServerFiles, own: x509.Certificate) -> Iterator[DoctorFinding]:
    name = f"server key {files.key.name}"
    data = _read(files.key, name)
    if isinstance(data, DoctorFinding):
        yield data
        return
    try:
        key = serialization.load_pem_private_key(data, None)
    except UNREADABLE as error:
        yield DoctorFinding("error", name, f"{files.key}: {error}", "a PEM private key without a password", MAKE)
        return
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        found = f"{files.key} is not the key of {files.certificate}"
        yield DoctorFinding("error", name, found, fix=f"use two that belong together, or {MAKE}")
    else:
        yield DoctorFinding("ok", name, f"{files.key} is the key of {files.certificate.name}")
    yield from _mode(files.key, name)


def _mode(path: Path, name: str) -> Iterator[DoctorFinding]:
    mode = expand_user(path).stat().st_mode & 0o777
    if mode & 0o077:
        who = "every user of this machine" if mode & 0o007 else "its group"
        found, fix = f"{path}: mode {mode:o}, open to {who}", f"chmod 600 {shlex.quote(str(expand_user(path)))}"
        yield DoctorFinding("error" if mode & 0o007 else "warning", f"{name}: mode", found, "600: its owner only", fix)
