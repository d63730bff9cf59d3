"""What every method of the registry promises, checked on three tiny clients."""

import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import fusefl_fakes
import method_fakes
import pytest
import torch
from fusefl_fakes import Answering, First
from method_fakes import Book, telling
from torch import nn

import strategies
from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError
from strategies.core.facts import SUFFIXES, UploadFacts
from strategies.core.fingerprint import encode_fingerprint
from strategies.core.options import flatten, options_of, parse
from strategies.method import (
    GIVEN,
    METHODS,
    EnsembleSpec,
    Job,
    Method,
    Need,
    Normalization,
    Outcome,
    Progress,
    Silent,
    Upload,
)
from strategies.statistics.uploaded import FeatureSums
from strategies.teacher.weight_space import open_weights
from strategies.uploads.needs import check_needs

ROOT = Path(strategies.__file__).parent
IMAGES = torch.linspace(-1, 1, 3 * 64).view(3, 1, 8, 8)

# Everything is named: the pinned value shall not depend on defaults.
TALLY: dict[str, Any] = {
    "epochs": 2, "batch_size": 6, "images": 14, "probes": 9, "counts": "tempered", "sharpness": 1.5, "rule": "log",
    "calibrated": True, "agreement": 0.0, "temperature": 1.5,
    "smoothing": 0.02, "cap_examples": False, "kd_temperature": 1.0, "student_lr": 0.01,
    "start": "class-weighted", "layers": 3, "inverted": 0, "spanned": 0, "teacher_precision": "float32",
}  # fmt: skip
# In the same arithmetic on every processor.
GENERATED: dict[str, Any] = {
    "epochs": 2, "generator_steps": 2, "latent": 8, "batch_size": 6, "synthesis_batch_size": 8,
    "generator_precision": "float32",
}  # fmt: skip
# Settings that make a method small; methods that train nothing need none.
SMALL: dict[str, dict[str, Any]] = {
    "fens": {"rounds": 2, "batch_size": 4, "hidden": 5},
    "feddf": {"epochs": 2, "batch_size": 6},
    "fedkd": {"epochs": 2, "batch_size": 6, "student_lr": 0.01},
    "fed-et": {"epochs": 2, "batch_size": 6, "student_lr": 0.01},
    "distill": {"steps": 3, "batch_size": 6, "optimizer": "sgd", "student_lr": 0.1},
    "f-dafl": GENERATED,
    "f-adi": {"epochs": 2, "inversion_steps": 2, "batch_size": 6, "synthesis_batch_size": 8},
    "co-boosting": GENERATED,
    "dense": GENERATED,
    "intactofl": GENERATED,
    "tally": TALLY,
    "flboost": {"iterations": 2, "batch_size": 6, "latent": 8, "generator_precision": "float32"},
    "fedcvae-ens": {"epochs": 2, "images": 12, "batch_size": 6, "student_lr": 0.01},
    "ridge": {"penalty": 0.01, "balance": "scores"},
    "lda": {"shrinkage": 0.1},
    "fedpft": {"epochs": 3, "batch_size": 6, "lr": 0.1, "limit": 40},
    "fed-gen": {"iterations": 2, "batch_size": 6, "latent": 8, "generator_width": 8},
    "fusefl": {"draws": 20},
}
WITH_CLIENTS = {"fusefl"}  # they ask their clients, and do nothing without them
# The mean absolute logit of the outcome on IMAGES. A change here changes every published number.
# Where Adam trains a fresh student, it has no bias before batch normalisation. The gradient of such a bias is 0 except
# for rounding, which differs between processors, and Adam makes whole steps of it.
BY_ADAM = ("fedkd", "fed-et", "fedcvae-ens")
# Their generator has such biases too, whatever the student: processors differ by up to 0.2 % there.
BY_GENERATOR = ("dense", "flboost")
PINNED = {
    "fedavg": 0.284510,
    "task-arithmetic": 0.272327,
    "ties": 0.212594,
    "dare": 0.940833,
    "tsv": 0.278865,
    "fisher": 0.297139,
    "regmean": 0.286407,
    "fedens": 0.720615,
    "dw-fedens": 0.991382,
    "label-count-ensemble": 0.610334,
    "feddf": 0.153180,
    "fedkd": 0.373098,
    "fed-et": 0.490541,
    "distill": 0.300714,
    "f-dafl": 0.125350,
    "f-adi": 0.150133,
    "dense": 0.150976,
    "co-boosting": 0.155494,
    "intactofl": 0.197755,
    "tally": 0.580664,
    "flboost": 0.423003,
    "fedov": 0.763890,
    "fafi": 0.122312,
    "fedcvae-ens": 0.224959,
    "fusefl": 0.182494,
    "fens": 0.419236,
    "fed-gen": 0.284510,
    "ridge": 0.181974,
    "lda": 15.910163,
    "fedpft": 1.838824,
}


