"""A run's end as Flower shows it: its scores in the log and the run folder, and the arrays of its result."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from logging import INFO
from typing import TYPE_CHECKING, Any, NoReturn

from flwr.app import ArrayRecord, MetricRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Result

from ..combiners.outcomes import find_members
from ..core.durable import atomic_write, store_errors
from ..core.errors import OneShotError, one_line, printable
from ..merging.card import write_card
from ..merging.copies import maker_of
from ..run import CARD_FILE
from ..run.ensembles import FOLDER_NAME
from ..run.files import write_json
from ..run.results import SCORES_FILE
from ..teacher.average import example_weights, weighted_mean

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..core.facts import State
    from ..method import EnsembleSpec
    from ..run.run_folder import RunFolder
    from ..run.stage import StageReport

PARTS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class NoArrays(ArrayRecord):
    """The arrays of a result that is an ensemble of several architectures: empty, and an error where they are read."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def to_torch_state_dict(self, *, keep_input: bool = True) -> OrderedDict[str, torch.Tensor]:  # noqa: ARG002
        """Refuse.

        Raises:
            OneShotError: Says where the ensemble is and how it is loaded.
        """
        self._refuse()

    def to_numpy_ndarrays(self, *, keep_input: bool = True) -> list[np.ndarray[Any, Any]]:  # noqa: ARG002
        """Refuse, see :meth:`to_torch_state_dict`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OneShotError(self._reason)


def log_scores(what: str, scores: MetricRecord | None) -> None:
    """Log scores as Flower's strategies do."""
    log(INFO, "%s", what)
    log(INFO, "    └──> MetricRecord: %s", one_line(str(scores)))


def how_to_load(folder: RunFolder, report: StageReport) -> str:
    """Return the line of Python that loads the ensemble of a run."""
    names = sorted({upload.architecture for upload in report.job.uploads})
    build = {name: getattr(report.job.builders[name], "__name__", "your_model") for name in names}
    models = ", ".join(f"{name!r}: {made if made != '<lambda>' else 'your_model'}" for name, made in build.items())
    return f'oneshot_fl.load_ensemble_module("{folder.path}", {{{models}}})'


def log_ensemble(folder: RunFolder, report: StageReport, spec: EnsembleSpec) -> None:
    """Log where the ensemble of a run is and how to load it."""
    what = "the result is an" if report.outcome.student is None else "beside the student there is an"
    place, load = folder.path / FOLDER_NAME, how_to_load(folder, report)
    log(INFO, "%s ensemble of %d models in %s; load it with: %s", what, len(spec.clients), place, load)


def single_model(
    folder: RunFolder, report: StageReport, spec: EnsembleSpec, as_sent: Callable[[State], ArrayRecord]
) -> ArrayRecord:
    """Return the arrays of a result that is an ensemble: the average of its members, see :class:`NoArrays`."""
    members = find_members(report.job, spec)
    if len({upload.architecture for upload in members}) > 1:
        reason = "the result is an ensemble of several architectures, and no single model: result.arrays has no arrays"
        return NoArrays(f"{reason}. Load the ensemble with: {how_to_load(folder, report)}")
    log(INFO, "result.arrays is the average of these models, a single model, and usually less accurate than they are")
    weights = example_weights([upload.num_examples for upload in members]) or [1.0] * len(members)
    return as_sent(weighted_mean((upload.read() for upload in members), weights))


def show_result(folder: RunFolder, result: Result) -> None:
    """Log a finished run's scores as Flower's strategies do, and write them into the run folder."""
    log(INFO, "Final results:")
    for line in str(result).splitlines():
        depth = len(line := line.expandtabs(4)) - len(line.lstrip())
        log(INFO, "    %s%s", " " * depth, one_line(line))
    write_json(folder.path / SCORES_FILE, {part: getattr(result, part) for part in PARTS})


def write_run_card(folder: RunFolder, result: Result, report: StageReport) -> None:
    """Write the model card of a run: its scores, its clients, and the code that loads its result."""
    scores = {
        f"{part.replace('_', ' ')}, round {number}: {printable(key)}": value
        for part in PARTS
        for number, found in getattr(result, part).items()
        for key, value in found.items()
    }
    makers = {name: maker for name, build in report.job.builders.items() if (maker := maker_of(build))}
    method = str(folder.info["method"])
    card = write_card(method, report.job, report.outcome, makers=makers, scores={}, reported=scores)
    with store_errors(folder.path):
        atomic_write(folder.path / CARD_FILE, card.encode())
