"""``oneshot doctor``, ``oneshot doctor server`` and ``oneshot doctor node``: their options, and the checks of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_app.launch.console import Format, errors

if TYPE_CHECKING:
    from server_app.doctor import DoctorFinding
    from server_app.doctor.data import NodeConfig
    from server_app.settings.read import Settings

    Checks = dict[str, Iterable[DoctorFinding]]

doctor = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    help="Check whether this machine is fit for a deployment, and name the remedies; exit status 0 only if it is fit.",
)

_Settings = Annotated[
    list[str] | None, typer.Option("--run-config", help="settings of the planned run, as for run; repeatable")
]
_Format = Annotated[Format, typer.Option("--format", help="json prints one JSON object as the last line")]


@doctor.callback()
def machine(context: typer.Context, *, format: _Format = "text") -> None:  # noqa: A002  the name of the flag
    """Without a role: run the checks of every machine."""
    if context.invoked_subcommand is None:
        _report("machine", {}, format)


@doctor.command()
def server(
    *,
    run_config: _Settings = None,
    clients: Annotated[int, typer.Option(min=0, help="number of expected clients; default: min-uploads")] = 0,
    certificates: Annotated[
        str, typer.Option(help="folder of ca.crt, server.pem, server.key; or these three files, comma-separated")
    ] = "",
    address: Annotated[str, typer.Option(help="HOST:PORT by which nodes reach this server")] = "",
    format: _Format = "text",  # noqa: A002
) -> None:
    """Check the machine of the SuperLink and the server stage."""
    from server_app.doctor import data, network

    with errors(format):
        settings = _settings(run_config)
        files = network.ServerFiles.of(certificates) if certificates else None
        place = network.Address.of(address, "--address") if address else None
    made = "--certificates FOLDER, which holds ca.crt, server.pem and server.key (deploy/make_keys.py makes them)"
    checks: Checks = {
        "data": data.server_data(settings),
        "models": _server_models(settings, clients or settings.app.min_uploads),
        "certificates": _not_given("certificates", made)
        if files is None
        else network.server_certificate(files, (place.host,) if place else ()),
    }
    if place is not None:
        checks["port"] = network.port_free(place, files.ca if files else None)
    _report("server", checks, format)


@doctor.command()
def node(
    *,
    node_config: Annotated[str, typer.Option(help="a TOML file, or key=value pairs as for flower-supernode")] = "",
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink")] = "",
    root_certificates: Annotated[Path | None, typer.Option(help="the CA's certificate, ca.crt")] = None,
    key: Annotated[Path | None, typer.Option(help="the node's private key")] = None,
    run_config: _Settings = None,
    format: _Format = "text",  # noqa: A002
) -> None:
    """Check the machine of a SuperNode."""
    from server_app.doctor import data, network
    from server_app.doctor.data import NodeConfig

    with errors(format):
        settings, own = _settings(run_config), NodeConfig.of(node_config)
        place = network.Address.of(superlink) if superlink else None
    needs_key = "--key NODE.key, if the SuperLink is started with --enable-supernode-auth"
    needs_place = "--superlink HOST:PORT --root-certificates ca.crt"
    checks: Checks = {
        "node config": own.look(),
        "data": data.node_data(settings, own),
        "model": _node_model(settings, own),
        "root certificate": [network.certificate(root_certificates)] if root_certificates else (),
        "node key": network.node_key(key) if key else _not_given("node key", needs_key),
        "SuperLink": network.superlink(place, root_certificates) if place else _not_given("SuperLink", needs_place),
    }
    _report("node", checks, format)


def _server_models(settings: Settings, clients: int) -> Iterator[DoctorFinding]:
    """Check the run's models, and the room for their uploads."""
    from server_app.doctor import data, machine

    model, split = settings.app.model, data.split_of(settings, ("test", "train"))
    yield from data.architectures((*model.mix(), model.of_student()), split, settings)
    if split is None or not (sizes := data.model_bytes(split, model.mix(), settings)):
        return
    uploads = sum(sizes.get(model.of_client(number), 0) for number in range(clients))
    yield machine.upload_limit(sizes, settings.app.max_upload_mib)
    yield from machine.run_folder(settings.app.run_dir, uploads, max(sizes.values()))


def _node_model(settings: Settings, own: NodeConfig) -> Iterator[DoctorFinding]:
    """Check a node's model, its limits and budget, and the room for its files."""
    from server_app.doctor import data, machine

    split = data.split_of(settings, ("train", "test"), own.data_root(settings.app.data.root))
    architecture = str(own.facts.get("architecture", "")) or settings.app.model.of_client(own.partition_id)
    yield from own.refusals(settings.app, architecture)
    yield from data.architectures((architecture,), split, settings)
    if template := str(own.facts.get("checkpoint", "")) or settings.app.client.checkpoint:
        yield data.checkpoint(own.filled(template), architecture, split, settings)
    sizes = {} if split is None else data.model_bytes(split, (architecture,), settings)
    yield from machine.client_state(own.policy.state_dir(settings.app.client.state_dir), sizes.get(architecture, 0))
    yield from own.budget()


def _not_given(check: str, fix: str) -> Iterator[DoctorFinding]:
    from server_app.doctor import DoctorFinding

    yield DoctorFinding("skipped", check, "not given", fix=fix)


def _settings(given: Sequence[str] | None) -> Settings:
    from server_app.settings.catalogue import catalogue
    from server_app.settings.read import read_settings

    return read_settings(catalogue().settings(given or []))


def _report(role: str, checks: Checks, format: Format) -> None:  # noqa: A002
    """Run the checks of every machine and those of a role, print them, and exit with status 1 if one is an error."""
    from server_app.doctor import machine, print_findings, run_checks

    every = {"packages": machine.packages(), "Flower's commands": machine.flower_commands(role)}
    if not print_findings(role, run_checks({**every, **checks}), format):
        raise typer.Exit(1)
