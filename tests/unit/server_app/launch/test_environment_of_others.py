"""What the caller's environment holds for other programs, proxies and a Ray cluster say, and what libraries report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.core.errors import causing_error, with_remedy

# What a process of the app does first, and then the HTTP client of Flower.
CLIENT = """
import server_app, httpx
for url in {urls}:
    print(httpx.Client()._transport_for_url(httpx.URL(url))._pool.__class__)
"""


def started(code: str, **given: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", code], env={**kept, **given}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "given",
    [
        {"ALL_PROXY": "socks4://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "::1/128"},
        {"all_proxy": "socks5://user:secret@127.0.0.1:9", "http_proxy": "127.0.0.1:9", "NO_PROXY": "fe80::/10,a.org"},
        {"HTTPS_PROXY": "junk://a", "HTTP_PROXY": "http://[::1"},
    ],
    ids=str,
)
def test_no_proxy_stands_between_the_processes_of_this_machine(given: dict[str, str]) -> None:
    done = started(CLIENT.format(urls=["http://127.0.0.1:1/", "http://localhost:1/", "http://[::1]:1/"]), **given)

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert "Proxy" not in done.stdout
    assert "secret" not in done.stderr


def test_a_proxy_for_other_machines_stays_and_one_that_flower_cannot_use_is_named() -> None:
    assert "Proxy" in started(CLIENT.format(urls=["http://example.org/"]), HTTP_PROXY="http://127.0.0.1:9").stdout
    assert "ALL_PROXY" in started("import server_app", ALL_PROXY="socks4://127.0.0.1:9").stderr


@pytest.mark.parametrize("given", ["error", "error::DeprecationWarning,ignore"])
def test_a_library_s_warning_does_not_end_the_command(given: str) -> None:
    done = started("from server_app.__main__ import main; main()", PYTHONWARNINGS=given)

    assert "Traceback" not in done.stderr
    assert "one-shot" in (done.stdout + done.stderr).lower()


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "nvidia-smi"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", "memory"),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "memory"),
        ("OSError: [Errno 28] No space left on device", "ONESHOT_RUNS"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'", "shm-size"),
        ("OSError: [Errno 98] Address already in use", "another port"),
        ("PermissionError: [Errno 13] Permission denied: '/runs'", "may write"),
        ("ActorDiedError: The actor died unexpectedly before finishing this task.", "fewer clients"),
        ("Exit Code: 606", "one version of Flower"),
    ],
)
def test_known_errors_of_libraries_say_what_to_do_once(text: str, remedy: str) -> None:
    line = with_remedy(text)

    assert line.startswith(text.rstrip("."))
    assert remedy in line.removeprefix(text.rstrip("."))
    assert with_remedy(line) == line


@pytest.mark.parametrize("text", ["KeyError: 'lr'", "StoreError: /dev/shm/runs/1: no run folder"])
def test_an_unknown_error_stays_as_it_is(text: str) -> None:
    assert with_remedy(text) == text


def test_the_cause_in_a_log_is_the_error_from_which_the_others_follow() -> None:
    log = [
        "INFO : no error here", "Traceback (most recent call last):", '  File "a.py", line 1, in f',
        "ValueError: num_cpus must not be provided", "", "Traceback (most recent call last):",
        "RuntimeError: An error was encountered. Ending simulation.",
    ]  # fmt: skip

    assert causing_error(log) == "ValueError: num_cpus must not be provided"
    assert causing_error(["all went well"]) == ""


def test_a_command_in_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    kept = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m server_app methods"
    done = subprocess.run(["/bin/sh", "-c", command], env=kept, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: the current folder cannot be read (No such file or directory)"
    )
