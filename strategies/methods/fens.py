"""FENS: the uploaded models are an ensemble, and the clients train a tiny aggregator of its logits together.

Paper: Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma, Revisiting Ensembling in One-Shot Federated
    Learning, NeurIPS 2024, https://arxiv.org/abs/2411.07182.
    Read version: the paper and its appendix, whose equations are compared with this code, and a summary of its code.
Symbols: theta_i -> Job.uploads; pi_i(x) -> member logits z [M, B, C]; f_lambda -> AGGREGATORS; lambda ->
    params; D_i^10 -> the share ``holdout`` that a client keeps from training; K -> local_steps; R -> rounds.
Where: Algorithm 1, phase 1 -> the clients' upload, aggregator_trainers.Dialogue.send; phase 2 -> _train_aggregator;
    the server's step of Table 8 -> aggregator_trainers.FedAdam; the aggregators of section 3 -> combiners.aggregators.
Deviations: the last round is the result; the published code reports the best of all rounds on the test set. The
    aggregators have biases, as in the published code; those of appendix B.3 and B.4 have none. A client counts by the
    examples that its steps saw, as in the published code; line 13 of Algorithm 1 is a plain mean: preset "paper". INT8
    is calibrated on the clients' own training examples, not on test images. The clients send their counts of votes, not
    their shares, so that a merge is that of pooled examples. On a server with labelled images ``fit`` trains the
    aggregator there, by the same steps, as one client. Every round asks all clients, where Algorithm 1 selects some; K
    steps are K, where the loop of Algorithm 2 counts from 0 to K. The gate's dropout, and its weights per class from
    100 classes on, are the published code's. The start of the per-class weights is drawn as in the published code, the
    text leaves it open; with ``start = "label-counts"`` they begin at the static ones, so that few rounds are enough,
    and with ``"tally"`` too, by estimates for clients that send no counts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..combiners.aggregator_trainers import Dialogue, FedAdam, ServersImages, Trainers, require_labelled
from ..combiners.aggregators import AGGREGATORS, STATIC, Aggregator, Params, choose_aggregator, label_shares
from ..core.clients import Clients
from ..core.errors import OptionError
from ..core.options import RESUME, config_class, option, presets
from ..method import (
    POOLS,
    TEACHERS,
    ClientAsks,
    ClientPhase,
    EnsembleSpec,
    Job,
    Method,
    Need,
    Outcome,
    Plan,
    Progress,
    Snapshot,
)
from ..teacher.ensemble import Ensemble
from ..uploads.packed import PRECISIONS

# From here on the published code's gate has a weight per member and class; the text has one per member throughout.
MANY_CLASSES = 100


# "quick": on digits it takes seconds, where the published rounds take a minute.
# "paper": the text, with Table 8's hidden units. "published-code": its release, whose values are the declared ones.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"rounds": 100, "server_lr": 0.003},
    "paper": {"hidden": 40, "client_weights": "uniform"},
    "published-code": {},
}


@config_class("fens")
class FensConfig:
    """Options of FENS; the defaults are Table 8's for CIFAR-10."""

    aggregator: str = option(
        "nn", "how the members' logits become one prediction", choices=tuple(AGGREGATORS), main=True
    )
    hidden: int = option(0, "hidden units k of the aggregator 'nn'; 0: two per client", low=0)
    start: str = option(
        "drawn",
        "what 'per-class' starts from: drawn weights, the clients' label counts, or those of a teacher's pool",
        choices=("drawn", "label-counts", *sorted(POOLS)),
    )
    rounds: int = option(500, "federated rounds R of the aggregator", low=1, main=True)
    local_steps: int = option(1, "steps K of a client in each round", low=1, main=True)
    batch_size: int = option(128, "held examples per step", low=1)
    client_weights: str = option(
        "examples", "how clients count in a round: by the examples that their steps saw, or equally",
        choices=("examples", "uniform"), setting=False,
    )  # fmt: skip
    client_lr: float = option(1.0, "learning rate eta_l of the clients' steps", above=0.0)
    server_lr: float = option(0.001, "learning rate eta_s of the server's FedAdam", above=0.0, main=True)
    precision: str = option("int8", "precision in which the ensemble goes to the clients", choices=PRECISIONS)
    holdout: float = option(0.1, "share of its examples that a client keeps for the aggregator", above=0.0, high=0.9)
    holdout_per_class: bool = option(False, "the share is kept of every class, not of all examples at random")
    train_on: str = option("clients", "where the aggregator is trained", choices=("clients", "server"))
    quorum: float = option(
        0.5,
        "share of the uploading clients without whose answers a round fails",
        low=0.0,
        high=1.0,
        free=(RESUME,),
        setting=False,
    )
    patience_s: float = option(
        60.0,
        "seconds after which a round continues without the clients that are late; the first waits ten times as long, "
        "for the ensemble to reach them",
        above=0.0,
        free=(RESUME,),
    )
    evaluate_every: int = option(5, "rounds between two scores of the aggregator; 0: none", low=0)

    preset = presets(PRESETS)

    def __post_init__(self) -> None:
        if self.start != "drawn" and self.aggregator != "per-class":
            raise OptionError(
                f"setting 'fens.start' is {self.start!r} and 'fens.aggregator' {self.aggregator!r}: must be 'per-class'"
            )


