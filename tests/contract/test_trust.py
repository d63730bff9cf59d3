"""What keeps code of others out, and what we do to ourselves: every use of what can run code, and every process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from sources import PACKAGES, SOURCES, nodes, parsed

# Calls that turn bytes or texts into code, or hand a text to a shell; what ends in a dot stands for all below it.
DANGEROUS = (
    "pickle.load", "pickle.loads", "pickle.Unpickler", "_pickle.", "cloudpickle.load", "cloudpickle.loads", "dill.",
    "joblib.", "marshal.", "shelve.", "eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "torch.jit.load", "torch.package.", "torch.hub.", "runpy.", "importlib.import_module",
    "importlib.util.module_from_spec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "ctypes.", "code.", "pty.",
)  # fmt: skip

# The present uses, each with the source of its input.
TRUSTED = {
    ("strategies/compute/task.py", "pickle.loads"): "a task that our own driver has pickled, over Ray's own channel",
    ("strategies/__init__.py", "importlib.import_module"): "names that stand in this file",
    ("strategies/compute/__init__.py", "importlib.import_module"): "names that stand in this file",
    ("strategies/core/processor.py", "ctypes.CDLL"): "the C library of the process itself",
    ("strategies/run/trial.py", "ctypes.c_ulong"): "the number of a thread",
    ("strategies/run/trial.py", "ctypes.pythonapi"): "the interpreter of the process itself",
    ("strategies/run/trial.py", "ctypes.pythonapi.PyThreadState_SetAsyncExc"): "ends a trial that takes too long",
    ("strategies/run/trial.py", "ctypes.py_object"): "the exception that ends it",
    ("fl_app/models/__init__.py", "importlib.import_module"): "names that stand in this file",
    ("fl_app/models/backbones.py", "importlib.import_module"): "the packaged backbone",
    ("fl_app/models/huggingface.py", "importlib.import_module"): "the package transformers",
    ("fl_app/models/wordllama.py", "importlib.import_module"): "the package tokenizers",
    ("strategies/core/vision.py", "importlib.import_module"): "torchvision",
    ("fl_app/project.py", "importlib.import_module"): "what the user names, or a module that a node permits",
    ("strategies/core/registry.py", "importlib.import_module"): "names that stand in this file",
    ("strategies/compute/ray_actors.py", "importlib.import_module"): "the library's own name, from our own driver",
}

# Every program that is started: (file, function) -> the code that switches off the telemetry of Flower and Ray.
STARTED = {
    ("server_app/launch/guard.py", "_start_guardian"): "",  # it loads neither of them
    ("server_app/launch/superlink.py", "_start"): "env=run_environment(folder, token)",
    ("server_app/compare/cell.py", "run_cell"): "**QUIET",
    ("server_app/settings/commit.py", "_ask"): '[git, "-C", ',  # git loads neither
}


def imports_of(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name of a file stands for."""
    found = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """Return the full name of what an expression stands for; empty if it is no name."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, known)
        return f"{before}.{node.attr}" if before else ""
    return ""


def dangers(text: str) -> Iterator[str]:
    """Yield every dangerous thing that a file names, called or handed on, and every unsafe reader of files."""
    tree = parsed(text)
    known = imports_of(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = dotted(node, known)
            if any(name == each or (each.endswith(".") and name.startswith(each)) for each in DANGEROUS):
                yield name
        if isinstance(node, ast.Call):
            yield from unsafe_reader(dotted(node.func, known), {key.arg: key.value for key in node.keywords})


def unsafe_reader(name: str, given: dict[str | None, ast.expr]) -> Iterator[str]:
    def says(key: str, value: bool) -> bool:
        return isinstance(given.get(key), ast.Constant) and given[key].value is value  # type: ignore[attr-defined]

    if name == "torch.load" and not says("weights_only", True):
        yield "torch.load without weights_only=True"
    if name in ("numpy.load", "numpy.lib.format.read_array") and not says("allow_pickle", False):
        yield f"{name} without allow_pickle=False"
    if name.startswith("subprocess.") and "shell" in given and not says("shell", False):
        yield "a shell"


def test_nothing_runs_code_that_came_from_elsewhere() -> None:
    found = {(path, danger) for path, text in SOURCES.items() for danger in dangers(text)}

    assert found == set(TRUSTED)


CAN_RUN_CODE = (
    "import pickle as p\np.load(f)",
    "from pickle import loads as read\nread(b'')",
    "import pickle\nmap(pickle.loads, parts)",
    "import pickle\nclass Mine(pickle.Unpickler): pass",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=False)",
    "import torch\ntorch.load(path, weights_only=safe)",
    "import numpy as np\nnp.load(path)",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "eval(text)",
    "import yaml\nyaml.load(text)",
    "import subprocess\nsubprocess.run('ls', shell=True)",
    "from ray import cloudpickle\nimport torch\ntorch.hub.load('a', 'b')",
)
CANNOT = (
    "import torch\ntorch.load(path, weights_only=True)",
    "import numpy as np\nnp.load(path, allow_pickle=False)",
    "model.eval()\npattern = re.compile('x')",
    "import pickle\ntry:\n    f()\nexcept pickle.UnpicklingError:\n    raise",
    "import subprocess\nsubprocess.Popen(['ls'])",
)


def test_the_search_finds_calls_that_can_run_code_and_passes_others() -> None:
    assert [code for code in CAN_RUN_CODE if not list(dangers(code))] == []
    assert [code for code in CANNOT if list(dangers(code))] == []


def starts(text: str) -> Iterator[tuple[str, str]]:
    """Yield (function, source) of every function that starts a process."""
    tree = parsed(text)
    known = imports_of(tree)
    for function in nodes(tree):
        if isinstance(function, ast.FunctionDef):
            calls = [dotted(node.func, known) for node in nodes(function) if isinstance(node, ast.Call)]
            if any(call.startswith("subprocess.") for call in calls):
                yield function.name, ast.get_source_segment(text, function) or ""


def test_every_process_that_may_load_flower_or_ray_is_started_without_telemetry() -> None:
    found = {(path, name): source for path, text in SOURCES.items() for name, source in starts(text)}

    assert found.keys() == STARTED.keys()
    assert [place for place, quiet in STARTED.items() if quiet not in found[place]] == []
    guardian = {name.partition(".")[0] for name in imports_of(parsed(SOURCES["server_app/launch/guard.py"])).values()}
    assert not guardian & {"flwr", "ray", *PACKAGES}
