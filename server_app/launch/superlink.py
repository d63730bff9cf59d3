"""The processes of `oneshot run`: starts Flower's simulation runtime, follows it to its true end, and ends it.

`flwr run .` has four gaps. Its SuperLink never ends. It returns 0 when the run fails. It waits for missed heartbeats
when the simulation is killed. It uses the folder and the environment of the process that started the SuperLink first.

Here everything belongs to one run: a SuperLink on a free port, and Flower's home and a neutral working directory in one
temporary folder. :mod:`server_app.launch.guard` guards all of it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import queue
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl_app.environment import RUN_VARIABLE
from fl_app.node_config import SUPERNODES_VARIABLE
from fl_app.project import FOLDER_VARIABLE, project_folder
from server_app.launch.console import ACTOR, ANSI
from server_app.launch.control import Control
from server_app.launch.guard import TOKEN_KEY, guarded, sigterm_as_interrupt
from server_app.launch.simulation import CLIENTS, PORT
from server_app.settings.commit import COMMIT_VARIABLE
from strategies.core import offline
from strategies.core.durable import atomic_write
from strategies.core.errors import ComputeError, causing_error, with_remedy
from strategies.core.options import Scalar
from strategies.core.places import expand_user
from strategies.core.processor import all_cores

_PATHS = ("ONESHOT_DATA", "ONESHOT_CLIENT_STATE")  # made absolute: the run has another working directory
# Ray's switch for a cluster of this machine alone: with it Ray listens on 127.0.0.1, without it on every interface.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
CLUSTER = "RAY_ADDRESS"
_PARTS = 10_000  # of a GPU, in which Ray counts


def run_environment(folder: Path, token: str) -> dict[str, str]:
    """Return the environment of every process of a run, derived from this process's own."""
    given = dict(os.environ)
    if folders := [str(Path(path).absolute()) for path in given.get("PYTHONPATH", "").split(os.pathsep) if path]:
        given["PYTHONPATH"] = os.pathsep.join(folders)
    # Flower would join the cluster with arguments that a cluster refuses; its nodes lack the app and this folder.
    given.pop(CLUSTER, None)
    return {
        # Ray would prestart a worker per core, however few train clients.
        "RAY_prestart_worker_first_driver": "0",
        # Ray takes lines of different clients for duplicates, and would drop most of them.
        "RAY_DEDUP_LOGS": "0",
        # glibc reuses large blocks in the main thread's arena only; the stages run in other threads.
        "MALLOC_ARENA_MAX": "1",
        **given,
        **{key: str(expand_user(given[key]).absolute()) for key in _PATHS if given.get(key)},
        FOLDER_VARIABLE: str(project_folder()),
        "FLWR_HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # as Flower sets it, for Ray is imported before: workers run as they are
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a client without a share of a GPU sees none
        **offline.QUIET,
        **_ALONE,
        **offline.ray_token(given),
        "PYTHONUNBUFFERED": "1",  # log lines arrive at once
        "PYTHONIOENCODING": "utf-8",  # as they are read
        "PYTHONWARNINGS": ",".join(filter(None, [given.get("PYTHONWARNINGS"), "ignore:Tip:FutureWarning"])),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), given.get("PATH", os.defpath)]),
        **offline.environment(given),
        TOKEN_KEY: token,
        RUN_VARIABLE: str(folder / _RUN),
    }


