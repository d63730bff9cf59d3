"""The environment of the processes of one simulated run, and the GPUs of its clients."""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from fl_app.project import FOLDER_VARIABLE, project_folder
from server_app.launch.guard import TOKEN_KEY
from strategies.core import offline
from strategies.core.places import expanded

REFUSALS = "refused.log"  # in the run's folder: connections refused because the run is offline
_PATHS = (
    "ONESHOT_DATA",
    "ONESHOT_CLIENT_STATE",
)  # made absolute: the run has another working directory than the caller
# Ray's switch for a cluster of this machine alone: with it Ray listens on 127.0.0.1, without it on every interface.
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_PARTS = 10_000  # of a GPU, in which Ray counts


def run_environment(folder: Path, token: str) -> dict[str, str]:
    """Return the environment of every process of a run, derived from this process's own.

    Args:
        folder: The run's folder.
        token: Marks the run's processes; see :func:`server_app.launch.guard.guarded`.
    """
    given = {**os.environ, **_absolute_python_path(os.environ)}
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
        **{key: str(expanded(given[key]).absolute()) for key in _PATHS if given.get(key)},
        FOLDER_VARIABLE: str(project_folder()),
        "FLWR_HOME": str(folder),
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a client without a share of a GPU sees none
        **offline.QUIET,
        **({} if given.get("RAY_ADDRESS") else _ALONE),
        **offline.ray_token(given),
        "PYTHONUNBUFFERED": "1",  # log lines arrive at once
        "PYTHONIOENCODING": "utf-8",  # as they are read
        "PYTHONWARNINGS": ",".join(filter(None, [given.get("PYTHONWARNINGS"), "ignore:Tip:FutureWarning"])),
        **{key: ",".join(filter(None, [given.get(key), "127.0.0.1,localhost"])) for key in ("NO_PROXY", "no_proxy")},
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), given.get("PATH", os.defpath)]),
        **offline.environment(given),
        offline.LOG_VARIABLE: str(folder / REFUSALS),
        TOKEN_KEY: token,
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


def _absolute_python_path(given: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH for processes that run in another folder; nothing if it is not set."""
    folders = [str(Path(path).absolute()) for path in given.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join(folders)} if folders else {}
