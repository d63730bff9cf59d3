"""Who may send control commands to the server of a deployment."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from uvicorn.config import Config

ROOT = Path(__file__).parents[3]
OUTSIDE = ("192.0.2.7", 40000)


@pytest.fixture(scope="module")
def superlink() -> ModuleType:
    spec = importlib.util.spec_from_file_location("superlink", ROOT / "deploy" / "superlink.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def status(app: Any, path: str, client: tuple[str, int], **headers: str) -> int:
    """Return the status with which an app answers a request."""
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "client": client, "headers": given, "method": "POST", "scheme": "http"}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, None, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("peer", "taken"),
    [
        *[(peer, True) for peer in ("127.0.0.1", "::1", "::ffff:127.0.0.1")],
        *[(peer, False) for peer in ("192.0.2.9", "127.0.0.2", "::ffff:192.0.2.9", "")],
    ],
)
@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleetx"])
def test_commands_are_taken_of_this_machine_alone_and_never_through_a_proxy(
    superlink: ModuleType, peer: str, path: str, taken: bool
) -> None:
    app, client = superlink.LocalControl(_answers, superlink.allowed_addresses()), (peer, 40000)

    assert status(app, path, client) == (200 if taken else 403)
    for header in ("x_forwarded_for", "X_Forwarded_For", "forwarded", "x_real_ip"):
        assert status(app, path, client, **{header: "127.0.0.1"}) == 403


def test_server_never_believes_a_forwarded_address(superlink: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["client"][0])
        await superlink.LocalControl(_answers, superlink.allowed_addresses())(scope, receive, send)

    def flower() -> None:
        config = Config(app, loop="asyncio", log_config=None)
        config.load()
        seen.append(os.environ["FORWARDED_ALLOW_IPS"])
        seen.append(str(status(config.loaded_app, "/v1/control/start-run", OUTSIDE, x_forwarded_for="127.0.0.1")))

    # The package has a function of its module's name.
    monkeypatch.setattr(importlib.import_module("flwr.superlink.cli.flower_superlink"), "flower_superlink", flower)
    monkeypatch.setattr(superlink.extensions, "get_middleware", list)

    superlink.main()

    assert seen == ["", OUTSIDE[0], "403"]


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ([], set()),
        (["--host", "0.0.0.0", "--port", "9092"], set()),  # noqa: S104
        (["--host", "192.0.2.2", "--insecure"], {"192.0.2.2"}),
        (["--host=192.0.2.2"], {"192.0.2.2"}),
        (["--host", "::ffff:192.0.2.2"], {"192.0.2.2"}),
        (["--host", "2001:db8:0::5"], {"2001:db8::5"}),
    ],
)
def test_server_s_own_processes_are_heard_whatever_address_it_listens_on(
    superlink: ModuleType, arguments: list[str], more: set[str]
) -> None:
    assert superlink.allowed_addresses(arguments) == {"127.0.0.1", "::1"} | more