def plan(config: FensConfig) -> Plan:
    """Return what a run involves.

    Clients send label counts if the aggregator uses them or starts from them, and hold out examples unless no step
    would use them. Start and steps of a trained aggregator draw random numbers.
    """
    counted = config.aggregator in ("weighted", "two-class-weighted") or config.start == "label-counts"
    on_server = config.train_on == "server"
    holdout = 0.0 if on_server or config.aggregator in STATIC else config.holdout
    return Plan(
        needs=frozenset({Need.LABEL_COUNTS} if counted else ()),
        asks=ClientAsks(holdout, config.holdout_per_class, calibrate=config.precision == "int8"),
        random=AGGREGATORS[config.aggregator].kind not in ("static", "voted"),
        labelled="required" if on_server else "used",
    )


def check_job(job: Job) -> None:
    """Refuse, before a client has worked, an aggregator that does not suit the classes or the examples.

    Raises:
        OptionError: The error names the setting, its value and the possible values.
    """
    aggregator = choose_aggregator(job.config.aggregator, job.num_classes)
    if job.config.start != "drawn" and aggregator.name != "per-class":
        raise OptionError(
            f"setting 'fens.start' is {job.config.start!r}, and there are 2 classes, whose aggregator 'per-class' has "
            "another form: must be 'drawn'"
        )
    if job.config.start in POOLS:
        TEACHERS[job.config.start].check(job, "setting 'fens.start'")
    if aggregator.kind == "torch":
        _start(job, aggregator)


def check_alone(job: Job) -> None:
    """Refuse an aggregator that is trained where there are neither clients nor labelled images.

    Raises:
        OptionError: The error names the aggregators that need no training.
    """
    if choose_aggregator(job.config.aggregator, job.num_classes).kind != "static":
        require_labelled(job)


def fit(job: Job, progress: Progress) -> Outcome:
    """Train the aggregator on the server's own labelled images, without a client; a static one needs none.

    Raises:
        OptionError: The aggregator is trained, and the server has no labelled images.
    """
    return fit_with_trainers(job, progress, ServersImages(job))


def fit_with_clients(job: Job, progress: Progress, clients: Clients) -> Outcome:
    """Send the ensemble to the clients, and train the aggregator with them, round by round."""
    if job.config.train_on == "server":
        return fit(job, progress)
    return fit_with_trainers(job, progress, Dialogue(job, clients))


def fit_with_trainers(job: Job, progress: Progress, trainers: Trainers) -> Outcome:
    """Determine the aggregator with given trainers: the clients, the server, or those of a bench."""
    began, aggregator = time.monotonic(), choose_aggregator(job.config.aggregator, job.num_classes)
    if aggregator.kind == "static":
        counts = _label_counts(job, "fens.aggregator", job.config.aggregator) if aggregator.counts else []
        params = aggregator.from_counts(counts)
    elif aggregator.kind == "voted":
        params = aggregator.from_counts(trainers.votes())
    else:
        params = _train_aggregator(job, progress, aggregator, trainers)
    return Outcome(ensemble=_spec(job, aggregator, params), timings={"aggregator": time.monotonic() - began})


def _train_aggregator(job: Job, progress: Progress, aggregator: Aggregator, trainers: Trainers) -> Params:
    """Run the federated rounds; resume in the round where an earlier process was interrupted."""
    config: FensConfig = job.config
    adam = FedAdam(config.server_lr)
    params = _start(job, aggregator)
    state, first = adam.start(params), 0
    if (snapshot := progress.resume()) is not None:
        (params, state), first = map(_as_numpy, snapshot.state), snapshot.step
    scores = _Scores(job, progress, aggregator)
    for number in range(first + 1, config.rounds + 1):
        updates = trainers.round(number, params)
        while trainers.notes:
            progress.record({"note": trainers.notes.pop(0)})
        if updates:
            equal = config.client_weights == "uniform"
            params, state = adam.step(params, state, [(update, 1 if equal else seen) for update, seen in updates])
        scores.record(number, params, updates=len(updates), mib=trainers.mib_per_client)
        progress.checkpoint(partial(_snapshot, number, params, state))
    return params


