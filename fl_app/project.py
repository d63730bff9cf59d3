"""Code of the user's own project, which a setting or an option names as ``package.module:attribute``.

The module lies in the folder where the user types the command, or anywhere else on Python's path. ``oneshot run``
names that folder to its processes, which work in folders of their own; on a node it is the app's own folder.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from strategies.core.errors import OptionError
from strategies.core.options import is_own, meant

FOLDER_VARIABLE = "ONESHOT_PROJECT"  # the folder where `oneshot run` was typed
FORM = "module:attribute"
# What the code of others raises when it is wrong.
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip


def project_folder() -> Path:
    """Return the folder where the user's modules are looked for first."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path.cwd()).absolute()


def imported(name: str, where: str) -> Any:
    """Import what a name stands for.

    Args:
        name: ``package.module:attribute``.
        where: What holds the name, for the errors: ``setting 'model.name'``.

    Raises:
        OptionError: The name has another form, the module cannot be imported, or it lacks the attribute.
    """
    if not is_own(name):
        raise OptionError(f"{where} is {name[:200]!r}: must be {FORM}, such as 'my_project.model:Net'")
    module_name, _, attribute = name.partition(":")
    with _findable(project_folder()):
        found: Any = _module(module_name, f"{where} is {name!r}")
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise OptionError(
                f"{where} is {name!r}, but module {module_name!r} has no {attribute!r}{meant(part, vars(found))}"
            )
        found = getattr(found, part)
    return found


def function_of(name: str, where: str) -> Callable[..., Any]:
    """Import a callable; the arguments and errors are those of :func:`imported`.

    Raises:
        OptionError: It is no callable.
    """
    found = imported(name, where)
    if not callable(found):
        raise OptionError(f"{where} is {name!r}, which is {type(found).__name__}: must be a function or a class")
    return found  # type: ignore[no-any-return]


def called(function: Callable[..., Any], given: Mapping[str, Any], what: str) -> Any:
    """Call a user's function with those of the arguments that its signature names.

    Raises:
        OptionError: It needs other arguments, or fails; the error has its own reason.
    """
    try:
        taken = inspect.signature(function).parameters.values()
    except ValueError:  # a function of C, which has no signature
        taken = ()  # type: ignore[assignment]
    if any(each.kind is each.VAR_KEYWORD for each in taken):
        chosen = dict(given)
    else:
        chosen = {each.name: given[each.name] for each in taken if each.name in given}
    needed = [
        each.name
        for each in taken
        if each.default is each.empty and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if missing := [name for name in needed if name not in chosen]:
        raise OptionError(f"{what} needs the argument {missing[0]!r}: must need none but {', '.join(given)}")
    try:
        with _findable(project_folder()):  # the function may import further modules
            return function(**chosen)
    except (Exception, SystemExit) as error:  # of the user's code, whose own kinds of exceptions are not known
        raise OptionError(f"{what} fails: {one_line(error)}") from error


TRAINS = "must train the model that it gets, in place, and return None or a dict of numbers by name"


def own_training(name: str) -> Callable[..., Any]:
    """Import the function that trains a model, of the setting ``model.train``.

    Raises:
        OptionError: It cannot be imported, is none, or says by its annotation that it returns something else.
    """
    function = function_of(name, "setting 'model.train'")
    try:
        said = get_type_hints(function).get("return")
    except FAILURES:  # names that only a type checker knows
        said = None
    if not _may_return_numbers(said):
        raise OptionError(f"model.train {name!r} returns {inspect.formatannotation(said)}, by its annotation: {TRAINS}")
    return function


def _may_return_numbers(said: Any) -> bool:
    """Say whether a function with this annotation of its result may return None or a mapping."""
    if get_origin(said) in (Union, UnionType):
        return any(map(_may_return_numbers, get_args(said)))
    kind = get_origin(said) or said
    return not isinstance(kind, type) or kind in (object, Any) or issubclass(kind, Mapping | NoneType)


def own_scores(name: str) -> Callable[..., Any]:
    """Return the function that asks the user's own, of the setting ``model.evaluate``, for a model's scores.

    Returns:
        Takes ``model``, in eval mode, and ``data``, and returns what the user's function does.

    Raises:
        OptionError: It cannot be imported, or is none; when it is called, it needs other arguments, or fails.
    """
    function = function_of(name, "setting 'model.evaluate'")

    def scored(model: Any, data: Any) -> Any:
        return called(function, {"model": model, "data": data}, f"model.evaluate {name!r}")

    return scored


def scores_in(found: Any, what: str, left_out: Callable[[str], None] | None = None) -> dict[str, float]:
    """Return the scores that a user's function returned, by name.

    Args:
        found: The accuracy in %, or a dict of numbers by name.
        what: The function, for the errors.
        left_out: Told in one line of scores that are no finite numbers, which are left out; None: they are an error.

    Raises:
        OptionError: They are no finite numbers by name, or an accuracy is not from 0 to 100.
    """
    named = found if isinstance(found, Mapping) else {"accuracy": found}
    try:
        scores = {str(name): round(float(value), 6) for name, value in named.items()}
    except (TypeError, ValueError):
        scores = {}
    finite = {name: value for name, value in scores.items() if math.isfinite(value)}
    odd = [f"{name} {value}" for name, value in scores.items() if name not in finite]
    if odd and left_out is not None:
        left_out(f"{what} returns {', '.join(odd)}: left out of the scores, which must be finite numbers")
        odd = []
    if odd or not scores or not 0 <= finite.get("accuracy", 0.0) <= 100:
        raise OptionError(
            f"{what} returns {str(found)[:80]}: must return the accuracy in %, 0 to 100, or a dict of numbers by name, "
            "with 'accuracy' or other names"
        )
    return finite


def _module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if f"{name}.".startswith(f"{missing}."):
            place = f"no module {missing!r} in {project_folder()}, nor elsewhere on Python's path"
            raise OptionError(f"{what}, but there is {place}") from error
        raise OptionError(f"{what}, but module {name!r} imports {missing!r}, which is not installed") from error
    except (*FAILURES, SystemExit) as error:
        raise OptionError(f"{what}, but module {name!r} cannot be imported: {one_line(error)}") from error


@contextmanager
def _findable(folder: Path) -> Iterator[None]:
    """Put a folder before all others on Python's path for the block; outside it hides no installed module."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def one_line(error: BaseException) -> str:
    """Return an error of the user's code as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
