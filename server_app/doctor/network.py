"""The connection to the SuperLink: its name, port, certificate and clock. Every wait has a time limit."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

from server_app.doctor.findings import DoctorFinding, Level
from server_app.doctor.tls import node_context
from strategies.core.errors import OptionError

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
        status: HTTP status of /health.
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
        address: The SuperLink's address.
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
