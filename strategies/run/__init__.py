"""A run on disk and in progress: its folder, uploads, checkpoints, journal and server stage."""

import os
import tomllib
from pathlib import Path

from ..core.errors import StoreError

RUNS_VARIABLE = "ONESHOT_RUNS"  # the environment variable that names the folder of the runs
OWN_APP = "oneshot-fl"  # the name of this library's own Flower app
FACTS_FILE = "run.json"  # written first; the file that makes a folder a run folder
RESULT_FILE = "result.json"  # written last
CARD_FILE = "model_card.md"


def runs_folder(chosen: str = "") -> Path:
    """Return the folder of a command's runs: ``chosen``, else $ONESHOT_RUNS, else ``runs`` here; absolute.

    In the folder of another Flower app it is that of a ServerApp's runs, see :func:`app_runs_folder`.
    """
    return app_runs_folder(chosen) if _is_in_other_app() else _folder(chosen, "runs")


def app_runs_folder(chosen: str = "") -> Path:
    """Return the folder of a ServerApp's runs: ``chosen``, else $ONESHOT_RUNS, else one in the user's state; absolute.

    A ServerApp often works in its project's own folder, and Flower's next build would send a run there to every client.
    """
    return _folder(chosen, os.environ.get("XDG_STATE_HOME", "") or "~/.local/state", "oneshot-fl", "runs")


def _folder(chosen: str, *default: str) -> Path:
    from ..core.places import expand_user  # late: every method reads this module

    return expand_user(chosen or os.environ.get(RUNS_VARIABLE, "") or os.path.join(*default)).absolute()  # noqa: PTH118


def _is_in_other_app() -> bool:
    """Return whether this process works in the folder of a Flower app that is not the one of this library."""
    here = Path.cwd()
    file = next((each for folder in (here, *here.parents) if (each := folder / "pyproject.toml").is_file()), None)
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")) if file is not None else {}
        return bool(found["tool"]["flwr"]["app"]) and found.get("project", {}).get("name") != OWN_APP
    except (OSError, ValueError, KeyError, TypeError):  # no Flower app, or a file that Flower cannot read either
        return False


def is_run_folder(path: Path) -> bool:
    """Return whether a folder holds a run, finished or not; one that is closed to this user holds none."""
    return os.path.isfile(path / FACTS_FILE)  # noqa: PTH113  pathlib's raises an error for a closed folder


def check_run_folder(path: Path) -> None:
    """Refuse a folder that is no run folder.

    Raises:
        StoreError: It has no ``run.json``, or is closed to this user.
    """
    if not is_run_folder(path):
        closed = os.path.isdir(path) and not os.access(path, os.X_OK)  # noqa: PTH112  as above
        raise StoreError(f"{path}: {'closed to this user' if closed else f'no run folder (it has no {FACTS_FILE})'}")
