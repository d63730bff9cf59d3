"""Who may import what: the table of packages, held up by parsing every import and by blocking whole packages."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
from sources import PACKAGES, ROOT, SOURCES, imported, module_name, nodes, of_each, parsed

BASICS = {"strategies.core"}
# The sums of features are the same arithmetic on both sides, in plain torch.
SUMS = {"strategies.statistics"}


@dataclass(frozen=True)
class Layer:
    """What the modules of a package may import.

    Attributes:
        ours: Packages and modules of ours, by absolute names; their submodules count too.
        flwr: Files and folders, ending in "/", that may import flwr.
        ray: Files that may import ray.
    """

    ours: frozenset[str]
    flwr: tuple[str, ...] = ()
    ray: tuple[str, ...] = ()


LAYERS = {
    # By relative imports only, so that the folder can be vendored under another name.
    "strategies": Layer(
        frozenset(), flwr=("strategies/flower/", "strategies/client/"), ray=("strategies/compute/ray_actors.py",)
    ),
    "fl_app": Layer(frozenset({"fl_app", *BASICS, *SUMS})),
    "client_app": Layer(
        frozenset({"client_app", "fl_app", "strategies.client", *BASICS, *SUMS}), flwr=("client_app/app.py",)
    ),
    "server_app": Layer(
        frozenset({"server_app", "fl_app", "strategies"}),
        flwr=("server_app/app.py", "server_app/launch/control.py", "server_app/launch/simulation.py"),
        ray=("server_app/launch/simulation.py",),
    ),
}

# The trial of a dry run trains for a moment as a client does, and a local run has both apps in its process.
BESIDE = dict.fromkeys(("server_app/launch/dry_run.py", "server_app/local.py"), frozenset({"client_app"}))


def violations(path: str, text: str) -> list[str]:
    """Return the imports of a file that its package must not have; those for type checkers count as well."""
    layer, found = LAYERS[path.split("/")[0]], []
    for node in nodes(parsed(text)):
        for name, level in imported(path, node):
            top = name.partition(".")[0]
            if top in PACKAGES:
                inside = level > 0 and top == path.split("/")[0]
                below = any(
                    f"{name}.".startswith(f"{allowed}.") for allowed in layer.ours | BESIDE.get(path, frozenset())
                )
                allowed = inside or (level == 0 and below)
            elif top in ("flwr", "flwr_datasets", "ray"):
                places = layer.ray if top == "ray" else layer.flwr
                allowed = any(path == place or (place.endswith("/") and path.startswith(place)) for place in places)
            else:
                allowed = True
            if not allowed:
                found.append(f"{path} imports {'.' * level}{name}")
    return found


@of_each(SOURCES)
def test_a_module_imports_only_from_the_packages_below_it(path: str) -> None:
    assert violations(path, SOURCES[path]) == []


FORBIDDEN = (
    ("strategies/new.py", "from flwr.app import Message"),
    ("strategies/new.py", "def f():\n    import ray"),
    ("strategies/new.py", "from strategies.core.errors import OptionError"),
    ("strategies/compute/ray_actors.py", "import flwr"),
    ("strategies/flower/one_shot.py", "import ray"),
    ("fl_app/new.py", "from strategies.method import Job"),
    ("fl_app/new.py", "from server_app.settings.read import read_settings"),
    ("client_app/new.py", "from flwr.app import Message"),
    ("client_app/app.py", "from strategies.flower.messages import Request"),
    ("server_app/replay/stored.py", "if True:\n    from flwr.app import Context"),
    ("server_app/settings/build.py", "import client_app.app"),
    ("server_app/settings/build.py", "if TYPE_CHECKING:\n    import flwr"),
)
PERMITTED = (
    ("strategies/new.py", "from .errors import OptionError\nimport torch\nimport json"),
    ("strategies/client/new.py", "from flwr.app import Message\nfrom ..errors import OptionError"),
    ("strategies/compute/ray_actors.py", "import ray"),
    ("fl_app/data/new.py", "from . import laws\nfrom strategies.core.seeds import derive_seed"),
    ("client_app/app.py", "from flwr.app import Message\nfrom strategies.client import failure"),
    ("server_app/settings/build.py", "from strategies.flower.one_shot import OneShot\nfrom fl_app.data import Split"),
)


def test_the_check_finds_forbidden_imports_and_passes_permitted_ones() -> None:
    assert [len(violations(*each)) for each in FORBIDDEN] == [1] * len(FORBIDDEN)
    assert [violations(*each) for each in PERMITTED] == [[]] * len(PERMITTED)


@of_each(path for path in SOURCES if path.startswith("strategies/"))
def test_the_library_s_pieces_do_not_know_flower_s_half(path: str) -> None:
    if path.startswith("strategies/flower/") or path == "strategies/__init__.py":
        return  # the public names are resolved when they are first used
    # The client half knows itself, and not the server's.
    client = () if path.startswith("strategies/client/") else ("strategies.client",)
    half = ("strategies.flower", *client)

    names = {name for node in nodes(parsed(SOURCES[path])) for name, _ in imported(path, node)}

    assert {name for name in names if any(f"{name}.".startswith(f"{part}.") for part in half)} <= {module_name(path)}


# What the table promises, seen from outside: with a package blocked, what must do without it does.


def run_python(code: str, *blocked: str) -> str:
    """Run a program in a process of its own, in which some packages cannot be imported, and return what it says."""
    program = f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n{textwrap.dedent(code)}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOADED = """
loaded = {name.partition('.')[0] for name, module in sys.modules.items() if module is not None}
print(sorted(loaded & {'torch', 'flwr', 'ray', 'matplotlib'}))
"""


def test_importing_the_library_alone_loads_neither_torch_nor_flwr_nor_ray() -> None:
    assert run_python(f"import strategies\n{LOADED}") == "[]"
    assert run_python(f"import strategies, strategies.method, strategies.core.options\n{LOADED}") == "[]"


def test_the_client_half_when_torch_and_ray_are_blocked_imports() -> None:
    code = """
        from strategies.client import already_held, failure, upload_facts
        print(dict(upload_facts(client="a", architecture="net", label_counts=[1, 2], pretrained=True)))
    """

    said = run_python(code, "torch", "ray")

    assert said == "{'client': 'a', 'architecture': 'net', 'label-counts': [1, 2], 'pretrained': True}"


@pytest.mark.slow
def test_the_commands_load_neither_flwr_nor_ray() -> None:
    modules = "launch.run_command, doctor.command, compare.comparison, compare.rounds, replay.imports, replay.forget"
    code = "".join(f"import server_app.{module}\n" for module in modules.split(", "))

    assert run_python(code + LOADED, "flwr", "ray") == "['torch']"


@pytest.mark.slow
def test_every_public_name_of_the_library_resolves() -> None:
    code = "import strategies\nprint(len([getattr(strategies, name) for name in dir(strategies)]) > 50)"

    assert run_python(code).split() == ["True"]


def test_type_checkers_read_the_public_names_of_the_library_and_their_modules() -> None:
    import strategies

    imports = [node for node in nodes(parsed(SOURCES["strategies/__init__.py"])) if isinstance(node, ast.ImportFrom)]
    read = {name.name: f".{node.module}" for node in imports if node.level for name in node.names}

    assert read == strategies._HOMES
