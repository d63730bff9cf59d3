"""Keeps a process off the network: a connection or a name lookup beyond the permitted addresses is an error.

The guard is a Python audit hook. It sees every connection that Python code opens and every name that Python code looks
up, in any library. It cannot be removed, and forks inherit it. It does not see sockets of native code: those of gRPC,
of uvloop, and of Ray's own processes and channels, which connect to Ray's addresses alone. A socket that receives a
name instead of a number looks it up before the guard sees it; the connection is refused all the same.

The guard stops telemetry and unrequested downloads, not code that evades it on purpose; namespaces and firewalls do
that.

Permitted are Unix sockets, this machine's loopback addresses, ``$RAY_ADDRESS``, the address that Flower's process was
started with (``--superlink``, ``--runtime-api-address``), and the addresses in ``$ONESHOT_OFFLINE_ALLOW``. Listening is
permitted too: Ray and Flower look for free ports.

This module imports neither torch nor Flower nor Ray: ``startup/sitecustomize.py`` loads it first in every process.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import OfflineError, OptionError

VARIABLE = "ONESHOT_OFFLINE"
ALLOW_VARIABLE = "ONESHOT_OFFLINE_ALLOW"
LOG_VARIABLE = "ONESHOT_OFFLINE_LOG"

# Switches off the telemetry of Flower and Ray, and Flower's search for updates.
QUIET: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "ORT_DISABLE_TELEMETRY": "1",
}
# Makes programs that would download fail at once.
_NO_DOWNLOADS: Mapping[str, str] = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "HF_HUB_OFFLINE": "1",
    "PIP_NO_INDEX": "1",
    "UV_OFFLINE": "1",
}
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
_OFF = ("", "0", "false", "no", "off")

# As the first folder in PYTHONPATH it puts the guard into every Python process at its start.
STARTUP = Path(__file__).resolve().parent / "startup"

# The options that give Flower's processes the address to connect to.
_ADDRESS_OPTIONS = ("--superlink", "--runtime-api-address")
_FLOWERS = ("flower-", "flwr-")
# Ray's head process always asks at its start which cloud it runs in; it is refused without a log line.
_UNSAID = {("dashboard.py", "169.254.169.254"), ("dashboard.py", "metadata.google.internal")}
# Event for sys.audit: this process's guard answers it, whichever copy of this module has installed the guard.
_QUESTION = "oneshot.offline"

Address = tuple[str, int | None]


def ray_token(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a new Ray refuses every process without its token.

    Ray has them since 2.52, and reads them when it is first imported. Earlier versions ignore them.

    Args:
        given: The environment. A cluster of the user's (``$RAY_ADDRESS``) and a mode of the user's stay as they are.
    """
    if given.get("RAY_ADDRESS") or "RAY_AUTH_MODE" in given:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether an environment asks for the guard; None stands for this process's environment."""
    given = os.environ if environ is None else environ
    return given.get(VARIABLE, "").strip().lower() not in _OFF


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to an environment that asks for the guard; none if it does not.

    Args:
        given: The environment.

    Returns:
        The guard's variables, those that switch off downloads, telemetry and proxies, and a PYTHONPATH whose first
        folder installs the guard before any other code runs.
    """
    if not wanted(given):
        return {}
    paths = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(STARTUP)]
    proxies = {name: "" for name in given if name.lower() in _PROXIES}
    return {VARIABLE: "1", **QUIET, **_NO_DOWNLOADS, **proxies, "PYTHONPATH": os.pathsep.join([str(STARTUP), *paths])}


def switch_on() -> None:
    """Install the guard in this process and in all that it starts from now on; see :func:`enforce`."""
    os.environ.update(environment({**os.environ, VARIABLE: "1"}))
    enforce()


def enforce() -> None:
    """Install the guard in this process if ``$ONESHOT_OFFLINE`` asks for it; a second call installs no second guard.

    Raises:
        OptionError: ``$ONESHOT_OFFLINE_ALLOW`` is not a list of addresses. The guard is installed all the same.
    """
    if not wanted():
        return
    guard = _guard()
    if guard is None:
        guard = _Guard()
        sys.addaudithook(guard.audit)
    guard.error = OfflineError  # the class of this copy of the module, which the process imports
    guard.allow(_flowers(sys.argv))
    allow(os.environ.get("RAY_ADDRESS", ""))
    guard.allow(addresses(os.environ.get(ALLOW_VARIABLE, ""), ALLOW_VARIABLE))


def allow(cluster: str) -> None:
    """Let this process's guard, if it has one, permit every port of a Ray cluster's head.

    Args:
        cluster: A value of ``$RAY_ADDRESS``: ``host:port`` or ``ray://host:port``; other words name no machine.
    """
    guard = _guard()
    if guard is not None and ":" in cluster:
        host, _ = _address(cluster.rpartition("://")[2], "RAY_ADDRESS")
        guard.allow([(host, None)])


def for_cluster() -> dict[str, str]:
    """Return the environment variables that give actors on other machines the same guard."""
    return {name: os.environ[name] for name in (VARIABLE, ALLOW_VARIABLE) if wanted() and name in os.environ}


def addresses(text: str, what: str) -> list[Address]:
    """Read comma-separated ``host`` or ``host:port``; an IPv6 address with a port stands in brackets.

    Args:
        text: The list.
        what: The name of its variable or option, for the error.

    Raises:
        OptionError: A port is not a number from 1 to 65535.
    """
    return [_address(each.strip(), what) for each in text.split(",") if each.strip()]


def refusals(log: Path) -> list[str]:
    """Return the refusals that guards with ``$ONESHOT_OFFLINE_LOG`` set to this file have logged, each line once."""
    return list(dict.fromkeys(log.read_text(encoding="utf-8").splitlines())) if log.exists() else []


class _Guard:
    def __init__(self) -> None:
        self.error: type[Exception] = OfflineError
        self._allowed: dict[Address, None] = {}
        self._found: set[Address] = set()
        self._said: set[str] = set()

    def allow(self, more: Iterable[Address]) -> None:
        self._allowed = {**self._allowed, **dict.fromkeys(more)}  # a new dict: other threads may be reading the old one

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not event.startswith(("socket.", _QUESTION)):  # true for nearly every event of a process
            return
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            self._connect(*args)
        elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            self._look_up(args[0], reverse=event == "socket.gethostbyaddr")
        elif event == "socket.getnameinfo":
            self._look_up(args[0][0], reverse=True)
        elif event == _QUESTION:
            args[0].append(self)

    def _connect(self, sock: Any, address: Any) -> None:
        if address is None or sock.family in _LOCAL_FAMILIES:  # None: the socket is already connected
            return
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            self._refuse(f"a connection to {address!r}", "")
        host, port = _plain(address[0]), address[1]
        if not (_is_here(host) or self._may(host, port)):
            self._refuse(f"a connection to {host}:{port}", host)

    def _look_up(self, given: Any, *, reverse: bool) -> None:
        if given is None:
            return
        host = _plain(given)
        if _is_here(host) or any(host == known for known, _ in self._allowed):
            return
        if _ip(host) is not None and (not reverse or self._may(host, None)):  # an IP address needs no lookup
            return
        self._refuse(f"looking up {host}", host)

    def _may(self, host: str, port: int | None) -> bool:
        # Permitted names are resolved again when an unknown address appears: their addresses may have changed.
        return (
            self._lists(self._allowed, host, port)
            or self._lists(self._found, host, port)
            or self._lists(self._resolved(), host, port)
        )

    @staticmethod
    def _lists(known: Iterable[Address], host: str, port: int | None) -> bool:
        return any(host == name and (port is None or at is None or at == port) for name, at in known)

    def _resolved(self) -> set[Address]:
        for host, port in [each for each in self._allowed if _ip(each[0]) is None]:
            with suppress(OSError):
                self._found = self._found | {(_plain(each[4][0]), port) for each in socket.getaddrinfo(host, None)}
        return self._found

    def _refuse(self, what: str, host: str) -> None:
        named = ", ".join(host if port is None else f"{host}:{port}" for host, port in self._allowed) or "none"
        program = Path(sys.argv[0]).name if getattr(sys, "argv", None) else "python"
        line = (
            f"offline: {what} is refused in {program}: must be this machine or a permitted address ({named}); "
            f"name more addresses in {ALLOW_VARIABLE}"
        )
        if what not in self._said and (program, host) not in _UNSAID:
            self._said.add(what)
            _say(line)
        raise self.error(line)


_LOCAL_FAMILIES = {getattr(socket, name) for name in ("AF_UNIX", "AF_NETLINK") if hasattr(socket, name)}


def _guard() -> _Guard | None:
    answers: list[_Guard] = []
    sys.audit(_QUESTION, answers)
    return answers[0] if answers else None


def _flowers(argv: list[str]) -> list[Address]:
    """Return the addresses that a Flower process was started with."""
    if not argv or not Path(argv[0]).name.startswith(_FLOWERS):
        return []
    words = [part for word in argv[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return [_address(value, option) for option, value in pairwise(words) if option in _ADDRESS_OPTIONS]


def _address(text: str, what: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # a host without a port, possibly IPv6
        return _plain(text.strip("[]")), None
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise OptionError(f"{what} names {text!r}: must be host or host:port, with a port from 1 to 65535")
    return _plain(host.strip("[]")), int(port)


def _plain(host: Any) -> str:
    """Return a host in normal form for comparison: an address in its shortest form, a name in lower case."""
    text = bytes(host).decode("ascii", "replace") if isinstance(host, bytes | bytearray) else str(host)
    ip = _ip(text)
    return text.lower().rstrip(".") if ip is None else str(ip)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _is_here(host: str) -> bool:
    ip = _ip(host)
    if ip is None:
        return host in ("", "localhost", "ip6-localhost") or host.endswith(".localhost")
    return ip.is_loopback or ip.is_unspecified  # connecting to the unspecified address connects to this machine


def _say(line: str) -> None:
    """Log a refusal, because the caller may swallow the error; also append it to the log file if one is set."""
    import logging  # late: the import takes milliseconds, and few processes need it

    logging.getLogger(__name__).warning("%s", line)
    if path := os.environ.get(LOG_VARIABLE, ""):
        with suppress(OSError):
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, f"{line}\n".encode())
            finally:
                os.close(handle)
