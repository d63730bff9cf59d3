"""Starts Ray without disturbing this process or its neighbours; the caller passes Ray in."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import offline
from ..core.errors import ComputeError, with_remedy
from .task import LIBRARY
from .worker import code_digest

PATIENCE_S = 10.0  # for a cluster's first answer
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # the first frame of HTTP/2, in which Ray speaks


class NoRoomError(ComputeError):
    """Ray is missing, does not start, or has no room: the job can still run in this process."""


def start_ray(ray: Any, cluster: str) -> None:
    """Join the cluster, or start a Ray that no other machine can reach.

    Args:
        cluster: The address of a running cluster; this library travels to it as a package. Empty: start a Ray.

    Raises:
        NoRoomError: Ray does not start, or the cluster does not answer.
    """
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with _undisturbed():
            if cluster:
                _reach(cluster)
                code = Path(__file__).parents[LIBRARY.count(".") + 1]
                there = {
                    "py_modules": [str(code)],
                    "excludes": ["__pycache__"],
                    "env_vars": offline.environment(os.environ),
                }
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
        raise NoRoomError(with_remedy(f"Ray {state}: {error}")) from error


def _reach(cluster: str) -> None:
    # Ray itself keeps trying for many minutes, where another service listens too.
    host, _, port = cluster.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S) as link:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
        try:
            answer = link.recv(len(_SETTINGS))
        except TimeoutError:
            answer = b""
        if answer[3:4] != _SETTINGS[3:4]:
            raise OSError("what listens there is not Ray")


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


# A running Ray from the driver's side; the caller passes Ray in.


# The most seconds between two calls of Progress.tick.
_TICK_S = 0.4


@dataclass(frozen=True)
class Session:
    """A running Ray.

    Attributes:
        code: (digest, folder) of this library when this Ray was first used.
        paths: The folders of this library for actors, in front of their own ``sys.path``.
        actor: The actor's class, for ``ray.remote``.
        shard: The class of a shard's actor.
        name: The name of this Ray, unlike those of earlier and later ones.
    """

    ray: Any
    code: tuple[str, str]
    paths: tuple[str, ...]
    actor: type
    shard: type
    name: tuple[str, str]

    @classmethod
    def of(cls, ray: Any, paths: tuple[str, ...], actor: type, shard: type) -> Session:
        """Describe the running Ray."""
        return cls(ray, code_digest(), paths, actor, shard, _name_of(ray))

    def check_code(self, code: tuple[str, str]) -> None:
        """Refuse an actor that runs other code than this process.

        Raises:
            ComputeError: The code differs; the error names both folders.
        """
        (digest, folder), (own_digest, own_folder) = code, self.code
        if digest != own_digest:
            meanwhile = "; it was edited meanwhile" if folder == own_folder else ""
            raise ComputeError(f"the Ray actor runs other code, {folder}, than the driver, {own_folder}{meanwhile}")

    def lasts(self) -> bool:
        """Return whether this process still uses this Ray."""
        return bool(self.ray.is_initialized()) and _name_of(self.ray) == self.name

    def answer(self, reference: Any, tick: Callable[[], None], wait_s: float = math.inf) -> Any:
        """Return an actor's answer.

        Args:
            wait_s: The longest wait in seconds.

        Raises:
            TimeoutError: No answer came within ``wait_s`` seconds.
            ComputeError: Ray ended meanwhile.
        """
        deadline = time.monotonic() + wait_s
        while True:
            # Given a reference of a Ray that has ended, Ray would start another one.
            if not self.ray.is_initialized():
                raise ComputeError("Ray ended during the server stage")
            if self.ray.wait([reference], timeout=_TICK_S)[0]:
                break
            if time.monotonic() > deadline:
                raise TimeoutError
            tick()
        tick()
        return self.ray.get(reference)


def _name_of(ray: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()