class _Scores:
    """Says how far the rounds are, and every now and then how good the aggregator is."""

    def __init__(self, job: Job, progress: Progress, aggregator: Aggregator) -> None:
        self._job, self._progress, self._aggregator = job, progress, aggregator
        self._scored: Remembered | None = None

    def record(self, number: int, params: Params, *, updates: int, mib: float) -> None:
        config, last = self._job.config, number == self._job.config.rounds
        scores: dict[str, float] = {}
        if self._job.observer is not None and config.evaluate_every and (number % config.evaluate_every == 0 or last):
            scores = self._observed(number, params)
            self._progress.record({"epoch": number, "clients": updates, "mib_per_client": round(mib, 6), **scores})
        self._progress.report(number, config.rounds, scores)

    def _observed(self, number: int, params: Params) -> dict[str, float]:
        from ..combiners.combiners import build_combiner
        from ..combiners.outcomes import build_ensemble
        from ..teacher.student import observe

        spec = _spec(self._job, self._aggregator, params)
        if self._scored is None:
            self._scored = Remembered(build_ensemble(self._job, spec))
        self._scored.ensemble.combiner = build_combiner(spec.combiner, spec.weights).to(self._job.device)
        return observe(self._job, number, self._scored)


def _start(job: Job, aggregator: Aggregator) -> Params:
    """Return the parameters before the first round."""
    if aggregator.kind == "torch":
        from ..combiners.gate import start_gate

        return start_gate(
            job.seed,
            members=max(1, len(job.uploads)),
            classes=job.num_classes,
            input_shape=job.input_shape,
            per_class=job.num_classes >= MANY_CLASSES,
        )
    config: FensConfig = job.config
    if config.start == "label-counts":
        return {"weight": label_shares(np.array(_label_counts(job, "fens.start", config.start), np.float32))}
    if config.start in POOLS:
        _, pool = TEACHERS[config.start].build(job)
        return {"weight": pool.shares().cpu().numpy()}
    return aggregator.start(job.seed, members=len(job.uploads), classes=job.num_classes, hidden=config.hidden)


def _label_counts(job: Job, key: str, value: str) -> Any:
    """Return the label counts of the uploads [M, C]."""
    silent = [upload.client for upload in job.uploads if upload.label_counts is None]
    if silent:
        raise OptionError(
            f"setting {key!r} is {value!r}: needs that every client reports its label counts; missing are "
            f"those of {', '.join(silent)}"
        )
    return [upload.label_counts for upload in job.uploads]


def _spec(job: Job, aggregator: Aggregator, params: Params) -> EnsembleSpec:
    import torch

    weights = {key: torch.from_numpy(np.array(value)) for key, value in params.items()}
    return EnsembleSpec.of(job, aggregator.combiner, weights, job.config.precision)


def _snapshot(number: int, params: Params, state: Params) -> Snapshot:
    import torch

    return Snapshot(number, [{key: torch.from_numpy(value) for key, value in each.items()} for each in (params, state)])


def _as_numpy(tensors: Mapping[str, Any]) -> Params:
    return {key: tensor.numpy() for key, tensor in tensors.items()}


METHOD = Method(
    name="fens",
    title="FENS",
    source="Allouah et al., NeurIPS 2024",
    config=FensConfig,
    fit=fit,
    kind="ensemble",
    check=check_job,
    plan=plan,
    client_phase=ClientPhase(fit_with_clients, check_alone),
)


# An ensemble with cached member logits, for repeated scoring while only the combiner changes.


# Of cached logits; batches beyond it are evaluated again each time.
MOST_BYTES = 2**29


class Remembered(nn.Module):
    """Caches the members' logits by the content of a batch, for callers that pass the same batches repeatedly.

    Args:
        ensemble: Its members must not change; its combiner may.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        self.ensemble = ensemble
        self._known: dict[bytes, Tensor] = {}
        self._bytes = 0

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return combined logits [B, C] for normalised images [B, ch, H, W]; no gradient passes."""
        key = hashlib.blake2b(x.detach().cpu().contiguous().numpy().data, digest_size=16).digest()
        logits = self._known.get(key)
        if logits is None:
            logits = self.ensemble.member_logits(x)
            size = logits.numel() * logits.element_size()
            if self._bytes + size <= MOST_BYTES:
                self._known[key] = logits
                self._bytes += size
        return self.ensemble.combine(logits, x)