def narrow(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, outputs))


def wide(outputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 5, 5), nn.ReLU(), nn.Flatten(), nn.Linear(80, outputs))


class Prototyped(nn.Module):
    """Four logits, and twelve features."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 3, 5), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.prototypes = nn.Parameter(torch.zeros(4, 12))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.encoder(images)
        return torch.cat([nn.functional.normalize(features) @ self.prototypes.T, features], dim=1)


class Decoder(nn.Module):
    latent = 3

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(7, 64)

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat([noise, nn.functional.one_hot(labels, 4)], dim=1)).view(-1, 1, 8, 8)  # type: ignore[no-any-return]


class Head(nn.Module):
    """A head on the first five pixels, which stand for features."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(images.flatten(1)[:, :5])  # type: ignore[no-any-return]


def feature_sums() -> nn.Module:
    return FeatureSums(4, 5, encode_fingerprint({"backbone": "tiny"}), second=("gram", "squares"))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "narrow": narrow, "wide": wide, "narrow+unknown": partial(narrow, 5), "wide+unknown": partial(wide, 5),
    "narrow+prototypes": Prototyped, "narrow+block": First, "cvae-decoder": Decoder, "statistics": feature_sums,
    "head": Head,
}  # fmt: skip


@dataclass(frozen=True)
class Fixed:
    """Reads the same weights at each call; a class, because a job has to be picklable."""

    state: dict[str, torch.Tensor]

    def __call__(self) -> dict[str, torch.Tensor]:
        return self.state


def tiny_state(architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """Weights drawn without torch's initialisers, so that pinned numbers depend on little."""
    model, rng = BUILDERS[architecture](), torch.Generator().manual_seed(seed)
    if isinstance(model, FeatureSums):
        labels = torch.arange(20) % 4
        rows = torch.rand(20, 5, generator=rng, dtype=torch.float64) - 0.5 + nn.functional.one_hot(labels, 5)
        sums = model.empty()
        for part in sums:
            part.include(nn.functional.normalize(rows), labels)
        model.fill(*sums)
        return dict(model.state_dict())
    return {
        name: value
        if value.dtype == torch.int64
        else torch.rand(value.shape, generator=rng) - 0.5 * ("var" not in name)
        for name, value in model.state_dict().items()
    }


def measured(upload: Upload, seed: int) -> Upload:
    """An upload with Fisher diagonals of its parameters, and Gram matrices of its linear layer, beside its weights."""
    state, rng = upload.read(), torch.Generator().manual_seed(seed)
    inputs = torch.rand(109, 120, generator=rng, dtype=torch.float64)
    sums = {f"fisher:{name}": torch.rand(state[name].shape, generator=rng) for name in ("0.weight", "4.weight")}
    return replace(upload, open=Fixed({**state, **sums, "gram:4": inputs @ inputs.T}))


def tiny_job(method: Method, *, seed: int = 0) -> Job:
    architectures = ["narrow"] * 3 if Need.SAME_ARCHITECTURE in method.needs else ["narrow", "wide", "narrow"]
    if method.uploads in SUFFIXES:
        architectures = [name + SUFFIXES[method.uploads] for name in architectures]
    elif method.uploads == "cvae":
        architectures = ["cvae-decoder"] * 3
    elif method.uploads == "statistics":
        architectures = ["statistics"] * 3
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", name, 10 * (k + 1), (5 * (k == 0), 5 + k, 5, 9 * k)), Fixed(tiny_state(name, k)))
        for k, name in enumerate(architectures)
    )
    config = method.config(**SMALL.get(method.name, {}))
    proxy = torch.randint(0, 256, (9, 1, 8, 8), generator=torch.Generator().manual_seed(9), dtype=torch.uint8)
    student = "head" if method.uploads == "statistics" else "narrow"
    job = Job(uploads, BUILDERS, student, 4, (1, 8, 8), Normalization((0.5,), (0.5,)), config, seed=seed)
    if Need.COMMON_START in method.needs:
        job = replace(job, start=tiny_state("narrow", 9), clients_seed=seed)
    if method.plan(config).asks.sums:
        job = replace(job, uploads=tuple(measured(upload, k) for k, upload in enumerate(uploads)))
    return replace(job, proxy=proxy, labelled=(proxy, torch.arange(9) % 4))


