"""FuseFL: clients train a model block by block, each block on top of everybody's blocks below it.

Paper: Tang, Zhang, Dong, Cheung, Zhou, Han, Chu, FuseFL: One-Shot Federated Learning through the Lens of Causality with
    Progressive Model Fusion, NeurIPS 2024, https://arxiv.org/abs/2410.20380. Read version: the abstract, and a summary
    of the repository https://github.com/wizard1203/FuseFL at 8248f54; no equation was checked against the text.
Symbols: K -> 1 + the later blocks; M -> the uploads; o_1..o_M -> joined maps; h(x) -> FusedBlocks.features; N_c, mu_c,
    Sigma_c -> statistics.gaussians.Gaussians.
Where: the fused model -> combiners.fused_blocks; a client's stage -> the app's client_app.fusefl; the server's part
    -> fit_with_clients; the calibration, CCVR (Luo et al., NeurIPS 2021) -> calibrate.
Deviations: frozen blocks stay in evaluation mode, in the code they are in training mode, and their batch normalisation
    drifts. Covariances are pooled by the right formula; a precedence in the code leaves mu mu^T in. Clients of one
    architecture draw the same first adapters. A client without a first block takes no part; no other may drop out.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..combiners.fused_blocks import ADAPTERS, FusedBlocks, SideBySide, adapt_block
from ..core import refusals
from ..core.clients import Answer, Clients, Question
from ..core.errors import OptionError
from ..core.facts import BLOCK, SUFFIXES, base_of
from ..core.gpu import eager
from ..core.options import config_class, option
from ..core.seeds import build_module, generator, seeded_torch
from ..core.work import work
from ..distillation.pool import shuffled_batches
from ..method import (
    ClientPhase,
    EnsembleSpec,
    Job,
    Method,
    ModelBuilder,
    Need,
    Outcome,
    Plan,
    Progress,
    Snapshot,
    State,
)
from ..statistics.gaussians import LARGEST, Gaussians
from ..teacher.average import weighted_mean
from ..uploads.builders import builders_of_kind
from ..uploads.checks import Signature, check_answers, check_arrays
from ..uploads.tensors import tensor_form

CALIBRATION_LR, CALIBRATION_BATCH = 0.01, 128
MOST_EXAMPLES = 2**31  # of one client, whatever its upload reports: sums over clients stay far below 2**63
CLASSIFIER = "classifier."  # before the names of its weights, in the answers of the last stage


@config_class("fusefl")
class FuseFlConfig:
    """Options of FuseFL; ``client.blocks`` is its number of blocks K, ``client.epochs`` counts for every block."""

    adapter: str = option(
        "conv",
        "what joins the M outputs of a block before the next one: each client's own 1x1 convolution, or their mean",
        choices=ADAPTERS,
    )
    calibrate: bool = option(True, "the classifier learns from Gaussians of the fused features that clients send")
    draws: int = option(5000, "features drawn per class for the calibration", low=1)


def plan(config: FuseFlConfig) -> Plan:
    """Return what a run involves: random draws, and label counts of clients that calibrate."""
    return Plan(needs=frozenset({Need.LABEL_COUNTS} if config.calibrate else ()), random=True)


def check_job(job: Job) -> None:
    """Refuse a model that is not cut into blocks, before a client has worked.

    Raises:
        OptionError: The error names the models that are.
    """
    if not hasattr(build_module(_builder_of(job)), "later"):
        known = sorted(
            base_of(name) for name in builders_of_kind(job.builders, BLOCK) if name.endswith(SUFFIXES[BLOCK])
        )
        raise OptionError(
            f"method 'fusefl' cannot cut model {job.student!r} into so many blocks (setting 'client.blocks'): must be "
            f"one of {', '.join(known) or 'those of this app'}"
        )


def refuse_alone(job: Job) -> None:  # noqa: ARG001  no job can be done alone
    """Refuse a job without clients in reach: their later blocks are trained after the upload."""
    raise OptionError(
        "method 'fusefl' trains later blocks with its clients, which no replay reaches: must be a run with clients; "
        "the setting 'uploads' continues from the first blocks of another one"
    )


def fit(job: Job, progress: Progress) -> Outcome:  # noqa: ARG001  the signature of a method
    """Refuse: see :func:`refuse_alone`."""
    refuse_alone(job)
    raise AssertionError("unreachable")


def fit_with_clients(job: Job, progress: Progress, clients: Clients) -> Outcome:
    """Have the clients train block after block, fuse them, and calibrate the classifier.

    Raises:
        QuorumError: A client that uploaded does not answer.
    """
    server, began = FuseFlServer(job, progress, clients), time.monotonic()
    blocks, heads = server.blocks()
    classifier = copy.deepcopy(server.classifier)
    classifier.load_state_dict(weighted_mean(heads, [1.0] * len(heads)))
    middle = time.monotonic()
    if job.config.calibrate:
        calibrate(classifier, server.gaussians(blocks[-1]), job)
    stages = [SideBySide(template, states) for template, states in zip(server.templates, blocks, strict=True)]
    spec = EnsembleSpec.of(job, "fused-blocks", FusedBlocks(stages, classifier).state_dict())
    return Outcome(ensemble=spec, timings={"blocks": middle - began, "calibration": time.monotonic() - middle})


class FuseFlServer:
    """The server's side of the exchanges after the upload.

    Args:
        job: The job; its uploads are the first blocks.

    Attributes:
        templates: The later blocks with their adapters, with weights that do not matter.
    """

    def __init__(self, job: Job, progress: Progress, clients: Clients) -> None:
        self._job, self._progress, self._clients = job, progress, clients
        first, self.templates = build_module(_builder_of(job)), list[nn.Sequential]()
        self._inputs = list[tuple[int, ...]]()  # the shapes of joined maps that they take
        *blocks, self.classifier = cast("Sequence[nn.Module]", first.later)
        with torch.no_grad(), seeded_torch(0, "fusefl"):
            maps = first.eval()(torch.zeros(1, *job.input_shape))
            for block in blocks:
                how = {"members": len(job.uploads), "channels": maps.shape[1]}
                self.templates.append(adapt_block(block, job.config.adapter, **how))
                self._inputs.append((len(job.uploads) * maps.shape[1], *maps.shape[2:]))
                maps = block.eval()(maps)
        self._features = maps.shape[1]
        self._exchanges = len(blocks) + job.config.calibrate

    def blocks(self) -> tuple[list[list[State]], list[State]]:
        """Return the later blocks, each of all clients, and the clients' classifiers; resume after the last of them."""
        snapshot = self._progress.resume()
        found: list[list[State]] = [] if snapshot is None else list(snapshot.state)
        for number in range(len(found), len(self.templates)):
            below = found[-1] if found else [upload.read() for upload in self._job.uploads]
            last = number + 1 == len(self.templates)
            signature = _signature(self.templates[number]) | (_signature(self.classifier, CLASSIFIER) if last else {})
            found.append(self._ask(number + 2, below, signature, partial(self._check_block, number)))
            self._progress.checkpoint(partial(Snapshot, len(found), list(found)))
        parts = [[_split(state) for state in states] for states in found]
        return [[block for block, _ in part] for part in parts], [head for _, head in parts[-1]]

    def gaussians(self, last: list[State]) -> Gaussians:
        """Send the last blocks to all clients, and return the pooled Gaussians of the fused features."""
        classes, features = self._job.num_classes, self._features
        signature = {
            "counts": ((classes,), "int64"), "means": ((classes, features), "float32"),
            "covariances": ((classes, features, features), "float32"),
        }  # fmt: skip
        reported = self._ask(len(self.templates) + 2, last, signature, self._check_gaussians)
        return Gaussians.pooled([Gaussians(**each) for each in reported])

    def _check_block(self, number: int, _: str, state: State) -> None:
        """Refuse a block, or a classifier beside it, whose outputs for noise are not finite, or too large."""
        block, head = _split(state)
        check_answers(copy.deepcopy(self.templates[number]), block, self._inputs[number], LARGEST)
        if head:
            check_answers(copy.deepcopy(self.classifier), head, (self._features,), LARGEST)

    def _check_gaussians(self, client: str, state: State) -> None:
        """Refuse moments that no features have, and those of more examples than the client's upload reports."""
        reported = {
            upload.client: upload.num_examples or sum(upload.label_counts or ()) for upload in self._job.uploads
        }
        Gaussians(**state).check(min(reported[client], MOST_EXAMPLES))

    def _ask(
        self, stage: int, below: list[State], signature: Signature, check_state: Callable[[str, State], None]
    ) -> list[State]:
        """Send all copies of a stage's blocks to all clients, and return their answers in the order of the uploads.

        ``check_state`` raises UploadError for a client and tensors of the right form that are of no use.
        """
        names = [upload.client for upload in self._job.uploads]
        phase = f"block {stage}" if stage < len(self.templates) + 2 else "calibration"
        arrays = {key: torch.stack([state[key] for state in below]).numpy() for key in below[0]}
        question = Question("fusefl", {"stage": stage, "adapter": self._job.config.adapter}, arrays)

        def check_answer(answer: Answer) -> None:
            if answer.client not in names or answer.facts.get("stage") != stage:
                reported = f"of {answer.client!r} for stage {answer.facts.get('stage')!r}"
                raise refusals.broken_rule(f"its answer is {reported}", f"of a client that uploaded, for stage {stage}")
            state = _tensors(answer)
            check_arrays(state, phase, signature, tensor_form("arrays", exact=True))
            check_state(answer.client, state)

        answers = self._clients.ask(question, phase=phase, quorum=len(names), check=check_answer)
        self._progress.record({"epoch": stage - 1, "mib_per_client": round(self._clients.mib_per_client, 6)})
        self._progress.report(stage - 1, self._exchanges)
        return [_tensors(answers[name]) for name in names]


