from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from doctor_keys import Authority

from server_app.doctor.network import Address, clocks, port_free, superlink
from strategies.core.errors import OptionError

AUTHORITY = Authority()


@contextmanager
def serving(folder: Path | None, *, behind: float = 0.0, status: int = 200) -> Iterator[Address]:
    """Answer as a SuperLink does, with a clock that is behind by so many seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(status)
            self.send_header("date", formatdate(time.time() - behind, usegmt=True))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if folder is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem", folder / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Address("127.0.0.1", server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return AUTHORITY.issue(tmp_path_factory.mktemp("tls") / "keys", "127.0.0.1")


@pytest.mark.parametrize(
    ("behind", "status", "levels", "said"),
    [
        (0, 200, ["ok", "ok"], "agree"),
        (60, 200, ["ok", "error"], "s ahead"),
        (0, 404, ["error"], "404"),  # another server's answer
    ],
)
def test_a_superlink_that_answers_by_tls_is_ok_if_its_clock_agrees(
    keys: Path, behind: float, status: int, levels: list[str], said: str
) -> None:
    with serving(keys, behind=behind, status=status) as address:
        found = list(superlink(address, keys / "ca.crt"))

    assert [finding.level for finding in found][: len(levels)] == levels
    assert said in found[len(levels) - 1].found
    assert all(finding.fix for finding in found if finding.level == "error")
    assert "TLSv1" in found[0].found or status != 200


def test_a_superlink_of_another_authority_or_name_is_an_error(keys: Path, tmp_path: Path) -> None:
    stranger = Authority().issue(tmp_path / "other", "127.0.0.1")
    misnamed = AUTHORITY.issue(tmp_path / "named", "server.example.org")
    with serving(keys) as address:
        (unknown,) = superlink(address, stranger / "ca.crt")
    with serving(misnamed) as address:
        (other,) = superlink(address, keys / "ca.crt")

    assert (unknown.level, other.level) == ("error", "error")
    assert "certificate is refused" in unknown.found
    assert "127.0.0.1" in other.found


def test_tls_and_no_tls_that_meet_are_distinguished(keys: Path) -> None:
    with serving(None) as address:
        insecure, _ = superlink(address, None)
        (asked_by_tls,) = superlink(address, keys / "ca.crt")
    with serving(keys) as address:
        (asked_without,) = superlink(address, None)

    assert (insecure.level, asked_by_tls.level, asked_without.level) == ("warning", "error", "error")
    assert "--ssl-certfile" in asked_by_tls.fix
    assert "--root-certificates" in asked_without.fix


def test_a_superlink_that_refuses_or_is_unknown_or_silent_is_an_error_in_time(keys: Path) -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never says a word
        address = Address("127.0.0.1", silent.getsockname()[1])
        (mute,) = superlink(address, keys / "ca.crt", 0.3)
    (gone,) = superlink(address, keys / "ca.crt", 0.3)
    (unknown,) = superlink(Address("no-such-host.invalid", 9092), keys / "ca.crt", 0.3)
    (absent,) = superlink(address, keys / "absent.crt", 0.3)

    assert [finding.level for finding in (mute, gone, unknown, absent)] == ["error"] * 4
    assert all(finding.fix for finding in (mute, gone, unknown, absent))
    assert "start flower-superlink" in gone.fix
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("ahead", "level"), [(0, "ok"), (1, "ok"), (3, "warning"), (6, "error"), (-3, "warning"), (-400, "error")]
)
def test_clocks_are_judged_as_flower_judges_a_node_s_signature(ahead: float, level: str) -> None:
    assert clocks(ahead).level == level


def test_a_port_is_free_or_a_superlink_s_or_another_program_s(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (taken,) = port_free(Address("127.0.0.1", port), keys / "ca.crt", 0.3)
    (free,) = port_free(Address("127.0.0.1", port), keys / "ca.crt", 0.3)
    with serving(keys) as address:
        (running,) = port_free(address, keys / "ca.crt")
        (unknown,) = port_free(address, None)

    assert (unknown.level, "--certificates" in unknown.fix) == ("warning", True)
    assert (taken.level, free.level, running.level) == ("error", "ok", "ok")
    assert "already" in running.found
    assert "ss -ltnp" in taken.fix


@pytest.mark.parametrize(
    "text", ["server", "https://server:9092", "server:port", "server:0", ":9092", "server:70000", "server:²"]
)
def test_an_address_that_is_invalid_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="must be HOST:PORT"):
        Address.of(text)


def test_an_address_may_be_of_version_6() -> None:
    assert Address.of("[::1]:9092") == Address("::1", 9092)
