"""A folder and processes that never outlive the process that asked for them, however that process ends.

A guardian, which is this file run as a script in its own session, waits on a pipe that no process writes to. The pipe
closes when its owner finishes or dies, by SIGKILL too. Then the guardian ends every process of the run and removes the
run's folder. A process belongs to the run if its environment holds the run's random token, or if it descends from such
a process. Children inherit the token through new sessions and process groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

TOKEN_KEY = "ONESHOT_GUARD"  # noqa: S105  the name of the variable, no secret
PATIENCE_S = 15.0
# Ray's sockets have the longest paths below the folder; the system limits the length of a socket's path.
_LONGEST_SOCKET = len("/oneshot-abcdefgh/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
_LONGEST_ROOT = (107 if sys.platform == "linux" else 103) - _LONGEST_SOCKET


@contextlib.contextmanager
def guarded(awaited: Callable[[], bool] = lambda: True) -> Iterator[tuple[Path, str]]:
    """Provide a new folder and a token; when the block or this process ends, end the token's processes.

    The folder is removed then too.

    Args:
        awaited: Returns, at the block's end, whether it waits for that of the processes; else they end behind it.

    Yields:
        The folder, whose path is short enough for the sockets in it, and the token. Every guarded process must have
        the token in its environment as ``ONESHOT_GUARD``.

    Raises:
        OSError: The folder cannot be created, or the guardian cannot be started.
    """
    root = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="oneshot-", dir=root if len(root) <= _LONGEST_ROOT else "/tmp")).resolve()  # noqa: S108
    token = secrets.token_hex(16)
    guardian = _start_guardian(token, folder)
    try:
        yield folder, token
    finally:
        if guardian.stdin is not None and guardian.poll() is None and not awaited():
            guardian.stdin.close()
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                guardian.communicate(timeout=PATIENCE_S + 5.0)  # closes the pipe, then waits
            if guardian.returncode != 0:  # the guardian itself was killed
                clean_up(token, folder)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:  # noqa: ARG001  the form of a signal handler
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def clean_up(token: str, folder: Path) -> None:
    """End every process of a run with SIGKILL, then remove its folder; give up after ``PATIENCE_S`` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:  # two empty lists, because a process may start during the first
        found = members(token, folder)
        quiet = 0 if found else quiet + 1
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    while folder.exists() and time.monotonic() < deadline:  # an ending process may still write into it
        shutil.rmtree(folder, ignore_errors=True)


def members(token: str, folder: Path) -> list[Any]:
    """List the living processes of a run, as psutil's, except the caller and guardians, which end what is theirs."""
    alive = [process for process in psutil.process_iter(["ppid", "status"]) if process.info["status"] != "zombie"]
    family = {process.pid for process in alive if _carries(process, token, folder)}
    children: set[int] = set(family)
    while children:
        children = {process.pid for process in alive if process.info["ppid"] in children} - family
        family |= children
    family.discard(os.getpid())
    return [process for process in alive if process.pid in family and not _is_guardian(process)]


def main(token: str, folder: Path) -> None:
    """Wait until the owner closes standard input or dies, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    clean_up(token, folder)


def _start_guardian(token: str, folder: Path) -> subprocess.Popen[bytes]:
    # -P keeps the script's own folder, with its many short module names, off the path.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), token, str(folder)]
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_KEY}
    return subprocess.Popen(  # noqa: S603  our own file
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd="/",
        start_new_session=True,
    )


def _is_guardian(process: Any) -> bool:
    try:
        return str(Path(__file__).resolve()) in process.cmdline()[:3]
    except (psutil.Error, OSError):
        return False


def _carries(process: Any, token: str, folder: Path) -> bool:
    try:
        environment = _environment(process)
        if f"{TOKEN_KEY}={token}".encode() in environment:
            return True
        # A process that changes its title, as Ray's do, overwrites its first variables and perhaps the token. Its
        # working directory identifies it. A process with an intact environment and no token is not of this run.
        retitled = b"=" not in environment.split(b"\0", 1)[0]
        return retitled and Path(process.cwd()).is_relative_to(folder)
    except (psutil.Error, OSError):  # it has ended, or belongs to another user
        return False


def _environment(process: Any) -> bytes:
    if sys.platform == "linux":  # psutil stops reading at the gap that a changed title leaves
        return Path(f"/proc/{process.pid}/environ").read_bytes()
    return "\0".join(f"{key}={value}" for key, value in process.environ().items()).encode()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