def calibrate(classifier: nn.Module, gaussians: Gaussians, job: Job) -> None:
    """Train a classifier in place, for an epoch of SGD on features drawn from the Gaussian of every class."""
    config, held = job.config, gaussians.counts.nonzero().flatten().tolist()
    draws = [gaussians.draw(c, config.draws, generator(job.seed, "fusefl", "class", c)) for c in held]
    columns = {"features": torch.cat(draws), "labels": torch.tensor(held).repeat_interleave(config.draws)}
    optimizer = eager(torch.optim.SGD)(classifier.parameters(), CALIBRATION_LR)
    for batch in shuffled_batches(columns, CALIBRATION_BATCH, generator(job.seed, "fusefl", "order")):
        optimizer.zero_grad()
        F.cross_entropy(classifier(batch["features"]), batch["labels"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        work().student_steps += 1


def _builder_of(job: Job) -> ModelBuilder:
    """Return the builder of the first block of the student's architecture, or of the only model there is."""
    return job.builders.get(job.student + SUFFIXES[BLOCK]) or job.builders[job.student]


def _signature(module: nn.Module, before: str = "") -> dict[str, Any]:
    state = module.state_dict().items()
    return {before + key: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for key, value in state}


def _tensors(answer: Answer) -> State:
    return {key: torch.from_numpy(value) for key, value in answer.arrays.items()}


def _split(state: State) -> tuple[State, State]:
    """Return the weights of a block, and those of a classifier."""
    head = {key for key in state if key.startswith(CLASSIFIER)}
    block = {key: value for key, value in state.items() if key not in head}
    return block, {key.removeprefix(CLASSIFIER): state[key] for key in sorted(head)}


METHOD = Method(
    name="fusefl",
    title="FuseFL",
    source="Tang et al., NeurIPS 2024",
    config=FuseFlConfig,
    fit=fit,
    needs=frozenset({Need.SAME_ARCHITECTURE, Need.IMAGES}),
    kind="ensemble",
    uploads="block",
    check=check_job,
    plan=plan,
    client_phase=ClientPhase(fit_with_clients, refuse_alone),
)
