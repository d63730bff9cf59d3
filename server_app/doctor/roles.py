"""The checks of each role: any machine, the server, a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from server_app.doctor import compute, data, environment, network, tls, versions
from server_app.doctor import environment as room
from server_app.doctor.findings import Check, Finding
from server_app.doctor.network import Address
from server_app.doctor.node import NodeConfig
from server_app.doctor.tls import ServerFiles
from server_app.settings.read import Settings
from strategies.core.errors import UploadError


@dataclass(frozen=True)
class Machine:
    """The checks of every machine.

    Attributes:
        role: ``"server"``, ``"node"``, or ``"machine"`` for one without a role.
        expected: The facts of another machine to compare with; None compares with none.
        with_ray: Whether to check Ray.
    """

    role: str = "machine"
    expected: Mapping[str, Any] | None = None
    with_ray: bool = True

    def checks(self) -> list[Check]:
        """Return the checks of every machine."""
        found = [
            Check("Python", versions.python_version),
            Check("packages", versions.packages),
            Check("locked packages", versions.locked),
            Check("torchvision imports", versions.torchvision_imports, 60.0),
            Check("Flower's commands", partial(versions.flower_commands, self.role)),
        ]
        if self.expected is not None:
            found.append(Check("same versions", partial(self._compare, self.expected)))
        return [
            *found,
            Check("environment", partial(environment.variables, self.role)),
            Check("other runs", environment.left_overs),
            Check("GPU by torch", compute.torch_gpus, 60.0),
        ]

    def _compare(self, expected: Mapping[str, Any]) -> Iterator[Finding]:
        return versions.differences(versions.machine_facts(), expected)

    def ray(self) -> list[Check]:
        """Return the check of Ray."""
        if not self.with_ray:
            return [Check("Ray", lambda: [Finding("skipped", "Ray", "not checked (--no-ray)")])]
        return [Check("Ray", compute.ray, compute.RAY_S + 60.0)]


@dataclass(frozen=True)
class Server:
    """The machine of the SuperLink and of the server stage.

    Attributes:
        settings: Settings of the planned run.
        clients: Number of expected clients.
        files: Its certificates; None if not given.
        address: Its address for nodes; None if not given.
    """

    settings: Settings
    clients: int
    files: ServerFiles | None = None
    address: Address | None = None
    machine: Machine = field(default_factory=partial(Machine, "server"))

    def checks(self) -> list[Check]:
        """Return the server's checks, those of every machine included."""
        app = self.settings.app
        found = [
            *self.machine.checks(),
            Check("device", partial(compute.device, app.device), 60.0),
            *(self.machine.ray() if app.compute == "ray" else []),
            Check("data", partial(data.server_data, self.settings), 120.0),
            Check("models", self._models, 120.0),
            Check("open files", partial(environment.open_files, self.clients)),
        ]
        if self.files is None:
            found.append(Check("certificates", _unnamed_certificates))
        else:
            names = (self.address.host,) if self.address else ()
            found.append(Check("certificates", partial(tls.server_certificate, self.files, names)))
        if self.address is not None:
            ca = self.files.ca if self.files else None
            found.append(Check("port", partial(network.port_free, self.address, ca)))
        return found

    def _models(self) -> Iterator[Finding]:
        model = self.settings.app.model
        split = data.split_of(self.settings, ("test", "train"))
        yield from data.architectures((*model.mix(), model.of_student()), split, self.settings)
        if split is None:
            yield Finding("skipped", "room", "unknown sizes of the models, because the data cannot be read")
            return
        sizes = data.model_bytes(split, model.mix(), self.settings)
        if not sizes:
            return
        mix = [sizes.get(model.of_client(number), 0) for number in range(self.clients)]
        uploads, largest = sum(mix), max(sizes.values())
        yield from room.upload_limit(sizes, self.settings.app.max_upload_mib)
        yield from room.run_folder(self.settings.app.run_dir, uploads, largest)
        yield from room.server_memory(uploads, largest)


@dataclass(frozen=True)
class NodeMachine:
    """The machine of a SuperNode.

    Attributes:
        settings: Settings of the planned run.
        node: The node's config.
        superlink: The SuperLink's address; None if not given.
        ca: The CA's certificate; None if not given.
        key: The node's private key; None if not given.
    """

    settings: Settings
    node: NodeConfig
    superlink: Address | None = None
    ca: Path | None = None
    key: Path | None = None
    machine: Machine = field(default_factory=partial(Machine, "node"))

    def checks(self) -> list[Check]:
        """Return the node's checks, those of every machine included."""
        own = str(self.node.facts.get("device", ""))
        place = (own, "device") if own else (self.settings.app.client.device, "client.device")
        found = [
            *self.machine.checks(),
            Check("node config", self.node.look),
            *([] if self.node.facts.get("checkpoint") else [Check("device", partial(compute.device, *place), 60.0)]),
            Check("data", partial(data.node_data, self.settings, self.node), 120.0),
            Check("model", self._model, 120.0),
        ]
        if self.ca is not None:
            found.append(Check("root certificate", partial(tls.root_certificate, self.ca)))
        found.append(Check("node key", _unnamed_key if self.key is None else partial(tls.node_key, self.key)))
        if self.superlink is None:
            return [*found, Check("SuperLink", _unnamed_superlink)]
        late = "give the SuperLink's IP address: resolving its name takes too long"
        return [
            *found,
            Check("proxies", partial(environment.proxies, self.superlink.host)),
            Check("SuperLink", partial(network.superlink, self.superlink, self.ca), late=late),
        ]

    def _model(self) -> Iterator[Finding]:
        root = self.node.data_root(self.settings.app.data.root)
        split = data.split_of(self.settings, ("train", "test"), root)
        model = self.settings.app.model
        architecture = str(self.node.facts.get("architecture", "")) or model.of_client(self.node.partition_id)
        yield from self.node.refusals(self.settings.app, architecture)
        yield from data.architectures((architecture,), split, self.settings)
        template = str(self.node.facts.get("checkpoint", "")) or self.settings.app.client.checkpoint
        if template:
            try:
                yield from data.checkpoint(self.node.filled(template), architecture, split, self.settings)
            except UploadError as error:
                yield Finding("error", "checkpoint", str(error), fix="correct client.checkpoint, or the node's config")
        sizes = {} if split is None else data.model_bytes(split, (architecture,), self.settings)
        state = self.node.policy.state_dir(self.settings.app.client.state_dir)
        yield from room.client_state(state, sizes.get(architecture, 0))
        yield from self.node.budget()
        yield from room.node_memory(sizes.get(architecture, 0))


def _unnamed_certificates() -> Iterator[Finding]:
    fix = "--certificates FOLDER, which holds ca.crt, server.pem and server.key (deploy/make_keys.py makes them)"
    yield Finding("skipped", "certificates", "not given", fix=fix)


def _unnamed_key() -> Iterator[Finding]:
    fix = "--key NODE.key, if the SuperLink is started with --enable-supernode-auth"
    yield Finding("skipped", "node key", "not given", fix=fix)


def _unnamed_superlink() -> Iterator[Finding]:
    yield Finding("skipped", "SuperLink", "not given", fix="--superlink HOST:PORT --root-certificates ca.crt")
