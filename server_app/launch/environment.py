"""The environment of the processes of one simulated run."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from fl_app.project import FOLDER_VARIABLE, project_folder
from server_app.launch.guard import TOKEN_KEY
from strategies.core import offline

REFUSALS = "refused.log"  # in the run's folder: connections refused because the run is offline
_PATHS = (
    "ONESHOT_DATA",
    "ONESHOT_CLIENT_STATE",
)  # made absolute: the run has another working directory than the caller
# Ray's switch for a cluster of this machine alone: with it Ray listens on 127.0.0.1, without it on every interface.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def run_environment(folder: Path, token: str) -> dict[str, str]:
    """Return the environment of every process of a run, derived from this process's own.

    Args:
        folder: The run's folder.
        token: Marks the run's processes; see :func:`server_app.launch.guard.guarded`.
    """
    given = os.environ
    return {
        # Flower polls for a run to start at this interval, in seconds; its default is 1.
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        # Ray would prestart a worker per CPU, and none could serve Flower's actors, which have another environment.
        "RAY_prestart_worker_first_driver": "0",
        # Ray takes lines of different clients for duplicates, and would drop most of them.
        "RAY_DEDUP_LOGS": "0",
        # glibc reuses large blocks in the main thread's arena only; the stages run in other threads.
        "MALLOC_ARENA_MAX": "1",
        **given,
        **{key: str(Path(given[key]).expanduser().absolute()) for key in _PATHS if given.get(key)},
        FOLDER_VARIABLE: str(project_folder()),
        "FLWR_HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        **offline.QUIET,
        **({} if given.get("RAY_ADDRESS") else _ALONE),
        **offline.ray_token(given),
        "PYTHONUNBUFFERED": "1",  # log lines arrive at once
        "PYTHONWARNINGS": ",".join(filter(None, [given.get("PYTHONWARNINGS"), "ignore:Tip:FutureWarning"])),
        **{key: ",".join(filter(None, [given.get(key), "127.0.0.1,localhost"])) for key in ("NO_PROXY", "no_proxy")},
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), given.get("PATH", os.defpath)]),
        **offline.environment(given),
        offline.LOG_VARIABLE: str(folder / REFUSALS),
        TOKEN_KEY: token,
    }
