"""Scores on held-out images: every client alone, the averages, the ensemble, and the method's result."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from server_app.settings.choices import CHOICES, Choice
from server_app.settings.server_data import HeldOut, OwnScores, Scorer, to_text
from strategies.combiners.combiners import build_combiner
from strategies.combiners.outcomes import load_model
from strategies.core.durable import read_json
from strategies.core.errors import StoreError, shorten_list
from strategies.core.facts import CLASSIFIER, HEADLINES, PREDICTING
from strategies.core.fingerprint import weights_sha256
from strategies.method import METHODS, EnsembleSpec, Job, Silent
from strategies.run.files import write_json
from strategies.run.journal import Journal
from strategies.run.stage import StageReport
from strategies.run.uploads import StoredWeights
from strategies.scores.values import LOWER_IS_BETTER
from strategies.teacher.ensemble import Ensemble, load_member


class KeptScores:
    """Scores of the same uploads, in a file that several methods share.

    Cached scores hold for the same uploads, examples, student, normalisation, device and threads; for others they are
    computed again. Of two processes that write the file at once, one may lose what it wrote, and it is computed again.
    """

    def __init__(self, path: Path, job: Job, held_out: Scorer) -> None:
        self._path = path
        self._key = _key(job, held_out)

    def __call__(self, what: str, make: Callable[[], Any]) -> Any:
        """Return the scores of that name, JSON values; compute them if the file lacks them.

        If the file cannot be read or written, the scores are computed again.
        """
        if self._key is None:
            return make()
        kept = self._read().get(self._key, {})
        if what not in kept:
            kept[what] = make()
            found = self._read()  # again, since another process may have written meanwhile
            found.setdefault(self._key, {})[what] = kept[what]
            with suppress(StoreError):
                write_json(self._path, found)
        return kept[what]

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = read_json(self._path) if self._path.exists() else {}
        except StoreError:
            return {}
        return found if isinstance(found, dict) else {}


def _key(job: Job, held_out: Scorer) -> str | None:
    """Return a digest of everything that determines the scores; None for uploads that are not stored."""
    if not isinstance(held_out, HeldOut):  # the data that a function reads are unknown
        return None
    uploads = []
    for upload in job.uploads:
        if not isinstance(upload.read, StoredWeights):
            return None
        uploads.append([upload.client, upload.architecture, upload.read.sha256, upload.num_examples])
    normalization = [held_out.normalization.mean, held_out.normalization.std]
    facts = [uploads, job.student, normalization, job.device, job.threads, held_out.digest, "effects"]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


PLAIN = EnsembleSpec((), "mean")
EXACT = ", members in float32"  # suffix of an ensemble's name where it is scored without its quantisation


@dataclass(frozen=True)
class Row:
    """One line of the result table.

    Attributes:
        name: The model.
        kind: Its kind: client, baseline, ensemble or student.
        accuracy: In %, on the held-out examples; None where a function of the user's own has other scores.
        scores: All scores with their intervals, by name.
        details: What else is known of the answers, see :func:`strategies.scores.values.describe`.
        effects: What each held-out example adds to the scores, see :meth:`.HeldOut.scored`; empty where not known.
    """

    name: str
    kind: str
    accuracy: float | None
    scores: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    effects: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, kind: str, found: Mapping[str, Any]) -> Row:
        """Return the row of a model, given its scores as :meth:`.HeldOut.scored` describes them."""
        details = {key: value for key, value in found.items() if key not in ("accuracy", "scores", "effects")}
        return cls(name, kind, found["accuracy"], found["scores"], details, found.get("effects", {}))

    def as_json(self) -> dict[str, Any]:
        """Return the row for result.json."""
        return {"name": self.name, "kind": self.kind, "accuracy": self.accuracy, "scores": dict(self.scores)}


ANSWERS_FILE = "answers.json"  # what each held-out example adds to the scores of a run's results


@dataclass(frozen=True)
class StoredAnswers:
    """What each held-out example adds to the scores of a run's baselines and results, and the examples.

    Attributes:
        digest: Of the examples; empty for a run that has none, as one of another project.
        effects: Of each baseline and result those of :meth:`strategies.scores.sums.Answers.effects`; the accuracy's
            alone in a run of an earlier version.
        labels: int64 [n]; zeros in a run of an earlier version.
        num_classes: C; 0 in a run of an earlier version.
        groups: int64 [n]; None if each example is its own.
    """

    digest: str = ""
    effects: Mapping[str, Mapping[str, npt.NDArray[np.float64]]] = field(default_factory=dict)
    labels: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num_classes: int = 0
    groups: npt.NDArray[np.int64] | None = None


def write_answers(folder: Path, rows: Sequence[Row], held_out: HeldOut, num_classes: int) -> None:
    """Write what the baselines and results answer to each held-out example, for comparisons with those of other runs.

    Raises:
        StoreError: The disk refuses.
    """
    facts = {
        "examples": len(held_out.data.labels),
        "examples-sha256": held_out.digest,
        "num-classes": num_classes,
        "labels": to_text(held_out.data.labels.numpy().astype("<i4")),
        **({} if held_out.groups is None else {"groups": to_text(held_out.groups.astype("<i4"))}),
        "effects": {row.name: dict(row.effects) for row in rows if row.kind != "client"},
    }
    write_json(folder / ANSWERS_FILE, facts)


def read_answers(folder: Path) -> StoredAnswers:
    """Read what :func:`write_answers` has written; empty for a run without it.

    Raises:
        StoreError: The file is damaged.
    """
    path = folder / ANSWERS_FILE
    if not path.exists():
        return StoredAnswers()
    found = read_json(path)
    try:
        n = int(found["examples"])

        def numbers(name: str, text: str, kind: str = "<f4") -> npt.NDArray[Any]:
            data = base64.b64decode(text)
            if name == "accuracy":
                return np.unpackbits(np.frombuffer(data, np.uint8), count=n).astype(np.float64)
            return np.frombuffer(data, kind, count=n).astype(np.float64 if kind == "<f4" else np.int64)

        named = found.get("effects") or {name: {"accuracy": text} for name, text in found["right"].items()}
        effects = {row: {name: numbers(name, text) for name, text in each.items()} for row, each in named.items()}
        labels, groups = (numbers(key, found[key], "<i4") if key in found else None for key in ("labels", "groups"))
        labels = np.zeros(n, np.int64) if labels is None else labels
        return StoredAnswers(str(found["examples-sha256"]), effects, labels, int(found.get("num-classes", 0)), groups)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {error!s:.80}") from error


def evaluate(
    report: StageReport,
    method_name: str,
    held_out: Scorer,
    *,
    log: Callable[[str], None],
    kept: Path | None = None,
    averaging: Any = None,
) -> list[Row]:
    """Return :func:`result_table` and log its progress; many large models on one core take minutes.

    Args:
        kept: The file of scores that methods on the same uploads share; None without one.
        averaging: The config of the FedAvg that stands beside the method; None: its defaults.
    """
    outcome, uploads, method = report.outcome, len(report.job.uploads), CHOICES[method_name]
    averaged = method.uploads == CLASSIFIER and method_name != "fedavg" and _fits_fedavg(report.job)
    passes = (
        0 if outcome.ensemble is None or _is_of_all(method) else 1 + (outcome.ensemble.precision != PLAIN.precision)
    )
    own = uploads * passes + (outcome.student is not None)
    # Models that are no classifiers are scored alone, and in no ensemble.
    once = held_out.member_passes if report.job.num_classes else 1
    models = uploads * once * (method.uploads in PREDICTING) + averaged + own
    total, done = models * held_out.num_batches, 0
    with Journal(None, log, label="evaluation", unit="batch") as journal:

        def count(models: int) -> None:
            nonlocal done
            done += models
            journal.report(done, total)

        stored = None if kept is None else KeptScores(kept, report.job, held_out)
        rows = result_table(report, method_name, replace(held_out, passed=count), kept=stored, averaging=averaging)
        journal.report(total, total)  # kept scores need no pass
    if isinstance(held_out, OwnScores) and held_out.left_out is not None:
        for line, names in held_out.odd.items():
            held_out.left_out(f"{line} ({shorten_list(names)})")
    # Trained models are seldom so bad.
    known = [row.accuracy for row in rows if row.accuracy is not None]
    if isinstance(held_out, OwnScores) and 0 < max(known, default=0.0) <= 1:
        log(f"warning: every accuracy is from 0 to 1 %: {held_out.what} must return per cent, 0 to 100; is it a share?")
    return rows


def result_table(
    report: StageReport, method_name: str, held_out: Scorer, *, kept: KeptScores | None = None, averaging: Any = None
) -> list[Row]:
    """Compare the method's result with the baselines of the same uploads.

    Returns:
        A row for every client whose upload is a classifier, or is merged in weight space. For closed-set classifiers
        also the averaged ensemble, and one-shot FedAvg if the architectures permit it. The method's own rows come last.
    """
    job, method, spec = report.job, CHOICES[method_name], report.outcome.ensemble
    if not job.uploads:  # clients that answered round by round leave no uploads
        title = method.titled(job.config)
        return [Row.of(title, method.kind, held_out.of_model(title).scored(load_model(report.outcome, job)))]
    rows, together = list[Row](), dict[str, Any]()
    keep = kept or (lambda _, make: make())
    usual = METHODS["fedavg"].config()
    averaging = averaging or usual
    averaged = "fedavg" if averaging == usual else f"fedavg {averaging}"
    if method.uploads in PREDICTING:
        used = spec if spec and _is_of_all(method) else PLAIN
        what = f"members, {used.combiner} {weights_sha256(used.weights)}"
        alone, together = keep(what, lambda: _members(job, used, held_out))
        rows = [Row.of(upload.client, "client", score) for upload, score in zip(job.uploads, alone, strict=True)]
    for name in ("fedavg", "fedens") if method.uploads == CLASSIFIER else ():
        if name != method_name and (job.num_classes or name != "fedens"):
            score = (
                together
                if name == "fedens"
                else keep(averaged, lambda: _fedavg(job, averaging, held_out.of_model(METHODS["fedavg"].title)))
            )
            rows += [] if score is None else [Row.of(METHODS[name].title, METHODS[name].kind, score)]
    if _is_of_all(method):
        rows.append(Row.of(method.titled(job.config), method.kind, together))
    elif report.outcome.ensemble is not None:
        both = replace(report.outcome, student=None)
        title = method.titled(job.config) if report.outcome.student is None else f"{method.title} ensemble"
        if spec is not None and spec.precision != PLAIN.precision:  # shows the cost of quantisation
            exact = replace(both, ensemble=replace(spec, precision=PLAIN.precision))
            rows.append(Row.of(f"{title}{EXACT}", "ensemble", held_out.scored(load_model(exact, job))))
        rows.append(Row.of(title, "ensemble", held_out.scored(load_model(both, job))))
    if report.outcome.student is not None:
        kind = method.kind if method.kind != "ensemble" else "student"
        title = method.titled(job.config)
        rows.append(Row.of(title, kind, held_out.of_model(title).scored(load_model(report.outcome, job))))
    return rows


def _members(job: Job, spec: EnsembleSpec, held_out: Scorer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if not job.num_classes:  # the mean of outputs that are no logits says nothing
        return [held_out.of_model(up.client).scored(load_member(up, job.builders)) for up in job.uploads], {}
    combiner = build_combiner(spec.combiner, spec.weights)
    return held_out.member_scores(Ensemble.from_uploads(job.uploads, job.builders, combiner))


def _fedavg(job: Job, averaging: Any, held_out: Scorer) -> dict[str, Any] | None:
    if not _fits_fedavg(job):
        return None
    averaged = METHODS["fedavg"].fit(replace(job, config=averaging, device="cpu"), Silent())
    return held_out.scored(load_model(averaged, job))


def _is_of_all(method: Choice) -> bool:
    """Return whether a method's result is the ensemble of all uploads, scored in the same pass as its members."""
    return method.name == "fedens" or method.uploads in PREDICTING[1:]


def _fits_fedavg(job: Job) -> bool:
    return {upload.architecture for upload in job.uploads} == {job.student}


def best_score(metrics: Sequence[Mapping[str, Any]], last: float | None, metric: str = "accuracy") -> float | None:
    """Return the best score over the server epochs, which papers report; nothing is chosen by it here.

    None also for a score of the user's own, of which is not known whether more or less is better.
    """
    if metric not in HEADLINES:
        return None
    best = min if metric in LOWER_IS_BETTER else max
    return None if last is None else round(best([last, *(float(row[metric]) for row in metrics if metric in row)]), 4)
