"""The offline guard, in processes of its own: an audit hook stays."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from strategies.core import offline
from strategies.core.errors import OfflineError, OneShotError, OptionError

ROOT = Path(__file__).resolve().parents[4]
# What the programs below begin with; the error of a socket without a peer shows which guard stopped it.
PRELUDE = """
import socket, sys, threading, urllib.error, urllib.request
sys.path.insert(0, {root!r})
from strategies.core import offline
from strategies.core.errors import OfflineError
sys.argv = {argv!r}
offline.enforce()

def ends(call):
    try:
        call()
        return "reached"
    except OfflineError:
        return "refused"
    except OSError:
        return "tried"

def connects(host, port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as made:  # no packet is sent
        return ends(lambda: made.connect((host, port)))
"""


def run_guarded(code: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    program = PRELUDE.format(root=str(ROOT), argv=list(argv) or ["program"]) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, offline.VARIABLE: "1", "RAY_ADDRESS": "", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def said_guarded(code: str, *argv: str, **environ: str) -> list[str]:
    done = run_guarded(code, *argv, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_guard_lets_pass_this_machine_and_refuses_others() -> None:
    code = """
        unix, other = socket.socketpair()
        print(connects("127.0.0.1", 9), connects("127.8.8.8", 9), connects("0.0.0.0", 9), ends(lambda: unix.send(b"")))
        print(connects("192.0.2.1", 9), connects("8.8.8.8", 53), connects("255.255.255.255", 9))
        v6 = socket.AF_INET6
        print(connects("::ffff:127.0.0.1", 9, v6) != "refused", connects("::ffff:192.0.2.1", 9, v6))
        print(connects("2001:db8::1", 9, v6))
    """

    words = said_guarded(code)

    assert words == [*["reached"] * 4, *["refused"] * 3, "True", "refused", "refused"]


def test_guard_refuses_datagrams_and_lookups() -> None:
    code = """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            print(ends(lambda: made.sendto(b"x", ("192.0.2.1", 9))))
            print(ends(lambda: made.sendmsg([b"x"], [], 0, ("192.0.2.1", 9))))
        print(ends(lambda: socket.getaddrinfo("example.org", 80)), ends(lambda: socket.gethostbyname("example.org")))
        print(ends(lambda: socket.gethostbyaddr("192.0.2.1")), ends(lambda: socket.getnameinfo(("192.0.2.1", 80), 0)))
        print(ends(lambda: socket.getaddrinfo("localhost", 80)), ends(lambda: socket.getaddrinfo("192.0.2.1", 80)))
        print(ends(lambda: socket.getaddrinfo(None, 80)))
    """

    assert said_guarded(code) == [*["refused"] * 6, *["reached"] * 3]


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["program"], {offline.ALLOW_VARIABLE: "198.51.100.7 , 192.0.2.1:9092, [2001:db8::1]:9092"}),
        (["program"], {"RAY_ADDRESS": "192.0.2.1:6379"}),
        (["program"], {"RAY_ADDRESS": "ray://192.0.2.1:10001"}),
        (["/bin/flower-supernode", "--insecure", "--superlink", "192.0.2.1:9092"], {}),
        (["/bin/flwr-clientapp", "--runtime-api-address=192.0.2.1:9092"], {}),
    ],
)
def test_guard_passes_configured_addresses(argv: list[str], environ: dict[str, str]) -> None:
    code = """
        print(connects("192.0.2.1", 9092), connects("192.0.2.2", 9092))
    """

    assert said_guarded(code, *argv, **environ)[1] == "refused"
    assert said_guarded(code, *argv, **environ)[0] != "refused"


def test_guard_heeds_ports_where_they_are_named_and_flower_s_arguments_of_flower_alone() -> None:
    allowed = {offline.ALLOW_VARIABLE: "192.0.2.1:9092,192.0.2.2"}

    assert said_guarded("print(connects('192.0.2.1', 9093))", **allowed) == ["refused"]
    assert said_guarded("print(connects('192.0.2.2', 9093) != 'refused')", **allowed) == ["True"]
    assert said_guarded("print(connects('192.0.2.1', 1))", "other", "--superlink", "192.0.2.1:1") == ["refused"]


def test_guard_with_a_name_allows_the_addresses_of_the_name() -> None:
    # Names that this machine knows without asking anybody.
    code = """
        import socket as s
        real = s.getaddrinfo
        def known(host, *rest, **more):
            if host == "server.example":
                sys.audit("socket.getaddrinfo", host, None, 0, 0, 0)
                return [(s.AF_INET, s.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
            return real(host, *rest, **more)
        s.getaddrinfo = known
        print(ends(lambda: s.getaddrinfo("server.example", 1)))
        print(connects("192.0.2.1", 9092) != "refused", connects("192.0.2.1", 1), connects("192.0.2.2", 9092))
    """

    assert said_guarded(code, ONESHOT_OFFLINE_ALLOW="Server.Example.:9092") == ["reached", "True", "refused", "refused"]


def test_guard_says_each_refusal_once_also_where_the_error_is_swallowed(tmp_path: Path) -> None:
    code = """
        def ask():
            try:
                urllib.request.urlopen("http://192.0.2.1/", timeout=1)
            except urllib.error.URLError as error:
                pass
        for thread in [threading.Thread(target=ask) for _ in range(4)]:
            thread.start()
            thread.join()
    """
    log = tmp_path / "refused.log"

    done = run_guarded(code, ONESHOT_OFFLINE_LOG=str(log), http_proxy="")

    (line,) = done.stderr.splitlines()
    assert line.startswith("offline: a connection to 192.0.2.1:80 is refused in program: must be this machine")
    assert offline.refusals(log) == [line]
    assert log.stat().st_mode & 0o077 == 0
    assert offline.refusals(tmp_path / "none") == []


def test_guard_with_an_address_that_is_invalid_is_in_place_and_says_so() -> None:
    done = run_guarded("", ONESHOT_OFFLINE_ALLOW="server:port")

    assert done.returncode == 1
    assert "OptionError: ONESHOT_OFFLINE_ALLOW names 'server:port': must be host or host:port" in done.stderr


def test_guard_when_two_copies_ask_is_one_and_raises_the_error_of_the_last() -> None:
    code = """
        import importlib
        before = offline._guard()
        for name in [name for name in sys.modules if name.startswith("strategies")]:
            del sys.modules[name]
        again = importlib.import_module("strategies.core.offline")
        again.enforce()
        print(again._guard() is before)
        try:
            socket.create_connection(("192.0.2.1", 9))
        except again.OfflineError as error:
            print(isinstance(error, OSError))
    """

    assert said_guarded(code) == ["True", "True"]


def test_enforce_without_the_variable_does_nothing() -> None:
    for value in ("", "0", "false", "No", "off"):
        assert said_guarded(
            "print(offline._guard(), connects('192.0.2.1', 9) != 'refused')", ONESHOT_OFFLINE=value
        ) == [
            "None",
            "True",
        ]


def start_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, offline.VARIABLE: "1", "RAY_ADDRESS": "", **environ}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**given, **offline.environment(given)}, capture_output=True, text=True, check=False
    )


def test_startup_guards_a_process_that_knows_nothing_of_it() -> None:
    code = "import sys, socket; print([n for n in sys.modules if 'oneshot' in n or n == 'strategies'])\n"

    done = start_python(code + "socket.create_connection(('192.0.2.1', 9))")

    assert done.stdout.strip() == "[]"
    assert done.stderr.splitlines()[-1].startswith("_oneshot_startup.errors.OfflineError: offline: a connection to")


def test_startup_runs_the_sitecustomize_that_it_stands_before(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.theirs = True\n")

    done = start_python(
        "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)", PYTHONPATH=str(tmp_path)
    )

    assert done.stdout.split() == ["True", str(tmp_path / "sitecustomize.py")]


def test_startup_with_an_address_that_is_invalid_starts_nothing() -> None:
    done = start_python("print('here')", ONESHOT_OFFLINE_ALLOW="server:0")

    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("SystemExit: error: ONESHOT_OFFLINE_ALLOW names 'server:0'")


def test_environment_switches_off_telemetry_and_every_proxy() -> None:
    given = {offline.VARIABLE: "yes", "PYTHONPATH": f"here{os.pathsep}{offline.STARTUP}", "HTTPS_PROXY": "http://a:1"}

    made = offline.environment(given)

    assert made.items() >= {**offline.QUIET, offline.VARIABLE: "1", "HTTPS_PROXY": "", "UV_OFFLINE": "1"}.items()
    assert made["PYTHONPATH"].split(os.pathsep) == [str(offline.STARTUP), "here"]
    assert offline.environment({}) == {}
    assert (offline.STARTUP / "sitecustomize.py").is_file()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a", [("a", None)]),
        ("A.b.:80", [("a.b", 80)]),
        ("192.0.2.1:80, ::1", [("192.0.2.1", 80), ("::1", None)]),
        ("[2001:DB8::0]:80", [("2001:db8::", 80)]),
        ("::ffff:192.0.2.1", [("192.0.2.1", None)]),
        (" , ", []),
    ],
)
def test_addresses_are_read_as_they_are_compared(text: str, wanted: list[offline.Address]) -> None:
    assert offline.addresses(text, "here") == wanted


@pytest.mark.parametrize("text", ["a:b", "a:0", "a:65536", "a:-1", "a:"])
def test_addresses_with_a_port_that_is_invalid_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="here names .*: must be host or host:port, with a port from 1 to 65535"):
        offline.addresses(text, "here")


def test_offline_error_is_a_failed_connection_with_one_line() -> None:
    error = OfflineError("two\nlines")

    assert isinstance(error, OSError)
    assert isinstance(error, OneShotError)
    assert str(error) == "two lines"


def test_for_cluster_gives_actors_elsewhere_only_variables_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offline.VARIABLE, "1")
    monkeypatch.delenv(offline.ALLOW_VARIABLE, raising=False)
    assert offline.for_cluster() == {offline.VARIABLE: "1"}
    monkeypatch.setenv(offline.VARIABLE, "0")
    assert offline.for_cluster() == {}
