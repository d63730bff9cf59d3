"""The way to the SuperLink: its name, its port, its certificate, its clock. Every wait has an end."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from server_app.doctor.findings import Finding
from strategies.core.errors import OptionError

WAIT_S = 8.0
# What Flower's SuperLink allows of a node with a key: its clock may be ahead by so much, or behind.
AHEAD_S = 5.0
BEHIND_S = 305.0
_NOTICED_S = 2.0


@dataclass(frozen=True)
class Address:
    """Where a SuperLink is."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str, option: str = "--superlink") -> Address:
        """Read ``host:port``, as flower-supernode does.

        Raises:
            OptionError: It is none.
        """
        host, _, port = text.rpartition(":")
        host = host.strip("[]")
        if not host or "/" in host or not (port.isdecimal() and 0 < int(port) < 2**16):
            raise OptionError(f"{option} is {text!r}: must be HOST:PORT, without https://; for example server:9092")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Answer:
    """What a SuperLink answered.

    Attributes:
        status: Of its /health.
        date: When it answered, by its own clock, in seconds of the epoch, cut to whole ones; None if it does not say.
        sent: When it was asked, by this clock.
        received: When its answer was here, by this clock.
        tls: How the connection was protected; empty: not at all.
    """

    status: int
    date: float | None
    sent: float
    received: float
    tls: str = ""


def superlink(address: Address, ca: Path | None, wait_s: float = WAIT_S) -> Iterator[Finding]:
    """Connect to a SuperLink as a node does, and compare the clocks.

    Args:
        address: Where it is.
        ca: The CA whose certificates are trusted; None: it is asked without TLS, as a node with --insecure does.
        wait_s: Seconds for the connection, and for the answer.
    """
    name = f"SuperLink {address}"
    try:
        answer = ask(address, ca, wait_s)
    except (OSError, http.client.HTTPException) as error:
        yield _unreached(name, address, error, secure=ca is not None)
        yield Finding("skipped", "clocks", "the SuperLink did not answer")
        return
    if answer.status != http.client.OK:
        fix = f"see what listens at {address}: another program has this port, or the address is of another machine"
        yield Finding("error", name, f"answers /health with {answer.status}", "200, as a SuperLink does", fix)
    elif ca is None:
        fix = "give --root-certificates ca.crt; without TLS everybody on the way reads the models"
        yield Finding("warning", name, "answers, without TLS", "TLS, unless all of this is one machine", fix)
    else:
        yield Finding("ok", name, f"answers, by {answer.tls}, and its certificate is of {ca.name}")
    yield clocks(answer)


def ask(address: Address, ca: Path | None, wait_s: float) -> Answer:
    """Ask a SuperLink for /health, without any proxy; the arguments are those of :func:`superlink`.

    Raises:
        OSError: It cannot be reached; an SSLError among them: TLS fails.
        http.client.HTTPException: What answers speaks no HTTP.
    """
    if ca is None:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=wait_s)
    else:
        context = ssl.create_default_context(cafile=str(ca.expanduser()))
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=wait_s, context=context)
    try:
        connection.connect()
        tls = connection.sock.version() or "" if isinstance(connection.sock, ssl.SSLSocket) else ""
        sent = time.time()
        connection.request("GET", "/health")
        response = connection.getresponse()
        return Answer(response.status, _date(response.getheader("date")), sent, time.time(), tls)
    finally:
        connection.close()


def clocks(answer: Answer) -> Finding:
    """Compare this machine's clock with the SuperLink's, by what it said."""
    if answer.date is None:
        return Finding("skipped", "clocks", "the SuperLink's answer has no date")
    # Its clock said something in [date, date + 1) at a moment in [sent, received] by ours.
    least, most = answer.sent - answer.date - 1, answer.received - answer.date
    ahead = least if least > 0 else most if most < 0 else 0.0
    shown = "agree" if ahead == 0 else f"this one is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    needed = f"at most {AHEAD_S:g} s ahead of the SuperLink's and {BEHIND_S:g} s behind, or it refuses the node's key"
    fix = "set the clocks of both machines (timedatectl set-ntp true)"
    if ahead >= AHEAD_S or ahead <= -BEHIND_S:
        return Finding("error", "clocks", shown, needed, fix)
    if abs(ahead) > _NOTICED_S:
        return Finding("warning", "clocks", shown, needed, fix)
    return Finding("ok", "clocks", shown, needed)


def port_free(address: Address, ca: Path | None, wait_s: float = 3.0) -> Iterator[Finding]:
    """Look whether a SuperLink can listen on a port of this machine, or does so already.

    Args:
        address: Its port is looked at; its host is how nodes call this machine.
        ca: The CA by which a SuperLink that runs already is recognised; None: it is asked without TLS.
        wait_s: Seconds for that.
    """
    name = f"port {address.port}"
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does
            probe.bind(("", address.port))
    except OSError as error:
        if isinstance(error, PermissionError):
            fix = "take a port above 1023"
            yield Finding("error", name, "this user may not listen there", "a port that a SuperLink can have", fix)
            return
        yield _taken(name, address, ca, wait_s)
    else:
        yield Finding("ok", name, "free")


def _taken(name: str, address: Address, ca: Path | None, wait_s: float) -> Finding:
    for host in ("127.0.0.1", address.host):
        try:
            if ask(Address(host, address.port), ca, wait_s).status == http.client.OK:
                return Finding("ok", name, "a SuperLink listens there already")
        except ssl.SSLCertVerificationError:  # it speaks TLS, under another name
            continue
        except (OSError, http.client.HTTPException):
            continue
    if ca is None:
        found, fix = "taken, perhaps by a SuperLink with TLS", "give --certificates: by them a SuperLink is recognised"
        return Finding("warning", name, found, "free, or a SuperLink's", fix)
    fix = f"end what listens there (ss -ltnp 'sport = :{address.port}' names it), or take another port"
    return Finding(
        "error", name, "taken by something that does not answer as a SuperLink of these certificates", fix=fix
    )


def _unreached(name: str, address: Address, error: BaseException, *, secure: bool) -> Finding:
    """Say why a SuperLink could not be reached, and what to do."""
    found, fix = f"{type(error).__name__}: {error}", "see what the line says"
    if isinstance(error, socket.gaierror):
        found, fix = f"the name {address.host} is not known here", "write it as the server's DNS name or IP address"
    elif isinstance(error, ConnectionRefusedError):
        found, fix = "refuses the connection: nothing listens there", "start flower-superlink, or mend the port"
    elif isinstance(error, TimeoutError):
        found = "does not answer"
        fix = f"start flower-superlink, and let port {address.port} through every firewall on the way"
    elif isinstance(error, ssl.SSLCertVerificationError):
        found = f"its certificate is refused: {error.verify_message}"
        fix = "take the ca.crt that its certificate was signed with, and the host name that stands in the certificate"
    elif isinstance(error, ssl.SSLError):
        found = f"TLS fails: {error.reason or error}"
        fix = "the SuperLink must be started with --ssl-certfile, or this port is another program's"
    elif isinstance(error, FileNotFoundError):
        found, fix = "not asked: the file of --root-certificates is not there", "give the server's ca.crt"
    elif isinstance(error, http.client.HTTPException | ConnectionResetError) and not secure:
        found = "does not answer in plain HTTP: it wants TLS, or it is no SuperLink"
        fix = "give --root-certificates ca.crt"
    return Finding("error", name, found, "a SuperLink that answers", fix)


def _date(text: str | None) -> float | None:
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except ValueError:
        return None
