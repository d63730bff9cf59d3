"""Keeps a process and all that it starts off the network, by the switches that Flower, Ray and others have for it.

``--offline`` and ``$ONESHOT_OFFLINE`` set them in the environment, which every process inherits. Programs that download
fail at once, and HTTP clients get a proxy that nobody serves. So nothing leaves this machine unasked. Code that evades
this on purpose, and sockets that heed no proxy, are for a network namespace or a firewall: a run needs the loopback
addresses alone.

This module imports neither torch nor Flower nor Ray, which read the variables when they are first imported.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

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
    """Return the variables by which no proxy stands between processes of this machine, beside the exceptions there."""
    return {key: ",".join(filter(None, [given.get(key), "127.0.0.1,localhost"])) for key in ("NO_PROXY", "no_proxy")}


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
