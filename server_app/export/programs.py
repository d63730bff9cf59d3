"""Programs of torch.export and ONNX, made of a module, and compared with it."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_app.project import FAILURES, one_line
from server_app.export.stored_models import StoredModels
from strategies.core.errors import ComputeError, OptionError
from strategies.core.offline import QUIET

TORCH, ONNX = "torch", "onnx"
SUFFIXES = {TORCH: ".pt2", ONNX: ".onnx"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # the extra "export"
TOLERANCE = 1e-5  # largest difference of two logits, in units of the largest logit, or of 1
_TRACED = 3  # examples in the batch that is traced; 1 would be taken for a constant
_BATCHES = (1, 2, 7)  # of the comparison
_MOST_BYTES = 1 << 30  # larger weights stand in a file of their own, because one of ONNX ends at 2 GiB
Run = Callable[[Tensor], Tensor]


def check_packages(kinds: tuple[str, ...]) -> None:
    """Refuse ONNX without its packages.

    Raises:
        OptionError: A package is missing; the error names the remedy.
    """
    if ONNX in kinds and (missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]):
        raise OptionError(
            f"ONNX needs {', '.join(missing)}, which are not installed: pip install 'oneshot-fl[export]', or add "
            f"--only {TORCH}"
        )


def write_programs(stored: StoredModels, name: str, folder: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Write one of the stored models in every wanted form, and compare each file with the model.

    Args:
        stored: The models.
        name: Which of them.
        folder: Where the files go.
        kinds: ``"torch"``, ``"onnx"`` or both.

    Returns:
        File -> its largest difference from the model, over the largest logit or 1.

    Raises:
        ComputeError: The model cannot be traced or translated, or a file differs from it.
    """
    module, found = stored.models[name], {}
    with _quiet(), torch.no_grad():
        batch = {0: torch.export.Dim("batch")}
        program = _tried(
            f"the {name} cannot be traced by torch.export",
            lambda: torch.export.export(module, (stored.examples(_TRACED),), dynamic_shapes=(batch,)),
        )
        for kind in kinds:
            file = folder / f"{name}{SUFFIXES[kind]}"
            write = partial(WRITERS[kind], program, file, stored)
            run = _tried(f"the {name} cannot be written as {file.name}", write)
            found[file.name] = _difference(module, run, stored, f"{file.name}, read back,")
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's advice to those who wrote a module; an error says the same."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _difference(module: nn.Module, run: Run, stored: StoredModels, what: str) -> float:
    largest = 0.0
    for count in _BATCHES:
        inputs = stored.examples(count)
        wanted, given = module(inputs), run(inputs)
        scale = max(1.0, float(wanted.abs().max()))
        largest = max(largest, float((given - wanted).abs().max()) / scale)
    if not largest <= TOLERANCE:
        raise ComputeError(f"{what} differs from the model by {largest:.1e}: must be at most {TOLERANCE:g}")
    return largest


def _save_torch(program: Any, file: Path, stored: StoredModels) -> Run:  # noqa: ARG001  the form of a writer
    torch.export.save(program, file)
    loaded: Run = torch.export.load(file).module()
    return loaded


def _save_onnx(program: Any, file: Path, stored: StoredModels) -> Run:
    from onnxscript import optimizer

    large = sum(tensor.nbytes for tensor in program.state_dict.values()) > _MOST_BYTES
    translated: Any = torch.onnx.export(
        program, input_names=[stored.input_name], output_names=["logits"], optimize=False, verbose=False
    )
    # With a limit of 0 nothing is folded: every tensor of the model keeps its name, and can be read and replaced.
    optimizer.fold_constants(translated.model, input_size_limit=0)
    optimizer.remove_unused_nodes(translated.model)
    translated.save(str(file), external_data=large)
    session = _session(file)
    return lambda inputs: torch.from_numpy(session.run(["logits"], {stored.input_name: inputs.numpy()})[0])


def _session(file: Path) -> Any:
    # Before its first import, or onnxruntime reports to its makers; the second is the name in other versions.
    os.environ.update({**QUIET, "ORT_TELEMETRY_DISABLED": "1"})
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    # Its errors share no class but Exception.
    refusals = tuple(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except refusals as error:
        raise RuntimeError(f"onnxruntime refuses it: {error}") from error


WRITERS: Mapping[str, Callable[[Any, Path, StoredModels], Run]] = {TORCH: _save_torch, ONNX: _save_onnx}


def _tried(what: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except FAILURES as error:
        raise ComputeError(f"{what}: {one_line(error)}") from error
