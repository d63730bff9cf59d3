"""The guardian: what it ends, what it leaves alone, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from server_app.launch import guard

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A child that leaves its parent's session and is left by its parent, as the servers of Ray are.
ORPHAN = textwrap.dedent(
    """
    import os, sys, time
    if os.fork():
        os._exit(0)
    os.setsid()
    print(os.getpid(), flush=True)
    os.close(1)
    time.sleep(60)
    """
)

# A process that guards an orphan, and says where.
OWNER = textwrap.dedent(
    """
    import os, subprocess, sys, time
    from server_app.launch import guard
    with guard.guarded() as (folder, token):
        command = [sys.executable, "-c", sys.argv[1]]
        orphan = subprocess.run(command, env={**os.environ, guard.TOKEN_KEY: token}, stdout=subprocess.PIPE).stdout
        print(folder, int(orphan), flush=True)
        time.sleep(60)
    """
)


def carrying(token: str) -> dict[str, str]:
    return {**os.environ, guard.TOKEN_KEY: token}


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def start_orphan(token: str) -> int:
    command = [sys.executable, "-c", ORPHAN]
    return int(subprocess.run(command, env=carrying(token), stdout=subprocess.PIPE, check=True).stdout)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of somebody else's run."""
    with subprocess.Popen(SLEEP, env=carrying("another")) as process:
        yield process
        process.kill()


@pytest.fixture
def guardians(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The guardians that get started, in their order."""
    found: list[subprocess.Popen[bytes]] = []
    start = guard._start_guardian

    def record(token: str, folder: Path) -> subprocess.Popen[bytes]:
        found.append(start(token, folder))
        return found[-1]

    monkeypatch.setattr(guard, "_start_guardian", record)
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_guarded_when_block_ends_removes_folder_and_orphans(stranger: subprocess.Popen[bytes], fails: bool) -> None:
    with pytest.raises(ValueError, match="inside") if fails else nullcontext(), guard.guarded() as (folder, token):
        (folder / "file").write_text("x")
        orphan = start_orphan(token)
        assert is_alive(orphan)
        if fails:
            raise ValueError("inside")
    assert not is_alive(orphan)
    assert not folder.exists()
    assert stranger.poll() is None


def test_guarded_when_it_ends_guarded_processes_lets_their_guardians_clean_up() -> None:
    with guard.guarded() as (_, token):
        command = [sys.executable, "-c", OWNER, ORPHAN]
        inner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=carrying(token))
        folder, orphan = inner.stdout.readline().split()  # type: ignore[union-attr]
    inner.communicate()
    assert within(5, lambda: not is_alive(int(orphan)) and not Path(folder).exists())


def test_guarded_when_owners_group_is_killed_cleans_up(stranger: subprocess.Popen[bytes]) -> None:
    command = [sys.executable, "-c", OWNER, ORPHAN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        folder, orphan = owner.stdout.readline().split()
        assert is_alive(int(orphan))
        os.killpg(owner.pid, signal.SIGKILL)
    assert within(10, lambda: not is_alive(int(orphan)))
    assert within(10, lambda: not Path(folder).exists())
    assert stranger.poll() is None


def test_guarded_when_the_guardian_is_killed_owner_cleans_up(guardians: list[subprocess.Popen[bytes]]) -> None:
    with guard.guarded() as (folder, token):
        orphan = start_orphan(token)
        guardians[0].kill()
    assert not is_alive(orphan)
    assert not folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the signals that a process ignores from /proc")
def test_guarded_when_terminated_guardian_stays_until_the_owner_ends(guardians: list[subprocess.Popen[bytes]]) -> None:
    def ignores(number: int) -> bool:
        status = Path(f"/proc/{guardians[0].pid}/status").read_text()
        mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
        return bool(int(mask, 16) >> (number - 1) & 1)

    with guard.guarded() as (folder, _):
        assert os.getsid(guardians[0].pid) != os.getsid(0)
        assert within(10, lambda: all(map(ignores, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))))
        guardians[0].send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert guardians[0].poll() is None
    assert guardians[0].returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize(("block", "expected"), [(b"\0\0\0", True), (b"ray::IDLE\0", True), (b"HOME=/root\0", False)])
def test_members_when_title_overwrote_the_token_goes_by_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bytes, expected: bool
) -> None:
    with subprocess.Popen(SLEEP, cwd=tmp_path) as inside, subprocess.Popen(SLEEP, cwd="/") as outside:
        try:
            pids = {inside.pid, outside.pid}
            monkeypatch.setattr(guard, "_environment", lambda process: block if process.pid in pids else b"A=\0")
            found = [process.pid for process in guard.members("mine", tmp_path)]
            assert found == ([inside.pid] if expected else [])
        finally:
            inside.kill()
            outside.kill()


def test_clean_up_when_a_process_keeps_forking_ends_them_all(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    script = f"import subprocess\nfor _ in range(20): subprocess.Popen({SLEEP!r}, start_new_session=True)\n"
    with subprocess.Popen([sys.executable, "-c", script], env=carrying("forking")) as parent:
        assert within(10, lambda: len(guard.members("forking", folder)) > 3)
        guard.clean_up("forking", folder)
        parent.wait(5)
    assert guard.members("forking", folder) == []
    assert not folder.exists()
