"""Puts the offline guard into a Python process before any other code runs; this folder must be first in PYTHONPATH.

Python imports one ``sitecustomize`` at its start; this one then runs the next one on the path.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
# Not the library's own name: the process may import another copy of it, which this one must not replace.
_NAME = "_oneshot_startup"


def _put_guard() -> None:
    package = ModuleType(_NAME)
    package.__path__ = [str(_HERE.parent)]
    sys.modules[_NAME] = package
    try:
        importlib.import_module(f"{_NAME}.offline").enforce()
    except BaseException as error:  # after an Exception here Python would continue without the guard
        raise SystemExit(f"error: {error}") from error
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]


def _run_next() -> None:
    others = [path for path in sys.path if Path(path).resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_put_guard()
_run_next()
