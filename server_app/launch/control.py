"""How a SuperLink of this machine is given a run and tells of it: Flower's control API, or Flower's own commands.

The API's Python client is not public. Where a version of Flower lacks it, processes of ``flwr`` do the same, which take
half a CPU second for each question.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from server_app.settings.text import toml_table
from strategies.core import offline
from strategies.core.errors import ComputeError
from strategies.core.options import Scalar
from strategies.run import is_run_folder

_COMMAND_S = 120.0  # time limit of one call of `flwr`
_CONNECTION = "oneshot"  # the name of our SuperLink in Flower's config.toml
_SHIPPED = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}  # the files that Flower packs into an app


@dataclass(frozen=True)
class Status:
    """What a SuperLink says of a run.

    Attributes:
        name: For example "running", "finished:completed" or "finished:failed".
        details: Why, in one line; often empty.
    """

    name: str
    details: str


class Control(Protocol):
    """Gives a SuperLink a run, and asks for it."""

    def start(self, app: Path, settings: Mapping[str, Scalar], simulation: Mapping[str, float]) -> str:
        """Submit an app, and return the run's id.

        Raises:
            ComputeError: Flower refuses the app or a setting.
        """

    def lines(self, run: str) -> Iterator[str]:
        """Yield the run's log in lines, until it ends or the SuperLink is gone."""

    def status(self, run: str) -> Status:
        """Return how the run stands.

        Raises:
            ComputeError: The SuperLink does not answer.
        """


def connect(port: int, home: Path, start: Callable[..., subprocess.Popen[str]]) -> Control:
    """Return the control of the SuperLink on a port of this machine."""
    for key, value in offline.QUIET.items():
        os.environ.setdefault(key, value)  # read when Flower is imported
    try:
        return _Api(port)
    except ImportError:
        return _Commands(port, home, start)


class _Api:
    """Flower's control API."""

    def __init__(self, port: int) -> None:
        from flwr.supercore.control import ControlHttpClient

        # No interceptor: Flower's check of versions would end this process.
        self._client = ControlHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, [])

    def start(self, app: Path, settings: Mapping[str, Scalar], simulation: Mapping[str, float]) -> str:
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
            override_federation_config=simulation_config_from_json(
                {key.replace("-", "_"): value for key, value in simulation.items()}
            ),
        )
        with _translated("start the run"):
            answer = self._client.StartRun(request)
        if not answer.HasField("run_id"):
            raise ComputeError(
                f"Flower refused the app {app} of {len(content) / 2**20:.1f} MiB: must be at most 10 MiB"
            )
        return str(answer.run_id)

    def lines(self, run: str) -> Iterator[str]:
        import httpx
        from flwr.proto.control_pb2 import StreamLogsRequest

        rest = ""
        with contextlib.suppress(httpx.HTTPError):  # the SuperLink is gone, which the caller sees
            for answer in self._client.StreamLogs(StreamLogsRequest(run_id=int(run), after_timestamp=0.0)):
                *whole, rest = (rest + answer.log_output).split("\n")
                yield from whole
        if rest:
            yield rest

    def status(self, run: str) -> Status:
        from flwr.proto.control_pb2 import ListRunsRequest

        with _translated("tell of the run"):
            found = self._client.ListRuns(ListRunsRequest(run_id=int(run))).run_dict[int(run)].status
        name = ":".join(part for part in (found.status, found.sub_status) if part)
        return Status(name, " ".join(found.details.split()))


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


class _Commands:
    """Flower's commands, each a process of the run."""

    def __init__(self, port: int, home: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
        self._home, self._start = home, start
        config = f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\naddress = "127.0.0.1:{port}"\n'
        (home / "config.toml").write_text(f"{config}insecure = true\n", encoding="utf-8")

    def start(self, app: Path, settings: Mapping[str, Scalar], simulation: Mapping[str, float]) -> str:
        copy = self._home / "app"
        for path in shipped_files(app):
            target = copy / path.relative_to(app)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        (self._home / "settings.toml").write_text(toml_table(settings), encoding="utf-8")
        federation = " ".join(f"{key}={value}" for key, value in simulation.items())
        config = ["--run-config", str(self._home / "settings.toml")] if settings else []
        answer = self._ask("run", str(copy), _CONNECTION, "--federation-config", federation, *config)
        return str(answer["run-id"])

    def lines(self, run: str) -> Iterator[str]:
        process = self._start("flwr", "log", run, _CONNECTION, "--stream", output=subprocess.PIPE)
        for line in process.stdout or ():
            yield line.rstrip("\n")

    def status(self, run: str) -> Status:
        found = self._ask("list", _CONNECTION, "--run-id", run)["runs"][0]
        return Status(str(found["status"]), " ".join(str(found.get("status-details", "")).split()))

    def _ask(self, *arguments: str) -> dict[str, Any]:
        """Call `flwr` and return its JSON answer; a refusal raises a ComputeError."""
        process = self._start("flwr", *arguments, "--format", "json", output=subprocess.PIPE)
        try:
            text, _ = process.communicate(timeout=_COMMAND_S)
            answer: dict[str, Any] = json.loads(text)
        except subprocess.TimeoutExpired as error:
            raise ComputeError(f"`flwr {arguments[0]}` gave no answer within {_COMMAND_S:g} s") from error
        except ValueError as error:
            last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
            raise ComputeError(f"`flwr {arguments[0]}` failed: {last}") from error
        if not answer.get("success"):
            lines = str(answer.get("error-message", text)).splitlines()
            reason = " ".join(line for line in lines if not line.startswith("Using SuperLink"))
            raise ComputeError(f"Flower refused `flwr {arguments[0]}`: {reason}")
        return answer


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
