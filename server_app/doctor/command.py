"""``oneshot doctor``, ``oneshot doctor server`` and ``oneshot doctor node``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from server_app.launch.console import Format, errors

if TYPE_CHECKING:
    from server_app.doctor.findings import Check

doctor = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    help="Check whether this machine is fit for a deployment, and name the remedies; exit status 0 only if it is fit.",
)

_Settings = Annotated[
    list[str] | None, typer.Option("--run-config", help="settings of the planned run, as for run; repeatable")
]
_Expected = Annotated[
    Path | None, typer.Option("--expect", help="output of doctor --format json on the other machine, to compare with")
]
_NoRay = Annotated[bool, typer.Option("--no-ray", help="do not try Ray")]
_Format = Annotated[Format, typer.Option("--format", help="json prints one JSON object as the last line")]


@doctor.callback()
def machine(
    context: typer.Context,
    *,
    expect: _Expected = None,
    no_ray: _NoRay = False,
    format: _Format = "text",  # noqa: A002  the name of the flag
) -> None:
    """Without a role: run the checks of every machine."""
    if context.invoked_subcommand is not None:
        return
    from server_app.doctor.roles import Machine
    from server_app.doctor.versions import read_expected

    with errors(format):
        asked = Machine("machine", None if expect is None else read_expected(expect), not no_ray)
    _report(asked.role, [*asked.checks(), *asked.ray()], format)


@doctor.command()
def server(
    *,
    run_config: _Settings = None,
    clients: Annotated[int, typer.Option(min=0, help="number of expected clients; default: min-uploads")] = 0,
    certificates: Annotated[
        str, typer.Option(help="folder of ca.crt, server.pem, server.key; or these three files, comma-separated")
    ] = "",
    address: Annotated[str, typer.Option(help="HOST:PORT by which nodes reach this server")] = "",
    expect: _Expected = None,
    no_ray: _NoRay = False,
    format: _Format = "text",  # noqa: A002
) -> None:
    """Check the machine of the SuperLink and the server stage."""
    from server_app.doctor.network import Address
    from server_app.doctor.roles import Machine, Server
    from server_app.doctor.tls import ServerFiles
    from server_app.doctor.versions import read_expected
    from server_app.settings.read import read_settings

    with errors(format):
        settings = read_settings(_merged(run_config))
        asked = Server(
            settings,
            clients or settings.app.min_uploads,
            ServerFiles.of(certificates) if certificates else None,
            Address.of(address, "--address") if address else None,
            Machine("server", None if expect is None else read_expected(expect), not no_ray),
        )
    _report("server", asked.checks(), format)


@doctor.command()
def node(
    *,
    node_config: Annotated[str, typer.Option(help="a TOML file, or key=value pairs as for flower-supernode")] = "",
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink")] = "",
    root_certificates: Annotated[Path | None, typer.Option(help="the CA's certificate, ca.crt")] = None,
    key: Annotated[Path | None, typer.Option(help="the node's private key")] = None,
    run_config: _Settings = None,
    expect: _Expected = None,
    format: _Format = "text",  # noqa: A002
) -> None:
    """Check the machine of a SuperNode."""
    from server_app.doctor.network import Address
    from server_app.doctor.node import NodeConfig
    from server_app.doctor.roles import Machine, NodeMachine
    from server_app.doctor.versions import read_expected
    from server_app.settings.read import read_settings

    with errors(format):
        asked = NodeMachine(
            read_settings(_merged(run_config)),
            NodeConfig.of(node_config),
            Address.of(superlink) if superlink else None,
            root_certificates,
            key,
            Machine("node", None if expect is None else read_expected(expect)),
        )
    _report("node", asked.checks(), format)


def _merged(given: Sequence[str] | None) -> dict[str, bool | int | float | str]:
    from server_app.settings.read import known_options
    from server_app.settings.text import merge_settings, with_absolute_paths

    return with_absolute_paths(merge_settings(given or [], {o.key: o.kind for o in known_options()}))


def _report(role: str, checks: Sequence[Check], format: Format) -> None:  # noqa: A002
    """Run the checks, print their findings, and exit with status 1 if one is an error."""
    from server_app.doctor.findings import has_errors, run_checks
    from server_app.doctor.report import print_findings
    from server_app.doctor.versions import machine_facts

    def before(name: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Kchecking: {name}")
            sys.stderr.flush()

    findings = run_checks(checks, before)
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    print_findings(role, machine_facts(), findings, format)
    if has_errors(findings):
        raise typer.Exit(1)
