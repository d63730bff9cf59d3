"""The process of a simulation: `python -P simulation.py FOLDER SUPERLINK_PID CORES`.

It starts Ray while the SuperLink starts and the settings are read, and the clients' processes while the run is
submitted. Then it takes the SuperLink's only run, as Flower's SuperExec does, and goes on as `flwr-simulation`.
It imports nothing of ours, because the run has the app's own copy.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Files in the run's folder.
PORT = "port"  # of the SuperLink, which writes it
CLIENTS = "clients.json"  # how many processes train clients, and the share of the machine that each has; of `launch`
_POLL_S = 0.02


def main(folder: Path, superlink: str, cores: int) -> None:
    """Take the SuperLink's run and carry it out; the process ends with it."""
    with _without_collections():
        import ray

        # A Ray of one run needs neither its dashboard, for which it would wait, nor its autoscaler.
        ray._private.services.start_api_server = lambda *_, **__: (None, None)
        ray._private.node.Node.start_monitor = lambda _: None  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as executor:
            imported = executor.submit(_import)
            # In this thread, because Ray's processes end with the one that starts them.
            ray.init(address="local", num_cpus=cores, include_dashboard=False, logging_level=logging.WARNING)
            raybackend = imported.result()
    pool = _start_clients(raybackend, **json.loads(_await(folder / CLIENTS)))
    raybackend.BasicActorPool = functools.partial(_reuse, pool)
    _take_run(f"127.0.0.1:{_await(folder / PORT)}", superlink)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Switch off the search for garbage: imports make many objects and none."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _import() -> Any:
    import torch  # noqa: F401  for the ServerApp
    from flwr.server.superlink.fleet.vce.backend import raybackend
    from flwr.simulation import app  # noqa: F401

    return raybackend


def _await(place: Path) -> str:
    """Return the text of a file once it is there."""
    while not place.exists():
        time.sleep(_POLL_S)
    return place.read_text(encoding="utf-8")


def _start_clients(raybackend: Any, processes: int, resources: Mapping[str, float]) -> Any:
    """Return Flower's pool of actors, which start now and import what clients need."""
    pool = raybackend.BasicActorPool(raybackend.ClientAppActor, dict(resources), {"on_actor_init_fn": _prepare_client})
    pool.add_actors_to_pool(min(pool.actors_capacity, processes))
    pool.actors_capacity = 0  # Flower adds that many to a new pool
    return pool


def _prepare_client() -> None:
    with _without_collections():
        import torch  # noqa: F401


def _reuse(pool: Any, *_: object, **__: object) -> Any:
    """Return the pool in place of a new one; its actors find the app, whose folder is known by now, as Flower's do."""
    paths = list(sys.path)
    _find_modules(pool, paths)
    for actor in pool.pool:
        actor.__ray_call__.remote(_find_modules, paths)
    return pool


def _find_modules(_: object, paths: list[str]) -> None:
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for child processes


def _take_run(address: str, superlink: str) -> None:
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.simulation.app import flwr_simulation
    from flwr.supercore.constant import TaskType
    from flwr.supercore.runtime import RuntimeHttpClient

    client, token = RuntimeHttpClient.from_server_address(address, True, None, []), ""
    while not token:
        time.sleep(_POLL_S)
        try:
            token = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SIMULATION])).token
        except httpx.ConnectError:  # the SuperLink does not listen yet
            continue
    client.close()
    command = str(Path(sysconfig.get_path("scripts"), "flwr-simulation"))
    sys.argv = [command, "--insecure", "--runtime-api-address", address, "--token", token, "--parent-pid", superlink]
    flwr_simulation()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
