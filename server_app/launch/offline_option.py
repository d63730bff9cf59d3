"""``--offline``, the same option for every command that may use a network."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from strategies.core import offline
from strategies.core.errors import OptionError

_OPTION = Annotated[
    bool,
    typer.Option(
        "--offline",
        envvar=offline.VARIABLE,
        help="refuse connections beyond this machine and $RAY_ADDRESS, in every process that this starts",
    ),
]


def with_offline(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command of the command line the option ``--offline``, which takes effect before the command begins."""
    return with_flag(command, "offline", _OPTION, lambda asked: _switch_on() if asked else None)


def with_flag(
    command: Callable[..., None], name: str, annotation: Any, act: Callable[[bool], None]
) -> Callable[..., None]:
    """Give a command a further flag.

    Args:
        command: The command.
        name: The flag's parameter, which the command itself does not get.
        annotation: The option.
        act: Called with the flag before the command begins.
    """

    @functools.wraps(command)
    def switched(*args: Any, **given: Any) -> None:
        act(bool(given.pop(name, False)))
        command(*args, **given)

    own = inspect.signature(command, eval_str=True)
    added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
    switched.__signature__ = own.replace(parameters=[*own.parameters.values(), added])  # type: ignore[attr-defined]
    switched.__annotations__ = {each.name: each.annotation for each in (*own.parameters.values(), added)}
    return switched


def _switch_on() -> None:
    try:
        offline.switch_on()
    except OptionError as error:
        raise typer.BadParameter(str(error)) from error