def fitted(method: Method, job: Job, progress: Progress | None = None) -> Outcome:
    """Run a method, with clients in reach where it cannot do without them."""
    progress = progress or Silent()
    if method.name in WITH_CLIENTS:
        asked = replace(job, uploads=tuple(telling(upload, num_examples=20) for upload in job.uploads))
        return method.client_phase.fit(asked, progress, Answering(asked))
    return method.fit(job, progress)


def predict(outcome: Outcome, job: Job) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = load_model(outcome, job)(IMAGES)
    return logits


@cache
def usual_outcome(name: str) -> Outcome:
    """Return the outcome of a method's tiny job; tests only look at it."""
    return fitted(METHODS[name], tiny_job(METHODS[name]))


@cache
def usual(name: str) -> torch.Tensor:
    """Return what the outcome of a method's tiny job predicts."""
    return predict(usual_outcome(name), tiny_job(METHODS[name]))


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> Method:
    return METHODS[request.param]


def test_method_describes_itself(method: Method) -> None:
    assert METHODS[method.name] is method
    assert method.kind in {"student", "ensemble", "baseline"}
    assert is_dataclass(method.config)
    assert all(option.help for option in options_of(method.config, method.name))
    assert method.title
    assert method.source
    assert METHODS.keys() == PINNED.keys()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("warm", [2, 1000])
def test_gpu_gives_what_the_cpu_gives_and_the_same_bits(
    method: Method, warm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.core.gpu.WARM", warm)  # with graphs, and without
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    job = replace(tiny_job(method), device="cuda")
    first, again = (predict(fitted(method, job), tiny_job(method)) for _ in range(2))
    assert torch.equal(first, again)
    away = 0.1 if method.name in BY_ADAM or method.name in BY_GENERATOR else 1e-4
    assert float((first - usual(method.name)).norm()) <= away * float(usual(method.name).norm())


def test_config_goes_through_flat_settings_and_back(method: Method) -> None:
    config = method.config(**SMALL.get(method.name, {}))
    assert parse(method.config, flatten(config, method.name), method.name) == config
    assert parse(method.config, {}, method.name) == method.config()
    for field in fields(method.config):
        with pytest.raises(AttributeError):
            setattr(config, field.name, None)


def test_value_out_of_range_of_any_option_is_refused_by_its_key(method: Method) -> None:
    for option in options_of(method.config, method.name):
        outside = {bool: 7, str: "no such word"}.get(option.kind, -(10.0**9) if option.kind is float else -(10**9))
        with pytest.raises(OptionError, match=f"'{option.key}' is {outside!r}: must be"):
            parse(method.config, {option.key: outside}, method.name)


def test_fit_meets_the_needs_and_ends_with_the_result_of_its_kind(method: Method) -> None:
    job = tiny_job(method)
    check_needs(method, job)
    outcome = usual_outcome(method.name)
    assert (outcome.ensemble is not None) == (method.kind == "ensemble" or method.name in ("co-boosting", "tally"))
    assert (outcome.student is not None) == (method.kind != "ensemble")
    logits = usual(method.name)
    assert logits.shape == (3, 4)
    assert bool(logits.isfinite().all())


def test_teacher_of_the_job_is_distilled_or_refused(method: Method) -> None:
    job = tiny_job(method)
    clients, counts = tuple(upload.client for upload in job.uploads), [upload.label_counts for upload in job.uploads]
    own = EnsembleSpec(clients, "mean")
    if Need.LABEL_COUNTS in method.needs:
        own = EnsembleSpec(clients, "label-count", {"weights": torch.tensor(counts, dtype=torch.float32)})
    if GIVEN not in method.teachers:
        with pytest.raises(OptionError, match=f"'{method.name}' does not distil an ensemble .*: feddf"):
            check_needs(method, replace(job, teacher=own))
        return
    other = EnsembleSpec(clients[1:], "weighted", {"weights": torch.tensor([1.0, 5.0])})
    same, changed = (predict(method.fit(replace(job, teacher=one), Silent()), job) for one in (own, other))
    assert torch.equal(usual(method.name), same)
    assert not torch.equal(usual(method.name), changed)


def test_tally_as_teacher_of_the_job_is_distilled_or_refused(method: Method) -> None:
    job = replace(tiny_job(method), teacher="tally")
    if "tally" not in method.teachers:
        with pytest.raises(OptionError, match=rf"'{method.name}' does not distil .* \('tally'\).*co-boosting.*flboost"):
            check_needs(method, job)
        return
    silent = replace(job, uploads=tuple(telling(upload, label_counts=None) for upload in job.uploads))
    jobs = (job, silent)
    for taught in jobs:
        check_needs(method, taught)
    told, guessed = (predict(method.fit(one, Silent()), job) for one in jobs)
    assert not torch.equal(usual(method.name), told)
    assert not torch.equal(told, guessed)


def test_fit_with_another_seed_gives_other_bits_where_the_method_draws(method: Method) -> None:
    other = predict(fitted(method, tiny_job(method, seed=1)), tiny_job(method))
    random = method.plan(method.config(**SMALL.get(method.name, {}))).random
    draws = method.kind == "student" if random is None else random
    if method.in_rounds.shares_generator is not None:  # FedGen's draws end in the generator of the next round
        draws = False
    assert torch.equal(usual(method.name), other) == (not draws)


def test_fit_does_not_depend_on_the_order_of_uploads(method: Method) -> None:
    if method.name in ("fens", "fusefl"):
        pytest.skip("its weights are drawn or trained member by member, in the order of names that a job has")
    job = tiny_job(method)
    turned = replace(job, uploads=job.uploads[::-1])
    torch.testing.assert_close(usual(method.name), predict(fitted(method, turned), turned), rtol=1e-3, atol=1e-3)


def test_fit_of_a_pickled_job_gives_the_same_bits_and_leaves_uploads_and_the_global_random_state_alone(
    method: Method,
) -> None:
    expected = usual(method.name)
    job: Job = pickle.loads(pickle.dumps(tiny_job(method)))  # noqa: S301  our own bytes
    before = [{name: value.clone() for name, value in upload.read().items()} for upload in job.uploads]
    torch.manual_seed(123)
    state = torch.get_rng_state()
    outcome = fitted(method, job, Book(keep=True))  # with checkpoints
    assert torch.equal(torch.get_rng_state(), state)
    copied: Outcome = pickle.loads(pickle.dumps(outcome))  # noqa: S301  our own bytes
    assert torch.equal(predict(copied, job), expected)
    for upload, copy in zip(job.uploads, before, strict=True):
        assert all(torch.equal(value, copy[name]) for name, value in upload.read().items())


def test_fit_gives_the_pinned_value(method: Method) -> None:
    job = tiny_job(method)
    if method.name in BY_ADAM:
        job = replace(job, student="wide")
        logits = predict(fitted(method, job), job)
    else:
        logits = usual(method.name)
    value = float(logits.abs().mean())
    assert value == pytest.approx(PINNED[method.name], rel=5e-3 if method.name in BY_GENERATOR else 1e-3)


def test_gate_on_predictions_gives_its_pinned_value() -> None:
    job = tiny_job(METHODS["intactofl"])
    job = replace(job, config=replace(job.config, gate="predictions"))
    logits = predict(METHODS["intactofl"].fit(job, Silent()), job)
    assert float(logits.abs().mean()) == pytest.approx(1.652460, rel=1e-3)


# This file's jobs, with the library under another name and nothing that a method must not need.
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(["strategies", "flwr", "ray"]))
import test_methods as here

