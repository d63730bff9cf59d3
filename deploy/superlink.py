"""flower-superlink, with one more rule: Flower's control commands are taken from this machine only.

Nodes, operators and the server's own processes share one port. Nodes prove themselves by their keys; but who may send
control commands (start a run, register or remove a node) Flower 1.41 leaves to an account server that it does not
bring: whoever reaches the port may start a run, and a run is code on every machine. So this answers such requests with
403 unless they come from an address in ``ONESHOT_CONTROL_FROM`` (default 127.0.0.1 and ::1).
Takes the flags of flower-superlink.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.superlink import extensions
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

VARIABLE = "ONESHOT_CONTROL_FROM"
# What everybody may ask: nodes, who prove themselves by their keys, and whether there is a server.
OPEN = ("/v1/fleet/", "/health")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class LocalControl:
    """Refuses what is not for nodes, unless it comes from an allowed address."""

    def __init__(self, app: App, allowed: frozenset[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        """Pass a request on, or answer 403."""
        peer = (scope.get("client") or ("",))[0].removeprefix("::ffff:")
        if scope["type"] == "lifespan" or scope["path"].startswith(OPEN) or peer in self._allowed:
            await self._app(scope, receive, send)
            return
        sys.stderr.write(f"refused {scope['path']} from {peer}: must be {', '.join(sorted(self._allowed))}\n")
        await PlainTextResponse("control commands are not taken from this address\n", 403)(scope, receive, send)


def allowed_addresses() -> frozenset[str]:
    """Return the addresses whose control commands are taken."""
    return frozenset(os.environ.get(VARIABLE, "127.0.0.1 ::1").replace(",", " ").split())


def main() -> None:
    """Run flower-superlink with the rule."""
    from flwr.superlink.cli.flower_superlink import flower_superlink

    # Flower's hook for what is asked before everything else; without it no server starts that promises the rule.
    if not callable(getattr(extensions, "get_middleware", None)):
        sys.exit("this Flower has no flwr.superlink.extensions.get_middleware: install the one of constraints.txt")
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(LocalControl, allowed=allowed_addresses()), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
