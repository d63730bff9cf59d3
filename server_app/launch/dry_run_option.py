"""``--dry-run``: the run is checked and told, and nothing starts."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated

import typer

from server_app.launch.offline_option import with_flag

_ASKED: ContextVar[bool] = ContextVar("dry-run", default=False)
_OPTION = Annotated[
    bool, typer.Option("--dry-run", help="print the settings, the bytes per client and the time; start nothing")
]


def with_dry_run(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option ``--dry-run``, which :func:`is_dry` tells."""
    return with_flag(command, "dry_run", _OPTION, _note)


def _note(asked: bool) -> None:
    _ASKED.set(asked)


def is_dry() -> bool:
    """Return whether the command under way was called with ``--dry-run``."""
    return _ASKED.get()
