"""The environment of the processes of one simulated run."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from server_app.launch.guard import TOKEN_KEY
from strategies.core import offline

REFUSALS = "refused.log"  # in the run's folder: connections that were refused because the run is off the network
_PATHS = ("ONESHOT_DATA", "ONESHOT_CLIENT_STATE")  # the caller's, who does not know the working directory of the run
# Ray's own word for: no other machine joins. Without it Ray listens on every interface, with it on 127.0.0.1 alone.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def run_environment(folder: Path, token: str) -> dict[str, str]:
    """Return the environment of every process of a run, made from ours.

    Args:
        folder: The run's folder.
        token: What tells the run's processes; see :func:`server_app.launch.guard.guarded`.
    """
    given = os.environ
    return {
        # Seconds between two looks of Flower for a run to start; its default is 1.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        # Ray would start a worker per CPU at once, none of which can serve Flower's actors (other environment).
        "RAY_prestart_worker_first_driver": "0",
        # Lines of different clients are alike to Ray, which would leave most of them out.
        "RAY_DEDUP_LOGS": "0",
        # glibc keeps large blocks in the arena of the main thread only; the stages run in other threads.
        "MALLOC_ARENA_MAX": "1",
        **given,
        **{key: str(Path(given[key]).expanduser().absolute()) for key in _PATHS if given.get(key)},
        "FLWR_HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        **offline.QUIET,
        **({} if given.get("RAY_ADDRESS") else _ALONE),
        "PYTHONUNBUFFERED": "1",  # the log arrives as it is written
        "PYTHONWARNINGS": ",".join(filter(None, [given.get("PYTHONWARNINGS"), "ignore:Tip:FutureWarning"])),
        **{key: ",".join(filter(None, [given.get(key), "127.0.0.1,localhost"])) for key in ("NO_PROXY", "no_proxy")},
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), given.get("PATH", os.defpath)]),
        **offline.environment(given),
        offline.LOG_VARIABLE: str(folder / REFUSALS),
        TOKEN_KEY: token,
    }
