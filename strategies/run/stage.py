"""The server stage: run a method on the stored uploads of one round, and keep its outcome."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ..compute import ServerCompute
from ..compute.threads import follow_threads
from ..core.durable import read_json, store_errors
from ..core.errors import OneShotError, OptionError, StoreError, blaming, shorten_list
from ..core.facts import CLASSIFIER, Agreed, State, kind_of, weights_alone
from ..core.fingerprint import weights_sha256
from ..core.names import MatchedNames, is_adapter_state, match_names
from ..core.stage_options import NONE, RIDGE
from ..method import EnsembleSpec, Job, Method, Need, Outcome, Upload
from ..method import State as Weights
from ..statistics.uploaded import with_heads
from ..teacher.last_layer import average_rows, body_of, solve_layer
from ..teacher.weight_space import has_adapters
from ..uploads.checks import RenamedTensors, Signatures
from ..uploads.forms import forms_of
from .ensembles import FOLDER_NAME, save_ensemble
from .files import read_equal_weights, save_weights, write_json
from .journal import Journal
from .run_folder import IMAGES_FILE, STUDENT_FILE, RoundFolder, RunFolder, load_ensemble
from .run_folder import OUTCOME_FILE as OUTCOME_FILE
from .scratch import to_scratch

SUMS_FILE, SUMS_FACTS = "head-sums.safetensors", "head-sums.json"
Sums = Mapping[str, "Weights"]


@dataclass(frozen=True)
class Finish:
    """What a server stage does with the last layer of its result.

    Attributes:
        how: A value of the option ``finish``.
        folder: Of the round whose clients' sums are stored, or will be.
        ask: Returns the clients' sums of the last layer's inputs in a model; None where no client is in reach.
    """

    how: str
    folder: Path
    ask: Callable[[Job, Weights], Sums] | None = None

    def __call__(self, job: Job, outcome: Outcome) -> Outcome:
        """Return the outcome with its last layer made anew.

        Raises:
            OptionError: The result is no model of the student's architecture, a client reports no label counts, or the
                stored sums are those of another model and no client is in reach.
            QuorumError: Too few clients answer.
        """
        if self.how == NONE:
            return outcome
        student = outcome.student
        if student is None or has_adapters(job):
            found = "an ensemble" if student is None else "an adapter"
            raise OptionError(f"setting 'finish' is {self.how!r}: must be {NONE!r} for a result that is {found}")
        if self.how == RIDGE:
            return replace(outcome, student=solve_layer(job, student, self._sums(job, student)))
        return replace(outcome, student=average_rows(job, student))

    def _sums(self, job: Job, student: Weights) -> Sums:
        """Return the clients' sums, stored if they are of these weights, else asked for and stored."""
        body, facts = weights_sha256(body_of(job, student)), self.folder / SUMS_FACTS
        if facts.exists() and (stored := read_json(facts))["body-sha256"] == body:
            sums = read_equal_weights(self.folder / SUMS_FILE, str(stored["sums-sha256"]))
            return {name: {key: sums[f"{name}/{key}"] for key in stored["arrays"]} for name in stored["clients"]}
        if self.ask is None:
            raise OptionError(
                f"setting 'finish' is {RIDGE!r}: needs the clients' sums over the features of this result, which "
                f"{self.folder} does not hold: must be 'none' or 'counts' in a replay that ends with other weights"
            )
        found = self.ask(job, student)
        flat = {f"{name}/{key}": value for name, own in found.items() for key, value in own.items()}
        save_weights(self.folder / SUMS_FILE, flat)
        arrays = sorted(next(iter(found.values())))
        write_json(
            facts,
            {"body-sha256": body, "sums-sha256": weights_sha256(flat), "clients": sorted(found), "arrays": arrays},
        )
        return found


CHECKPOINT_S = 20.0
STAGE_FILE = "stage.json"
TRAFFIC_FILE = "traffic.json"  # one per round of uploads


@dataclass(frozen=True)
class StageReport:
    """The result of one round's server stage.

    Attributes:
        resumed_at: Epochs that an earlier process had finished; 0 for a fresh stage.
        seconds: Wall time in this process.
    """

    outcome: Outcome
    job: Job
    resumed_at: int
    seconds: float


