"""flower-superlink, with one more rule: it accepts Flower's control commands from this machine only.

Nodes, operators and the server's own processes share one port. Nodes authenticate by their keys. Control commands start
a run, or register or remove a node. Flower authenticates their sender only with an account server, which it does not
include. Without this rule, any program that reaches the port may start a run, and a run is code on every machine.

So this server answers control commands with 403, unless they come from an address in ``ONESHOT_CONTROL_FROM`` (default
127.0.0.1 and ::1). Its own processes call the address that it listens on, so commands from there are taken too. The
address is that of the connection. A header that names another one is never believed: commands with such a header came
through a proxy, and are refused. It takes the flags of flower-superlink.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from flwr.superlink import extensions
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

VARIABLE = "ONESHOT_CONTROL_FROM"
# Paths open to every address: requests of nodes, which authenticate by their keys, and the health check.
OPEN = ("/v1/fleet/", "/health")
# Headers in which a proxy names the address that it forwards for.
FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})

# What Flower's own processes call a server by that listens on every address.
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  compared, not listened on

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class LocalControl:
    """Refuses requests to other paths than the nodes', unless they come from a listed address."""

    def __init__(self, app: App, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        """Forward a request, or answer 403."""
        peer = (scope.get("client") or ("",))[0].removeprefix("::ffff:")
        open_to_all = scope["type"] == "lifespan" or scope["path"].startswith(OPEN)
        proxied = any(name.lower() in FORWARDED for name, _ in scope.get("headers", ()))
        if open_to_all or (peer in self._allowed and not proxied):
            await self._app(scope, receive, send)
            return
        how = " through a proxy" if proxied else ""
        allowed = ", ".join(sorted(self._allowed))
        sys.stderr.write(f"refused {scope['path']!r} from {peer!r}{how}: must come from {allowed}, directly\n")
        await PlainTextResponse("control commands from this address are not accepted\n", 403)(scope, receive, send)


def allowed_addresses(arguments: Sequence[str] = ()) -> frozenset[str]:
    """Return the addresses whose control commands are accepted.

    Args:
        arguments: Of the command line. Flower's own processes call the address of ``--host``, and so come from it.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default="127.0.0.1")  # as Flower's
    host = parser.parse_known_args(arguments)[0].host
    named = os.environ.get(VARIABLE, "127.0.0.1 ::1").replace(",", " ").split()
    return frozenset(named) | _addresses_of(host)


def _addresses_of(host: str) -> set[str]:
    """Return a host's addresses as connections show them; of a wildcard this machine's, by which Flower calls it."""
    try:
        found = {str(info[4][0]).removeprefix("::ffff:") for info in socket.getaddrinfo(host, None)}
    except OSError:  # Flower says so
        return set()
    return {WILDCARDS.get(address, address) for address in found}


def main() -> None:
    """Run flower-superlink with the rule."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    # Flower's hook for middleware. Without it the rule cannot hold, so the server does not start.
    if not callable(getattr(extensions, "get_middleware", None)):
        sys.exit("this Flower has no flwr.superlink.extensions.get_middleware: install the version of constraints.txt")
    os.environ["FORWARDED_ALLOW_IPS"] = ""  # uvicorn would put the header's address in place of the connection's
    others, allowed = extensions.get_middleware, allowed_addresses(sys.argv[1:])
    extensions.get_middleware = lambda: (Middleware(LocalControl, allowed=allowed), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
