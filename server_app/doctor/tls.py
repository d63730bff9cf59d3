"""Certificates and keys for Flower: the server's certificate, its key and its CA, and a node's own key."""

from __future__ import annotations

import shlex
import ssl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from server_app.doctor.findings import DoctorFinding
from strategies.core.errors import OptionError
from strategies.core.places import expand_user

SOON = timedelta(days=30)
MAKE = "make new ones with deploy/make_keys.py, or use those that were made for this machine"
# The curves of keys with which Flower lets a node register.
CURVES = (ec.SECP192R1, ec.SECP224R1, ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
LOOPBACK = "127.0.0.1"  # the processes of a SuperLink with --host 0.0.0.0 reach it there
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
    """Check the server's certificate: its dates and key, and whether a node that trusts the CA accepts it.

    Args:
        files: The three files.
        names: Hosts or addresses by which nodes reach the server; empty if unknown.
        now: The time; None reads the clock.
    """
    dates = [_certificate(path, now) for path in (files.ca, files.certificate)]
    yield from dates
    if any(finding.level == "error" for finding in dates):
        return
    name, server = f"server key {files.key.name}", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(files.certificate, files.key, password=lambda: "")  # never asks on the terminal
    except OSError as error:
        found = f"{files.key} is not the key of {files.certificate}: {getattr(error, 'reason', '') or error.strerror}"
        yield DoctorFinding("error", name, found, "its PEM key, without a password", MAKE)
        return
    yield DoctorFinding("ok", name, f"{files.key} is the key of {files.certificate.name}")
    yield from _mode(files.key, name)
    hosts = tuple(dict.fromkeys((*names, LOOPBACK)))
    for host in hosts:
        check, reason = f"certificate for {host}", _refusal(server, files.ca, host)
        found = f"{files.certificate} is refused by a node that trusts {files.ca.name}: {reason}"
        fix = f"make a certificate for {', '.join(hosts)} with this CA (deploy/make_keys.py)"
        yield DoctorFinding("error", check, found, fix=fix) if reason else DoctorFinding("ok", check, "accepted")
    if not names:
        needed = "the host that nodes connect to"
        yield DoctorFinding("skipped", "certificate's names", "not given", needed, "give --address HOST:PORT")


def root_certificate(path: Path) -> Iterator[DoctorFinding]:
    """Check a node's copy of the CA's certificate, its --root-certificates."""
    yield _certificate(path, None)


def node_key(path: Path) -> Iterator[DoctorFinding]:
    """Check a node's private key, which Flower reads as an OpenSSH key of a NIST curve without a password."""
    name, wanted = f"node key {path.name}", "an OpenSSH private key, of a NIST curve, without a password"
    make = f"ssh-keygen -t ecdsa -b 384 -N '' -f {path.name} (or deploy/make_keys.py), then register its .pub again"
    try:
        key = serialization.load_ssh_private_key(expand_user(path).read_bytes(), None)
    except (OSError, NotImplementedError, TypeError, UnsupportedAlgorithm, ValueError) as error:
        yield DoctorFinding("error", name, f"{path}: {error}", wanted, make)
        return
    curve = key.curve if isinstance(key, ec.EllipticCurvePrivateKey) else key
    if isinstance(curve, CURVES):
        yield DoctorFinding("ok", name, f"{path}: {curve.name}")
    else:
        yield DoctorFinding("error", name, f"{path}: a key of {type(curve).__name__.strip('_')}", wanted, make)
    yield from _mode(path, name)


def node_context(ca: Path) -> ssl.SSLContext:
    """Return the TLS context of a node that trusts one CA."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(expand_user(ca))
    return context


def _refusal(server: ssl.SSLContext, ca: Path, host: str) -> str:
    """Return why a node that trusts the CA refuses the server's certificate for a host; empty if it accepts it.

    The two sides shake hands in memory, so OpenSSL judges the signature, the dates and the names as for a connection.
    """
    to_server, to_node = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        node = node_context(ca).wrap_bio(to_node, to_server, server_hostname=host)
        link = server.wrap_bio(to_server, to_node, server_side=True)
        for side in (node, link, node):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except (ssl.SSLError, ValueError) as error:  # a ValueError for a host that is no name
        return getattr(error, "verify_message", "") or str(error)
    return ""


def _certificate(path: Path, now: datetime | None) -> DoctorFinding:
    """Read a certificate and compare its dates with the time."""
    name, now = f"certificate {path.name}", now or datetime.now(UTC)
    try:
        found = x509.load_pem_x509_certificate(expand_user(path).read_bytes())
        found.public_key()  # raises for a key of an unknown kind
    except OSError as error:
        return DoctorFinding("error", name, f"{path}: {error.strerror}", "a readable file", f"put it there, or {MAKE}")
    except (NotImplementedError, TypeError, UnsupportedAlgorithm, ValueError):
        return DoctorFinding("error", name, f"{path}: not a certificate", "a PEM certificate", MAKE)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    shown = f"{path}: valid from {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    if now < begin:
        fix = f"wait, or set this machine's clock, which shows {now:%Y-%m-%d %H:%M} UTC"
        return DoctorFinding("error", name, f"{shown}: not yet valid", fix=fix)
    if now > end:
        return DoctorFinding("error", name, f"{shown}: expired", fix=MAKE)
    if end - now < SOON:
        left = f"{shown}: {(end - now).days} days left"
        return DoctorFinding("warning", name, left, "30 days", f"before it expires, {MAKE}")
    return DoctorFinding("ok", name, shown)


def _mode(path: Path, name: str) -> Iterator[DoctorFinding]:
    mode = expand_user(path).stat().st_mode & 0o777
    if mode & 0o077:
        who = "every user of this machine" if mode & 0o007 else "its group"
        found, fix = f"{path}: mode {mode:o}, open to {who}", f"chmod 600 {shlex.quote(str(expand_user(path)))}"
        yield DoctorFinding("error" if mode & 0o007 else "warning", f"{name}: mode", found, "600: its owner only", fix)