def run_stage(  # noqa: PLR0913  what a stage needs
    method: Method,
    job: Job,
    compute: ServerCompute,
    folder: RoundFolder,
    *,
    log: Callable[[str], None],
    tick: Callable[[], None] | None = None,
    checkpoint_s: float = CHECKPOINT_S,
    finish: Finish | None = None,
) -> StageReport:
    """Run ``method`` on ``job``, journalled in ``folder`` so that a later call resumes where this one was interrupted.

    Args:
        checkpoint_s: Seconds between two checkpoints, at least.
        finish: What is done with the last layer of the result; None for nothing.

    Raises:
        OneShotError: The method refuses the job, failed, or ended with a model of NaN or Inf.
    """
    began = time.monotonic()
    check_agreement(job)
    job = join_sums(method, job, log)
    unit = "epoch" if method.client_phase is None else "round"
    given = job
    if method.any_model:
        # One tensor of all clients is in memory at a time, and no more of the result.
        unit, given = "tensor", replace(job, collect=partial(to_scratch, folder.path))
    with Journal(folder, log, label=method.name, unit=unit, interval_s=checkpoint_s, tick=tick) as journal:
        outcome = check_finite(method, compute.run(method, given, journal))
        if finish is not None:
            outcome = check_finite(method, finish(replace(job, device="cpu"), outcome))
        resumed_at = journal.resumed_at
    # This process uses the outcome on the CPU, wherever the stage ran.
    job = replace(job, device="cpu", threads=outcome.threads.get(0, job.threads))
    return StageReport(outcome, job, resumed_at, time.monotonic() - began)


def check_agreement(job: Job) -> None:
    """Refuse uploads whose classes or preprocessing differ from the job's, or from each other's."""
    agreed = Agreed(job.agreement)
    for upload in job.uploads:
        with blaming(f"upload of {upload.client!r}"):
            agreed.check(upload.facts.agreement)
        agreed.add(upload.client, upload.facts.agreement)


def check_finite(method: Method, outcome: Outcome) -> Outcome:
    """Return an outcome whose student and ensemble are finite.

    Raises:
        OneShotError: A tensor holds NaN or Inf: uploads with finite outputs may still overflow in training.
    """
    spec = outcome.ensemble
    for whose, state in (("student", outcome.student), ("ensemble", None if spec is None else spec.weights)):
        for name, value in (state or {}).items():
            if not bool(value.isfinite().all()):
                raise OneShotError(
                    f"method {method.name!r} ended with NaN or Inf in tensor {name!r} of the {whose}: must be finite; "
                    "leave out an upload with huge weights, or lower the method's learning rates"
                )
    return outcome


def with_start(method: Method, job: Job, run: RunFolder) -> Job:
    """Return a job with the weights that the run's server sent to its clients, for a method that merges updates."""
    if Need.COMMON_START not in method.needs or (start := run.start()) is None:
        return job
    return replace(job, start=start, clients_seed=job.seed)


def join_sums(method: Method, job: Job, log: Callable[[str], None] = lambda _: None) -> Job:
    """Return the job as a method works on it: a method of classifiers takes the sums of features as heads."""
    return with_heads(job, log) if method.uploads == CLASSIFIER else job


def pinned_clients(folder: RoundFolder) -> tuple[str, ...] | None:
    """Return the clients that the server stage of a round works with, or None if it has not begun.

    An upload that arrives later, before a resume say, must not change a stage that is under way.
    """
    path = folder.path / STAGE_FILE
    return tuple(read_json(path)["clients"]) if path.exists() else None


def pin_clients(
    folder: RoundFolder,
    present: Iterable[str],
    quarantined: Iterable[str] = (),
    *,
    held: Iterable[str] | None = None,
) -> None:
    """Begin the server stage of a round: fix its clients, unless an earlier process has done so.

    Args:
        present: Clients of this upload phase. Uploads that are here without one of these names are set aside: a
            client without a name has sent another one since, and must not count twice.
        quarantined: Those of them that the stage works without; their uploads stay where replays find them.
        held: The clients whose uploads had arrived when the phase ended; a later upload stays for replays only. None
            for those that are here now.
    """
    if pinned_clients(folder) is None:
        came, out = set(present), set(quarantined)
        aside = sorted(set(folder.held() if held is None else held) - came)
        write_json(folder.path / STAGE_FILE, {"clients": sorted(came - out), "set-aside": aside})


def unpin_clients(folder: RoundFolder) -> None:
    """Undo the beginning of a round's server stage, whose work belongs to uploads that are missing."""
    folder.clear_checkpoint()
    with store_errors(folder.path):
        (folder.path / STAGE_FILE).unlink(missing_ok=True)


