"""``oneshot export``; its modules are imported when it is called, so that help needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from server_app.launch.arguments import FormatOption, run_word
from server_app.launch.console import errors, say
from strategies.run import check_run_folder


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            parser=run_word, metavar="RUN", help="run folder of a finished run; by path, by name, or latest"
        ),
    ],
    *,
    only: Annotated[Literal["torch", "onnx"] | None, typer.Option(help="one of the two forms; default: both")] = None,
    model: Annotated[str, typer.Option(help="module:attribute that builds the models of a foreign run")] = "",
    out: Annotated[Path | None, typer.Option(help="folder of the files; default: export in the run folder")] = None,
    format: FormatOption = "text",  # noqa: A002
) -> None:
    """Write a run's student and ensemble as files of torch.export and ONNX, which need none of this code."""
    with errors(format):
        check_run_folder(folder)
        from server_app.export.exporting import export_lines, export_run

        facts = export_run(folder, only=only or "", model=model, out=out, log=lambda line: say(line, format))
    typer.echo(json.dumps(facts) if format == "json" else "\n".join(export_lines(facts)))
