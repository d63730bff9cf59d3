"""A grid in this process: a ServerApp and its clients run without SuperLink, Ray and FAB, one client after another.

Messages, contexts and checks are those of Flower's simulation. A client works when its answer is pulled, with the torch
settings of a simulated client's process: one thread, subnormal numbers as they are. Its messages are copies, so neither
side sees what the other changes later.

Flower has no public interface for this. Everything that depends on its internals stands here: the identity of the
process in a run, and the ids that a SuperLink gives to messages.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from logging import ERROR
from numbers import Integral
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.logger import log
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from ..compute.in_process import torch_as_usual
from ..core.errors import ComputeError, OptionError
from ..core.processor import flush_subnormals

_RUNNING = threading.Lock()  # torch's threads and Flower's identity belong to the whole process
_IDENTITY = ("_run_id", "_node_id", "_task_id")


def simulate(
    server_app: ServerApp, client_app: ClientApp, *, clients: int, run_config: Mapping[str, Any] | None = None
) -> None:
    """Run a Flower project in this process, for a notebook, a debugger or a test.

    The result has the bits of Flower's simulation where the apps draw from seeds of their own. No deadline ends a
    client's work, because the server waits while a client works. Code that you have edited since the last call must be
    reloaded (``importlib.reload``).

    Args:
        server_app: The ServerApp.
        client_app: The ClientApp.
        clients: The number of clients, at least 1. Client i has ``{"partition-id": i, "num-partitions": clients}`` as
            its node config, and a state of its own.
        run_config: The settings of both apps, flat, as ``[tool.flwr.app.config]`` declares them.

    Raises:
        OptionError: There is no client, or something else is given in place of an app.
        ComputeError: Another simulation runs in this process.
    """
    for name, app, kind in (("server_app", server_app, ServerApp), ("client_app", client_app, ClientApp)):
        if not isinstance(app, kind):
            raise OptionError(f"{name} is {type(app).__name__}: must be a {kind.__name__}")
    if getattr(server_app, "_main", True) is None:
        raise OptionError("server_app has no main function: must have one, decorated with @app.main()")
    run_config = dict(run_config or {})
    run_locally(server_app, client_app, clients=clients, server_config=run_config, client_config=run_config)


def run_locally(
    server_app: ServerApp,
    client_app: ClientApp,
    *,
    clients: int,
    server_config: Mapping[str, Any],
    client_config: Mapping[str, Any],
) -> None:
    """Run as :func:`simulate` does, with settings of the clients that may differ from the server's."""
    if not isinstance(clients, Integral) or clients < 1:
        raise OptionError(f"clients is {clients!r}: must be a whole number, at least 1")
    if not _RUNNING.acquire(blocking=False):
        raise ComputeError("another simulation runs in this process: wait until it ends, or start another process")
    try:
        run = Run.create_empty(_new_id())  # clients may keep things under it
        with _identity_in(run):
            context = Context(run.run_id, SUPERLINK_NODE_ID, {}, RecordDict(), dict(server_config))
            server_app(LocalGrid(client_app, run, clients, client_config), context)
    finally:
        _RUNNING.release()


class LocalGrid(Grid):
    """Flower's grid over clients in this process."""

    def __init__(self, client_app: ClientApp, run: Run, clients: int, run_config: Mapping[str, Any]) -> None:
        self._app, self._run = client_app, run
        # Other ids in every run, as Flower draws them; in the order of partitions, in which clients then answer.
        nodes = sorted(_new_id() for _ in range(clients))
        self._contexts = {
            node: Context(
                run.run_id, node, {"partition-id": number, "num-partitions": clients}, RecordDict(), dict(run_config)
            )
            for number, node in enumerate(nodes)
        }
        self._began = datetime.now(UTC)
        self._questions: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        """Set the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all clients' nodes, in the order of their partitions."""
        return list(self._contexts)

    def get_nodes(self) -> list[NodeInfo]:
        """Return the nodes, registered in the order of their partitions."""
        moments = (self._began + timedelta(microseconds=number) for number in range(len(self._contexts)))
        return [
            NodeInfo(node_id=node, registered_at=moment.isoformat())
            for node, moment in zip(self._contexts, moments, strict=True)
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages and return their ids; one to an unknown node is dropped, as in Flower's simulation."""
        ids = []
        for message in messages:
            if message.metadata.dst_node_id in self._contexts:
                ids.append(_number(message))
                self._questions[ids[-1]] = deepcopy(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Let the clients work that these messages went to, and return their answers."""
        return [
            self._answer(self._questions.pop(name)) for name in dict.fromkeys(message_ids) if name in self._questions
        ]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:  # noqa: ARG002  no client can be cut off
        """Push messages and return all answers."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, question: Message) -> Message:
        node = question.metadata.dst_node_id
        context = deepcopy(self._contexts[node])  # what a client that fails has changed is lost
        try:
            with torch_as_usual(1), flush_subnormals(wanted=False):
                answer = deepcopy(self._app(question, context))
            if not isinstance(answer, Message):
                raise TypeError(f"the ClientApp returned {type(answer).__name__}: must be a Message")
            self._contexts[node] = context
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a ClientApp raises is its answer
            log(ERROR, "client %d of %d failed", self._number(node), len(self._contexts), exc_info=error)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=question)
        _number(answer)
        return answer

    def _number(self, node: int) -> int:
        return int(self._contexts[node].node_config["partition-id"])


def _new_id() -> int:
    return uuid4().int >> 65  # 63 bits, and no draw from a seeded state


def _number(message: Message) -> str:
    """Give a message an id, as a SuperLink does, and return it."""
    name = str(uuid4())
    message.metadata.__dict__["_message_id"] = name
    return name


@contextmanager
def _identity_in(run: Run) -> Iterator[None]:
    """Give this process the ServerApp's identity in a run for a block; Flower stamps messages with it."""
    before = {name: getattr(TaskIdentity, name) for name in _IDENTITY}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run.run_id, SUPERLINK_NODE_ID, 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)
