"""Keeps a process and all that it starts off the network, by the switches that Flower, Ray and others have for it.

``--offline`` and ``$ONESHOT_OFFLINE`` set them in the environment, which every process inherits. Programs that download
fail at once, and HTTP clients get a proxy that nobody serves. So nothing leaves this machine unasked. Code that evades
this on purpose, and sockets that heed no proxy, are for a network namespace or a firewall: a run needs the loopback
addresses alone.

This module imports neither torch nor Flower nor Ray, which read the variables when they are first imported.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

VARIABLE = "ONESHOT_OFFLINE"

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
# Nothing serves port 9. Ray's head process asks at each start in whose cloud it is: it has no switch against that, but
# heeds a proxy.
_DEAD_PROXY = "http://127.0.0.1:9"
_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OFF = ("", "0", "false", "no", "off")


def ray_token(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which a new Ray refuses every process without its token.

    Args:
        given: The environment. A cluster of the user's (``$RAY_ADDRESS``) and a mode of the user's stay as they are.
    """
    if given.get("RAY_ADDRESS") or "RAY_AUTH_MODE" in given:
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def without_proxy(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which no proxy stands between processes of this machine.

    Flower's HTTP client reads all of them when it is made, whatever address it is for, and fails with what it cannot
    read. So a proxy that it cannot use is emptied (:func:`unusable_proxies`), and so are IPv6 networks in ``NO_PROXY``.

    Args:
        given: The environment. Other proxies, and the exceptions in ``NO_PROXY``, stay.
    """
    made = dict.fromkeys(unusable_proxies(given), "")
    for key in ("NO_PROXY", "no_proxy", "no_grpc_proxy"):
        named = (host.strip() for host in given.get(key, "").split(","))
        kept = [host for host in named if host and not _is_ipv6_network(host)]
        made[key] = ",".join([*kept, *(host for host in _LOOPBACK if host not in kept)])
    return made


def unusable_proxies(given: Mapping[str, str]) -> dict[str, str]:
    """Return the proxies of an environment that Flower's HTTP client cannot use: variable -> why."""
    found = {}
    for key, value in given.items():
        if key.lower() in _PROXIES and value and (reason := _unusable(value)):
            found[key] = reason
    return found


def _unusable(proxy: str) -> str:
    # No reason quotes the proxy, which may hold a password.
    try:
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        scheme, _ = address.scheme, address.port
    except ValueError:
        return "is no URL of a proxy such as http://proxy.example.org:3128"
    if scheme not in ("http", "https", "socks5", "socks5h"):
        return f"is a proxy of the kind {scheme}://, must be http://, https:// or socks5://"
    if scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        return "is a SOCKS proxy, which needs: pip install 'httpx[socks]'"
    return ""


def _is_ipv6_network(host: str) -> bool:
    return "/" in host and ":" in host.partition("/")[0] and "://" not in host


def wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether an environment is to stay off the network; None stands for this process's environment."""
    given = os.environ if environ is None else environ
    return given.get(VARIABLE, "").strip().lower() not in _OFF


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep processes off the network; none if the environment does not ask for them.

    Args:
        given: The environment. ``NO_PROXY`` keeps its exceptions: addresses that may be reached all the same.
    """
    if not wanted(given):
        return {}
    proxies = {key: _DEAD_PROXY for name in _PROXIES for key in (name, name.upper())}
    return {VARIABLE: "1", **QUIET, **_NO_DOWNLOADS, **proxies, **without_proxy(given)}


def switch_on() -> None:
    """Keep this process, and all that it starts from now on, off the network."""
    os.environ.update(environment({**os.environ, VARIABLE: "1"}))