def gpu_share(device: str, clients: int) -> float:
    """Return the share of a GPU of each simulated client: none with ``"auto"``, for small clients are faster without.

    Ray gives shares of one GPU, so each gets a whole number of clients. Flower's clients keep theirs for the whole run,
    and about as much is left on each GPU for the server stage.

    Args:
        device: The setting ``client.device``.
        clients: Those that train at once, at least 1.
    """
    if not device.startswith("cuda"):
        return 0.0
    import torch

    gpus = torch.cuda.device_count()
    return (_PARTS // (math.ceil(clients / gpus) + 1) + 1) / _PARTS if gpus else 0.0


COMPLETED = "finished:completed"
# Imports make many objects and no garbage: without the search for it they take up to a fifth less time.
#
# Flower's own command on a free port, which it chooses after its imports and writes into a file.
_SUPERLINK = """
import gc, os, pathlib, socket, sys
from importlib.metadata import entry_points
gc.disable()
(command,) = entry_points(group="console_scripts", name="flower-superlink")
serve, place = command.load(), pathlib.Path(sys.argv[1])
gc.freeze()
gc.enable()
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = str(probe.getsockname()[1])
place.with_suffix(".new").write_text(port)
place.with_suffix(".new").rename(place)
sys.argv = ["flower-superlink", "--insecure", "--simulation", "--isolation", "process", "--host", "127.0.0.1"]
sys.argv += ["--port", port]
sys.exit(serve())
"""
_LAST = (SUPERNODES_VARIABLE, COMMIT_VARIABLE)  # known once the settings are
_LOG, _RUN = "superlink.log", "run.json"
_START_S = 60.0  # time limit of the SuperLink's first answer
_POLL_S = 0.1
_TAIL = 400  # lines of the log in which the reason of a failure is sought
_NO_DETAILS = "An error was encountered"
_SILENCE_S = 9.0  # after so long without a log line, one is printed
STARTING = "starting Flower and Ray: about 5 s on two idle cores"
_GRACE_S = 10.0  # wait for the last log lines after the simulation's process has ended; a busy machine is slow


@dataclass(frozen=True)
class Launched:
    """How a run ended.

    Attributes:
        exit_code: 0 only if Flower reports that the run completed.
        run_status: Flower's status, such as "finished:completed" or "finished:failed"; "not started" without a run;
            "killed" if its process ended without a status; "lost" if the SuperLink did.
        reason: Why it failed, in one line; empty for a run that completed.
    """

    exit_code: int
    run_status: str
    reason: str


def launch(
    app_dir: Path,
    *,
    settings: Mapping[str, Scalar],
    num_supernodes: int,
    echo: Callable[[str], None],
    is_finished: Callable[[], bool] = lambda: False,
    runtime: Runtime | None = None,
    at_once: int | None = None,
) -> Launched:
    """Run an app in Flower's simulation, wait for its end, and return it; all started processes have ended then.

    Where the result is there before Flower's end, it returns at once, and the guardian ends Flower.

    SIGINT and SIGTERM end the run at once; the files that the app has written stay, as after any other kill.

    Args:
        settings: Flat run config that overrides the app's defaults; the app must declare its keys.
        num_supernodes: Number of simulated clients, at least 1.
        echo: Called with each line of the log, without its newline and with its colours.
        is_finished: Returns whether the result is there, and no process works on it any more.
        runtime: Of :func:`prepare_runtime`; None: one of its own.
        at_once: Largest number of clients that work side by side, each in a process; None: a core each.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came; all processes have been ended.
    """
    stage = "not started"
    if os.environ.get(CLUSTER):
        echo(
            f"{CLUSTER} is set: a simulation has its own Ray all the same; --local --set compute=ray joins the cluster"
        )
    echo(STARTING)
    if at_once == 1 < min(all_cores(), num_supernodes):
        echo("one process trains the clients, one after another: they have few steps")
    with sigterm_as_interrupt():
        try:
            with prepare_runtime() if runtime is None else contextlib.closing(runtime) as own:
                # Each process has its own imports, of seconds.
                processes = max(1, min(all_cores(), num_supernodes, at_once or num_supernodes))
                own.request_clients(processes, gpu_share(str(settings.get("client.device", "auto")), processes))
                last = {name: os.environ[name] for name in _LAST if name in os.environ}
                (own.folder / _RUN).write_text(json.dumps(last), encoding="utf-8")
                control = Control(_await_superlink(own))
                run_id = control.start(app_dir, settings, num_supernodes)
                stage = "lost"
                tail = deque[str](maxlen=_TAIL)

                def show(line: str) -> None:
                    tail.append(ACTOR.sub("", ANSI.sub("", line)))
                    echo(line)

                own.ends_behind = _stream_log(control.lines(run_id), own.is_over, show, is_finished)
                if own.ends_behind:
                    return Launched(0, COMPLETED, "")
                return _verdict(control, run_id, own, tail)
        except (ComputeError, OSError) as error:
            return Launched(1, stage, with_remedy(str(error)))


@dataclass
class Runtime:
    """The processes of one run.

    Attributes:
        folder: Flower's home.
        close: Ends the runtime; may be called again.
        superlink: Flower's SuperLink, which serves or will.
        simulation: The process that takes the SuperLink's only run.
        ends_behind: Whether the guardian ends them after the runtime's end, which does not wait.
    """

    folder: Path
    close: Callable[[], None]
    superlink: subprocess.Popen[bytes] = field(init=False)
    simulation: subprocess.Popen[bytes] = field(init=False)
    ends_behind: bool = False

    def port(self) -> int:
        """Return the SuperLink's port; 0 before it has one."""
        place = self.folder / PORT
        return int(place.read_text()) if place.exists() else 0

    def request_clients(self, processes: int, gpus: float) -> None:
        """Tell the simulation to start the processes that train clients, each with a core and a share of a GPU."""
        asked = {"processes": processes, "resources": {"num_cpus": 1, "num_gpus": gpus}}
        atomic_write(self.folder / CLIENTS, json.dumps(asked).encode())

    def is_over(self) -> bool:
        """Return whether the simulation, or the SuperLink that it needs, has ended."""
        return self.simulation.poll() is not None or self.superlink.poll() is not None

    def log(self) -> list[str]:
        """Return the last lines that the processes wrote."""
        return (self.folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]

    def death(self, log: Sequence[str]) -> str:
        """Return why a process of the runtime has ended, in one line, by its status and these lines of a log.

        The simulation's process if it has ended, else the SuperLink.
        """
        ended = self.simulation.poll() is not None
        what = "the simulation's process" if ended else "Flower's SuperLink"
        status = (self.simulation if ended else self.superlink).wait()
        if cause := causing_error(log):
            return f"{what} ended: {cause}"
        if status == -signal.SIGKILL:
            return f"{what} was killed, by hand or for lack of memory"
        how = f"status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status) or 'unknown'})"
        return ": ".join(filter(None, (f"{what} ended with {how}", " | ".join(log[-3:]))))


@contextlib.contextmanager
def prepare_runtime() -> Iterator[Runtime]:
    """Provide the processes of a run; at the block's end all have ended.

    They take seconds to start, in which the caller can read and check its settings.
    """
    with contextlib.ExitStack() as stack:
        started = list[subprocess.Popen[bytes]]()
        stack.callback(_collect, started)
        folder, token = stack.enter_context(guarded(awaited=lambda: not runtime.ends_behind))
        runtime = Runtime(folder, stack.close)
        for name in ("cwd", "tmp"):
            (folder / name).mkdir()
        runtime.superlink = _start(folder, token, "-c", _SUPERLINK, str(folder / PORT))
        started.append(runtime.superlink)
        script = Path(__file__).with_name("simulation.py")
        runtime.simulation = _start(folder, token, script, folder, str(runtime.superlink.pid), str(all_cores()))
        started.append(runtime.simulation)
        yield runtime


def _start(folder: Path, token: str, *command: str | Path) -> subprocess.Popen[bytes]:
    with (folder / _LOG).open("a", encoding="utf-8") as output:
        return subprocess.Popen(  # noqa: S603  this interpreter, and Flower's own commands
            [sys.executable, "-P", *command],
            env=run_environment(folder, token),
            cwd=folder / "cwd",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches this process only
        )


def _collect(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Collect the exit statuses of processes that the guardian has ended."""
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)


def _await_superlink(runtime: Runtime) -> int:
    """Return the SuperLink's port once it answers."""
    deadline = time.monotonic() + _START_S
    while not ((port := runtime.port()) and _answers(port)):
        if runtime.simulation.poll() is not None:
            raise ComputeError(runtime.death(runtime.log()))
        if runtime.superlink.poll() is not None or time.monotonic() > deadline:
            log = runtime.log()
            tail = causing_error(log) or " | ".join(log[-3:])
            raise ComputeError(f"Flower's SuperLink did not start on 127.0.0.1:{port or ''}: {tail}")
        time.sleep(0.02)
    return port


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stream_log(
    lines_of_run: Iterator[str],
    is_over: Callable[[], bool],
    echo: Callable[[str], None],
    is_finished: Callable[[], bool],
) -> bool:
    """Echo the run's log until it ends, or until the simulation or the SuperLink has ended.

    If a line has come by then, the others have :data:`_GRACE_S` more to arrive.

    Returns:
        Whether the result was there before the log's end.
    """
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in lines_of_run:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    deadline, began, spoken, asked = float("inf"), time.monotonic(), time.monotonic(), time.monotonic()
    heard = False
    while (now := time.monotonic()) < deadline:
        if now - spoken >= _SILENCE_S:  # Flower and Ray print nothing while they start
            spoken = now
            echo(f"Flower is at work, {now - began:.0f} s elapsed")
        if now - asked >= _POLL_S and is_finished():
            while not lines.empty() and (line := lines.get()) is not None:  # the lines that are here
                echo(line)
            return True
        asked = now if now - asked >= _POLL_S else asked
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            if deadline == float("inf") and is_over():
                deadline = time.monotonic() + _GRACE_S * heard
            continue
        if line is None:
            return False
        heard, spoken = True, time.monotonic()
        echo(line)
    return False


def _verdict(control: Control, run_id: str, runtime: Runtime, tail: Iterable[str]) -> Launched:
    """Wait until Flower reports an end or the run's process has ended, and return how the run ended."""
    log = [*runtime.log(), *tail]
    cause = causing_error(log)
    while True:
        over = runtime.is_over()  # read first, because the process reports its status before it ends
        name, details = control.status(run_id)
        if name == COMPLETED:
            return Launched(0, COMPLETED, "")
        if name.startswith("finished"):
            known = cause and (not details or _NO_DETAILS in details)
            reason = f"in the simulation: {cause}" if known else details or "Flower gives no reason"
            return Launched(1, name, with_remedy(reason))
        if over:
            return Launched(1, "killed", with_remedy(runtime.death(log)))
        time.sleep(_POLL_S)