def usable_uploads(folder: RoundFolder) -> tuple[Upload, ...]:
    """Return the uploads of a round, those that came after its server stage began too, without those set aside."""
    path = folder.path / STAGE_FILE
    aside = read_json(path).get("set-aside", []) if path.exists() else []
    return tuple(upload for upload in folder.uploads() if upload.client not in aside)


def _by_model_names(
    uploads: tuple[Upload, ...], job: Job, log: Callable[[str], None]
) -> tuple[tuple[Upload, ...], Job]:
    """Return uploads and start under the names of the models' tensors, which wrappers of either may have changed."""
    signatures = Signatures(job.builders)
    found: list[Upload] = []
    for upload in uploads:
        names = weights_alone(dict.fromkeys(upload.open())) if upload.open is not None else {}
        if not names or upload.architecture not in job.builders or is_adapter_state(names):
            found.append(upload)
            continue
        wanted = signatures[upload.architecture]
        own = match_names(names, wanted, getattr(wanted, "ties", None))
        if own.missing or own.extra or own.sources == {name: name for name in names}:  # other models are refused later
            found.append(upload)
            continue
        for note in own.notes or ["names are those of the model without what wraps it"]:
            log(f"upload of {upload.client!r}: {note}")
        opened = partial(_renamed, upload.open or upload.read, own)
        found.append(replace(upload, read=partial(_read_renamed, upload.read, own), open=opened))
        if job.start is not None and set(job.start) == set(names):
            job = replace(job, start=dict(RenamedTensors(job.start, own)))
    return tuple(found), job


def _renamed(opened: Callable[[], Mapping[str, Tensor]], names: MatchedNames) -> Mapping[str, Tensor]:
    return RenamedTensors(opened(), names)


def _read_renamed(read: Callable[[], State], names: MatchedNames) -> State:
    return dict(RenamedTensors(read(), names))


def keep_outcome(folder: RunFolder, report: StageReport, server_round: int = 1) -> str:
    """Store an outcome, the weights before the facts: only then is the round finished.

    Returns:
        The sha256 of the result's weights: of the student, else of the ensemble.
    """
    outcome, job = report.outcome, report.job
    # Round 1 lives in the run folder itself. A later round must not touch its files before this one's facts are
    # written: a crash in between would mix the two.
    place = folder.round(server_round).path
    _write_weights(place, outcome, job)
    digest = ensemble_sha256(job.uploads, outcome.ensemble) if outcome.ensemble is not None else ""
    if outcome.student is not None:
        digest = weights_sha256(outcome.student)
    facts = {
        "round": server_round,
        "clients": [upload.client for upload in job.uploads],
        "student": outcome.student is not None,
        "combiner": outcome.ensemble.combiner if outcome.ensemble is not None else "",
        "resumed-at": report.resumed_at,
        "seconds": report.seconds,
        "timings": dict(outcome.timings),
        "work": dict(outcome.work),
        "threads": {str(epoch): count for epoch, count in outcome.threads.items()},
        "weights-sha256": digest,
        "images-sha256": "" if outcome.images is None else weights_sha256({"images": outcome.images}),
    }
    write_json(folder.path / OUTCOME_FILE, facts)
    if server_round > 1:
        _write_weights(folder.path, outcome, job)
    folder.round(server_round).clear_checkpoint()
    return digest


def last_finished_round(folder: RunFolder) -> int:
    """Return the last round whose outcome is stored, 0 if there is none."""
    return int((folder.outcome() or {"round": 0})["round"])


def last_round(folder: RunFolder) -> RoundFolder:
    """Return the last round whose outcome is stored; the first one before any has finished."""
    return folder.round(max(1, last_finished_round(folder)))


def result_digest(folder: RunFolder) -> str:
    """Return the sha256 of the stored result's weights, see :func:`keep_outcome`."""
    return str(read_json(folder.path / OUTCOME_FILE)["weights-sha256"])


