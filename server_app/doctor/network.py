"""Certificates and keys for Flower, and the connection to the SuperLink: its name, port, certificate and clock.

Every wait has a time limit.
"""

from __future__ import annotations

import http.client
import shlex
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from server_app.doctor import DoctorFinding, Level
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
    """Check the server's certificate: its dates and key, and whether a node that trusts the CA accepts it."""
    dates = [certificate(path, now) for path in (files.ca, files.certificate)]
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


def certificate(path: Path, now: datetime | None = None) -> DoctorFinding:
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


WAIT_S = 8.0
# Flower's SuperLink accepts a node with a key if its clock is at most this far ahead or behind.
AHEAD_S = 5.0
BEHIND_S = 305.0
_NOTICED_S = 2.0


@dataclass(frozen=True)
class Address:
    """A SuperLink's host and port."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str, option: str = "--superlink") -> Address:
        """Read ``host:port``, as flower-supernode does.

        Raises:
            OptionError: The text has another form.
        """
        host, _, port = text.rpartition(":")
        host = host.strip("[]")
        if not host or "/" in host or not (port.isdecimal() and 0 < int(port) < 2**16):
            raise OptionError(f"{option} is {text!r}: must be HOST:PORT, without https://; for example server:9092")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class HealthAnswer(NamedTuple):
    """A SuperLink's answer to a health request.

    Attributes:
        tls: TLS version of the connection; empty without TLS.
        ahead: Seconds by which this machine's clock is ahead of the SuperLink's, as far as its date of whole seconds
            shows; None if the answer has no date.
    """

    status: int
    tls: str
    ahead: float | None


def superlink(address: Address, ca: Path | None, wait_s: float = WAIT_S) -> Iterator[DoctorFinding]:
    """Connect to a SuperLink as a node does, and compare the clocks.

    Args:
        ca: The CA whose certificates are trusted; None connects without TLS, as a node with --insecure does.
        wait_s: Time limit of the connection and of the answer, in seconds each.
    """
    name = f"SuperLink {address}"
    try:
        answer = ask(address, ca, wait_s)
    except (OSError, http.client.HTTPException) as error:
        yield _unreached(name, address, error, secure=ca is not None)
        return
    if answer.status != http.client.OK:
        fix = f"find the program that listens at {address}: it is no SuperLink, or the address is another machine's"
        yield DoctorFinding("error", name, f"answers /health with {answer.status}", "200, as a SuperLink answers", fix)
    elif ca is None:
        needed = "TLS, unless all processes are on one machine"
        fix = "give --root-certificates ca.crt; without TLS, others on the network path can read the models"
        yield DoctorFinding("warning", name, "answers, without TLS", needed, fix)
    else:
        yield DoctorFinding("ok", name, f"answers over {answer.tls}, and {ca.name} signed its certificate")
    if answer.ahead is not None:
        yield clocks(answer.ahead)


def ask(address: Address, ca: Path | None, wait_s: float) -> HealthAnswer:
    """Request a SuperLink's /health without any proxy; the arguments are those of :func:`superlink`.

    Raises:
        OSError: The SuperLink cannot be reached; an SSLError if TLS fails.
        http.client.HTTPException: The answer is not HTTP.
    """
    if ca is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=wait_s)
    else:
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=wait_s, context=node_context(ca))
    with closing(connection):
        connection.connect()
        tls = connection.sock.version() or "" if isinstance(connection.sock, ssl.SSLSocket) else ""
        sent = time.time()
        connection.request("GET", "/health")
        response = connection.getresponse()
        try:
            date = parsedate_to_datetime(response.getheader("date", "")).timestamp()
        except ValueError:
            return HealthAnswer(response.status, tls, None)
        # The SuperLink's clock was in [date, date + 1) when this machine's was between `sent` and now.
        return HealthAnswer(response.status, tls, max(sent - date - 1, 0.0) or min(time.time() - date, 0.0))


def clocks(ahead: float) -> DoctorFinding:
    """Judge the seconds by which this machine's clock is ahead of the SuperLink's."""
    shown = "agree" if ahead == 0 else f"this one is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    needed = f"at most {AHEAD_S:g} s ahead or {BEHIND_S:g} s behind; otherwise the SuperLink refuses the node's key"
    fix = "set the clocks of both machines (timedatectl set-ntp true)"
    level: Level = "warning" if -BEHIND_S < ahead < AHEAD_S else "error"
    return DoctorFinding("ok" if abs(ahead) <= _NOTICED_S else level, "clocks", shown, needed, fix)


def port_free(address: Address, ca: Path | None, wait_s: float = 3.0) -> Iterator[DoctorFinding]:
    """Check that a SuperLink can listen on a port of this machine, or does so already.

    Args:
        address: The port to check, and the host by which nodes reach this machine.
        ca: The CA by which a running SuperLink is recognised; None connects without TLS.
        wait_s: Time limit of that connection in seconds.
    """
    name = f"port {address.port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
            probe.bind(("", address.port))
    except PermissionError:
        yield DoctorFinding("error", name, "this user may not listen there", fix="choose a port above 1023")
    except OSError:
        yield _taken(name, address, ca, wait_s)
    else:
        yield DoctorFinding("ok", name, "free")


def _taken(name: str, address: Address, ca: Path | None, wait_s: float) -> DoctorFinding:
    for host in ("127.0.0.1", address.host):
        try:
            if ask(Address(host, address.port), ca, wait_s).status == http.client.OK:
                return DoctorFinding("ok", name, "a SuperLink listens there already")
        except (OSError, http.client.HTTPException):  # perhaps a TLS server under its other name
            continue
    fix = f"end the program that listens there (ss -ltnp 'sport = :{address.port}' names it), or choose another port"
    if ca is None:
        fix += "; give --certificates, which identify a SuperLink"
    return DoctorFinding(
        "error" if ca else "warning", name, "taken by a program that does not answer as a SuperLink", fix=fix
    )


def _unreached(name: str, address: Address, error: BaseException, *, secure: bool) -> DoctorFinding:
    """Return the reason why a SuperLink could not be reached, and the remedy."""
    found, fix = f"{type(error).__name__}: {error}", "correct the reported problem"
    if isinstance(error, ssl.SSLCertVerificationError):
        found = f"its certificate is refused: {error.verify_message}"
        fix = "use the ca.crt that signed its certificate, and a host name of the certificate"
    elif isinstance(error, ssl.SSLError):
        fix = "start the SuperLink with --ssl-certfile, or correct the port, which may be another program's"
    elif isinstance(error, socket.gaierror):
        fix = "give the server's DNS name or IP address"
    elif isinstance(error, ConnectionRefusedError | TimeoutError):
        fix = f"start flower-superlink, and open port {address.port} in every firewall on the way"
    elif isinstance(error, http.client.HTTPException | ConnectionResetError) and not secure:
        fix = "give --root-certificates ca.crt: it requires TLS, or it is no SuperLink"
    return DoctorFinding("error", name, found, "a SuperLink that answers", fix)
