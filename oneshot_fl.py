"""The installed package's name in a clone: ``oneshot_fl`` is the library, ``oneshot_fl.server_app`` the server's app.

``pip install`` gives one package of this name, see ``hatch_build.py``; this file is not in it. In a clone every module
exists once, under its name in the repository, and a finder lends it the other name.
"""

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies import *  # noqa: F403  for editors: the same public names

_LIBRARY = "strategies"
_APP = ("fl_app", "client_app", "server_app")


class _SecondName(MetaPathFinder, Loader):
    """Finds ``oneshot_fl.a.b`` where the repository has it."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        found = importlib.util.find_spec(_first_name(fullname))
        if found is None:
            return None
        spec = ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)
        spec.has_location = found.has_location
        return spec

    def exec_module(self, module: ModuleType) -> None:
        # The import system returns what stands here afterwards, and leaves its attributes as they are.
        sys.modules[module.__name__] = importlib.import_module(_first_name(module.__name__))


def _first_name(second: str) -> str:
    inner = second.partition(".")[2]
    return inner if inner.partition(".")[0] in _APP else f"{_LIBRARY}.{inner}"


sys.meta_path.insert(0, _SecondName())
sys.modules[__name__] = importlib.import_module(_LIBRARY)
