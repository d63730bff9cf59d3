"""How a SuperLink of this machine is given a run and tells of it: Flower's control API, whose client is not public."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from strategies.core import offline
from strategies.core.errors import ComputeError
from strategies.core.options import Scalar
from strategies.run import is_run_folder

_SHIPPED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}  # the files that Flower packs into an app


class Control:
    """Gives the SuperLink on a port of this machine a run, and asks for it."""

    def __init__(self, port: int) -> None:
        for key, value in offline.QUIET.items():
            os.environ.setdefault(key, value)  # read when Flower is imported
        from flwr.supercore.control import ControlHttpClient

        # No interceptor: Flower's check of versions would end this process.
        self._client = ControlHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, [])

    def start(self, app: Path, settings: Mapping[str, Scalar], num_supernodes: int) -> str:
        """Submit an app, and return the run's id.

        Raises:
            ComputeError: The folder is no app, or Flower refuses it or a setting.
        """
        if not (app / "pyproject.toml").is_file():
            raise ComputeError(f"{app} is not a Flower app: it has no pyproject.toml")
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab
        from flwr.supercore.utils import simulation_config_from_json

        files = {path.relative_to(app).as_posix(): path for path in shipped_files(app)}
        try:
            content, _ = build_fab_from_files(files)
        except (OSError, ValueError, KeyError) as error:
            raise ComputeError(f"Flower cannot pack {app}: {' '.join(str(error).split())}") from error
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
            override_config=user_config_to_proto(dict(settings)),
            override_federation_config=simulation_config_from_json({"num_supernodes": num_supernodes}),
        )
        with _translated("start the run"):
            answer = self._client.StartRun(request)
        if not answer.HasField("run_id"):
            raise ComputeError(
                f"Flower refused the app {app} of {len(content) / 2**20:.1f} MiB: must be at most 10 MiB"
            )
        return str(answer.run_id)

    def lines(self, run: str) -> Iterator[str]:
        """Yield the run's log in lines, until it ends or the SuperLink is gone."""
        import httpx
        from flwr.proto.control_pb2 import StreamLogsRequest

        rest = ""
        with contextlib.suppress(httpx.HTTPError):  # the SuperLink is gone, which the caller sees
            for answer in self._client.StreamLogs(StreamLogsRequest(run_id=int(run), after_timestamp=0.0)):
                *whole, rest = (rest + answer.log_output).split("\n")
                yield from whole
        if rest:
            yield rest

    def status(self, run: str) -> tuple[str, str]:
        """Return how the run stands, for example "running" or "finished:failed", and why in one line, often empty.

        Raises:
            ComputeError: The SuperLink does not answer.
        """
        from flwr.proto.control_pb2 import ListRunsRequest

        with _translated("tell of the run"):
            found = self._client.ListRuns(ListRunsRequest(run_id=int(run))).run_dict[int(run)].status
        return ":".join(filter(None, (found.status, found.sub_status))), " ".join(found.details.split())


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise errors of the API as ours."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        try:
            reason = str(error.response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            reason = f"its SuperLink answered {error.response.status_code}"
        raise ComputeError(f"Flower did not {what}: {' '.join(reason.split())}") from error
    except httpx.HTTPError as error:
        raise ComputeError(f"Flower did not {what}: its SuperLink gave no answer ({type(error).__name__})") from error


def shipped_files(folder: Path) -> Iterator[Path]:
    """Yield the files of an app that Flower packs, without those of run folders, environments and folders of others."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if not path.is_dir():
            if path.suffix in _SHIPPED or path.name in {"LICENSE", ".gitignore"}:
                yield path
        elif not path.name.startswith((".", "__pycache__")) and not _is_strange(path):
            yield from shipped_files(path)


def _is_strange(folder: Path) -> bool:
    """Return whether a folder is closed to us, an environment, or a run's, which changes while another run begins."""
    return not os.access(folder, os.R_OK | os.X_OK) or (folder / "pyvenv.cfg").exists() or is_run_folder(folder)