here.torch.set_num_threads(1)
for name, method in here.METHODS.items():
    print(name, here.usual(name).tolist())
"""


@pytest.mark.slow
def test_every_method_runs_from_a_copy_of_the_folder_under_another_name(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "vendored", ignore=shutil.ignore_patterns("__pycache__"))
    for module in (sys.modules[__name__], fusefl_fakes, method_fakes):
        source = Path(module.__file__)
        (tmp_path / source.name).write_text(re.sub(r"\bstrategies\b", "vendored", source.read_text()))
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {usual(name).tolist()}" for name in METHODS]


def test_merge_runs_the_method_on_bare_weights(method: Method) -> None:
    job = tiny_job(method)
    if method.name in WITH_CLIENTS:
        with pytest.raises(OptionError, match=f"method '{method.name}' .* with its clients"):
            method.fit(job, Silent())
        return
    counts = {upload.client: upload.label_counts or () for upload in job.uploads}
    told = tuple(telling(upload, num_examples=sum(counts[upload.client])) for upload in job.uploads)
    expected = predict(method.fit(replace(job, uploads=told), Silent()), job)

    told = ("num_classes", "input_shape", "config", "proxy", "labelled", "student", "start")
    weights = {upload.client: dict(open_weights(upload)) for upload in job.uploads}
    given = {key: getattr(job, key) for key in told if getattr(job, key) is not None}
    counted = list(counts.values())
    result = strategies.merge(weights, method.name, model=BUILDERS, label_counts=counted, log=str, threads=1, **given)

    model = result.student if result.student is not None else result.ensemble
    with torch.no_grad():
        torch.testing.assert_close(model(IMAGES), expected)