def load_report(folder: RunFolder, job: Job) -> StageReport:
    """Read the stored outcome of the last finished round, the inverse of :func:`keep_outcome`."""
    facts = read_json(folder.path / OUTCOME_FILE)
    if not set(facts["clients"]) <= {upload.client for upload in job.uploads}:
        job = with_heads(job)  # the members of a mixed federation
    uploads = tuple(upload for upload in job.uploads if upload.client in facts["clients"])
    place, digest = folder.round(facts["round"]).path, facts["weights-sha256"]
    images = facts["images-sha256"] and read_equal_weights(place / IMAGES_FILE, facts["images-sha256"])
    outcome = Outcome(
        student=read_equal_weights(place / STUDENT_FILE, digest) if facts["student"] else None,
        ensemble=load_ensemble(place / FOLDER_NAME, job.builders)[0] if facts["combiner"] else None,
        timings=facts["timings"],
        work=facts["work"],
        threads={int(epoch): count for epoch, count in facts.get("threads", {}).items()},
        images=images["images"] if images else None,
    )
    if facts["round"] > 1:  # the copy in the run folder may be incomplete after a crash
        _write_weights(folder.path, outcome, replace(job, uploads=uploads))
    job = replace(job, uploads=uploads, device="cpu", threads=outcome.threads.get(0, job.threads))
    return StageReport(outcome, job, int(facts["resumed-at"]), float(facts["seconds"]))


def _write_weights(place: Path, outcome: Outcome, job: Job) -> None:
    """Write an outcome's images, ensemble and student into a folder."""
    if outcome.images is not None:
        save_weights(place / IMAGES_FILE, {"images": outcome.images})
    if outcome.ensemble is not None:
        save_ensemble(place / FOLDER_NAME, outcome.ensemble, job.uploads, forms_of(job.builders))
    if outcome.student is not None:
        save_weights(place / STUDENT_FILE, outcome.student)


def ensemble_sha256(uploads: tuple[Upload, ...], spec: EnsembleSpec) -> str:
    """Return a digest of an ensemble: its members' weights in order and the tensors of its combiner."""
    members = {upload.client: upload for upload in uploads}
    digest = hashlib.sha256(spec.combiner.encode())
    for client in spec.clients:
        digest.update(weights_sha256(members[client].read()).encode())
    digest.update(weights_sha256(spec.weights).encode())
    return digest.hexdigest()


def replay(  # noqa: PLR0913  what a replay needs
    method: Method,
    job: Job,
    source: Path,
    *,
    compute: ServerCompute,
    target: RunFolder,
    log: Callable[[str], None],
    checkpoint_s: float = CHECKPOINT_S,
    finish: str = NONE,
) -> StageReport:
    """Run a server method on the stored uploads of an earlier run; asks no client and needs no Flower.

    Args:
        method: The method.
        job: The job without uploads.
        source: The run folder that holds the uploads; it is only read. Of several rounds, the last complete one.
        compute: Where to run.
        target: The run folder of the replay; resumed if it was interrupted.
        log: Takes a line for the user.
        checkpoint_s: Seconds between two checkpoints, at least.
        finish: What is done with the last layer of the result, a value of the option ``finish``.

    Raises:
        StoreError: ``source`` holds no uploads, or a damaged one.
        OptionError: An upload is of an architecture that the job cannot build.
    """
    with RunFolder.open(source, write=False) as run:
        uploads, held = usable_uploads(last_round(run)), last_round(run).path
        if unlisted := last_round(run).unlisted():
            names = shorten_list(unlisted)
            log(f"{held / 'uploads'}: left out are {names}, which uploads.jsonl does not list as accepted")
        if run.info.get("method") == method.name:
            job = follow_threads(job, run.outcome() or {})
        job = with_start(method, job, run)
    if not uploads:
        raise StoreError(f"{source}: no uploads are stored here, so there is nothing to replay")
    of_its_kind = {upload.architecture for upload in uploads if kind_of(upload.architecture) == method.uploads}
    if unknown := sorted(of_its_kind - job.builders.keys()):
        raise OptionError(
            f"{source} holds uploads of architecture {', '.join(unknown)}: must be among the models given by name, "
            f"{', '.join(job.builders)}"
        )
    uploads, job = _by_model_names(uploads, job, log)
    pin_clients(target.round(1), [upload.client for upload in uploads])
    uploads = tuple(upload for upload in uploads if upload.client in (pinned_clients(target.round(1)) or ()))
    if last_finished_round(target):
        return load_report(target, replace(job, uploads=uploads))
    job = replace(job, uploads=uploads)
    report = run_stage(
        method, job, compute, target.round(1), log=log, checkpoint_s=checkpoint_s, finish=Finish(finish, held)
    )
    keep_outcome(target, report)
    return report
