"""Starts Ray without disturbing this process or its neighbours; the caller passes Ray in."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core import offline
from ..core.errors import ComputeError
from .by_value import LIBRARY


class NoRoomError(ComputeError):
    """Ray is missing, does not start, or has no room: the job can still run in this process."""


def start_ray(ray: Any, cluster: str) -> None:
    """Join the cluster, or start a Ray that no other machine can reach.

    Args:
        ray: The module.
        cluster: The address of a running cluster; this library travels to it as a package. Empty: start a Ray.

    Raises:
        NoRoomError: Ray does not start, or the cluster does not answer.
    """
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _undisturbed():
            if cluster:
                offline.allow(cluster)
                _reach(cluster)
                code = Path(__file__).parents[LIBRARY.count(".") + 1]
                there = {"py_modules": [str(code)], "excludes": ["__pycache__"], "env_vars": offline.for_cluster()}
                ray.init(address=cluster, runtime_env=there, **quiet)
            else:
                with _loopback(ray):
                    # "local", or Ray joins any Ray that it finds on this machine. One CPU: it starts an idle worker
                    # for each, and the actor takes none.
                    ray.init(address="local", num_cpus=1, _node_ip_address="127.0.0.1", **quiet)
    except BaseException as error:
        # Ray reports a node that starts too late by a bare Exception; any subclass passes through.
        expected = (OSError, RuntimeError, ValueError, ray.exceptions.RayError)
        if not isinstance(error, expected) and type(error) is not Exception:
            raise
        state = f"at {cluster} does not answer" if cluster else "does not start"
        raise NoRoomError(f"Ray {state}: {error}") from error


def _reach(cluster: str) -> None:
    # Ray itself keeps trying for many minutes.
    host, _, port = cluster.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextmanager
def _undisturbed() -> Iterator[None]:
    # Ray replaces the SIGTERM handler, and warns of its own future changes.
    before = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _loopback(ray: Any) -> Iterator[None]:
    # Ray replaces 127.0.0.1 by an address that other machines reach, unless it knows that it forms no cluster. It reads
    # the environment variable for that at its import, which may lie far back.
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
