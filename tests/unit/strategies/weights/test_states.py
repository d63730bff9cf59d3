"""The loop over a model's tensors: what no rule merges, what is refused, and how much memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strategies import merge
from strategies.core import checkpoints
from strategies.core.checkpoints import OpenFile
from strategies.core.errors import OneShotError, OptionError, StoreError, UploadError
from strategies.methods.dare import DareConfig
from strategies.weights.rules import average, ties
from strategies.weights.states import Rule, merge_states

State = dict[str, Tensor]


def silent(done: int, total: int) -> None:
    assert 0 <= done <= total


def averaged(states: Mapping[str, Mapping[str, Tensor]], weights: list[float], **more: Any) -> State:
    return merge_states(states, weights, lambda one: average(one.updates, one.weights), tick=silent, **more)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_batch_normalisation_is_that_of_all_examples_together(scale: float) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(40, 3) * 2 + 5, torch.randn(120, 3) - 3]
    states = {
        str(k): {
            "n.running_mean": part.mean(0),
            "n.running_var": part.var(0, correction=0),
            "n.num_batches_tracked": torch.tensor(7 + k),
        }
        for k, part in enumerate(parts)
    }
    start = {name: torch.zeros_like(value) for name, value in states["0"].items()}
    merged = averaged(states, [40.0, 120.0], start=start, scale=scale)
    whole = torch.cat(parts)
    torch.testing.assert_close(merged["n.running_mean"], whole.mean(0))
    torch.testing.assert_close(merged["n.running_var"], whole.var(0, correction=0))
    assert merged["n.num_batches_tracked"] == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_floating_point_type_is_summed_in_full_and_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    start = {"w": torch.randn(50).to(dtype)}
    states = {str(k): {"w": (start["w"] + 0.01 * torch.randn(50)).to(dtype)} for k in range(8)}
    merged = averaged(states, [1.0] * 8, start=start)["w"]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.stack([state["w"].to(wide) for state in states.values()]).mean(0)
    assert merged.dtype == dtype
    exact = expected.to(dtype)
    off = (merged.to(wide) - exact.to(wide)).abs()
    spacing = torch.finfo(dtype).eps * exact.abs().to(torch.float64)
    assert bool((off <= spacing).all())


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_two_precisions_merge_in_the_wider_one_whoever_comes_first(other: torch.dtype) -> None:
    exact = torch.tensor([1.0, 2.0]) + 2**-12
    models = [{"w": exact}, {"w": exact.to(other)}]
    wider, narrow = torch.promote_types(torch.float32, other), models[1]["w"].double()
    for method, start in (("fedavg", None), ("task-arithmetic", {"w": torch.zeros(2)})):
        for order in (models, models[::-1]):
            [merged] = (merge(order, method, start=start).outcome.student or {}).values()
            assert merged.dtype == (wider if start is None else torch.float32)
            torch.testing.assert_close(merged.double(), (exact.double() + narrow) / 2, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"w": torch.zeros(3), "ids": torch.tensor([1, 3])},
            "tensor 'ids' holds int64 numbers, in which a and b differ",
        ),
        ({"w": torch.zeros(4), "ids": torch.tensor([1, 2])}, r"tensor 'w' of b has shape \[4\]: must be \[3\]"),
        ({"w": torch.zeros(3)}, "a and b differ in 'ids'"),
    ],
)
def test_what_cannot_be_merged_is_refused(other: State, said: str) -> None:
    own = {"w": torch.zeros(3), "ids": torch.tensor([1, 2])}
    assert torch.equal(averaged({"a": own, "b": own}, [1.0, 1.0])["ids"], own["ids"])
    with pytest.raises(OptionError, match=said):
        averaged({"a": own, "b": other}, [1.0, 1.0])


class Counted(Mapping[str, Tensor]):
    """Weights made when they are asked for, which count how many tensors are in memory."""

    alive = most = 0

    def __getitem__(self, name: str) -> Tensor:
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        values = np.full(1000, float(name), np.float32)
        weakref.finalize(values, Counted.free)
        return torch.from_numpy(values)

    @classmethod
    def free(cls) -> None:
        cls.alive -= 1

    def __iter__(self) -> Iterator[str]:
        return map(str, range(len(self)))

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("rule", [lambda one: average(one.updates, one.weights), lambda one: ties(one.updates, 0.2)])
def test_no_more_than_one_tensor_of_all_clients_is_in_memory(rule: Rule) -> None:
    Counted.most = 0
    merged = merge_states({str(k): Counted() for k in range(5)}, [1.0] * 5, rule, start=Counted(), tick=silent)
    assert len(merged) == 20
    assert Counted.alive == 0
    assert 5 <= Counted.most <= 7  # of five clients, the start's, and one that is about to go


class Embedder(nn.Module):
    """No classifier: an embedding, an attention, a norm, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("positions", torch.arange(5))


def tuned(base: nn.Module, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Embedder()
    model.load_state_dict(
        {
            name: value + 0.1 * torch.randn(value.shape).abs() if value.is_floating_point() else value
            for name, value in base.state_dict().items()
        }
    )
    return model


BASE = Embedder()
MODELS = {name: tuned(BASE, seed) for seed, name in enumerate("abc")}
METHODS = ("fedavg", "task-arithmetic", "ties", "dare", "tsv")


@pytest.mark.parametrize("method", METHODS)
def test_any_module_state_dict_and_file_merges_to_the_same_without_classes(method: str, tmp_path: Path) -> None:
    of_modules = merge(MODELS, method, start=BASE, log=str)
    assert isinstance(of_modules.student, Embedder)
    found = of_modules.outcome.student
    for name, model in MODELS.items():
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in MODELS}
    states = {name: model.state_dict() for name, model in MODELS.items()}
    for others in (files, states):
        same = merge(others, method, start=BASE.state_dict(), log=str)
        assert all(torch.equal(value, found[name]) for name, value in same.outcome.student.items())
        with pytest.raises(OptionError, match="result.outcome.student; for a module give model="):
            _ = same.student
        same.save(tmp_path / method)
    of_modules.save(tmp_path / method)
    assert torch.equal(OpenFile(tmp_path / method / "student.safetensors")["norm.weight"], found["norm.weight"])


@pytest.mark.parametrize("method", METHODS)
def test_a_merge_into_a_folder_has_the_bits_of_one_in_memory(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shards with their index, which a merge of the next round reads, or as one file."""
    states = {name: model.state_dict() for name, model in MODELS.items()}
    wanted = merge(states, method, start=BASE.state_dict(), log=str).outcome.student
    for most in (checkpoints.SHARD, 700):
        monkeypatch.setattr(checkpoints, "SHARD", most)
        place = tmp_path / str(most)
        found = merge(states, method, start=BASE.state_dict(), folder=place, log=str).outcome.student
        stored = checkpoints.read_checkpoint(place)
        for one in (found, stored, checkpoints.open_checkpoint(place)):
            assert sorted(one) == sorted(wanted)
            assert all(
                torch.equal(one[name], value) and one[name].dtype == value.dtype for name, value in wanted.items()
            )
    files = sorted(path.name for path in place.iterdir())
    assert files[-1] == "model.safetensors.index.json"
    parts = [load_file(place / name) for name in files[:-1]]
    assert len(parts) > 2
    assert all(len(part) == 1 or sum(value.nbytes for value in part.values()) <= 700 for part in parts)
    again = merge([place, tmp_path / str(5 * 10**9)], method, start=place, log=str).outcome.student
    torch.testing.assert_close(again["embedding.weight"], wanted["embedding.weight"])
    with pytest.raises(StoreError, match="holds files: must be a new or empty folder"):
        merge(states, method, start=BASE.state_dict(), folder=place, log=str)


def test_a_folder_is_refused_where_more_than_weights_is_merged(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"folder is for a merge of weights alone.*here it is 'fedens'"):
        merge(MODELS, "fedens", num_classes=2, input_shape=(1, 4, 4), folder=tmp_path / "new", log=str)


LARGE = """
import contextlib, json, struct, sys, threading, time
from pathlib import Path
import torch
from strategies import merge
from strategies.compute import InProcess, in_process
from strategies.core.checkpoints import OpenFile
from strategies.core.durable import sha256_file
from strategies.core.facts import UploadFacts
from strategies.method import METHODS, Job, Normalization
from strategies.run.run_folder import RunFolder, UploadRecord
from strategies.run.stage import keep_outcome, run_stage

in_process.keep_freed_memory = contextlib.nullcontext  # else 512 MiB that were freed are kept for later

place, method, tensors, size = Path(sys.argv[1]), sys.argv[2], 24, 2**22  # bytes of a tensor
for name in ("base", "a", "b", "c"):  # zeros as holes: no disk holds them
    (place / name).mkdir()
    head = json.dumps({
        f"layer{k}.weight": {"dtype": "F32", "shape": [2**10, 2**10], "data_offsets": [k * size, (k + 1) * size]}
        for k in range(tensors)
    }).encode()
    with (place / name / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + tensors * size)
models = [place / name for name in "abc"]
one = {"w": torch.ones(2)}
merge([one, one], method, start=one, log=str)  # what a merge imports


def resident_bytes():  # with the pages of mapped files
    return int(next(row for row in open("/proc/self/status") if row.startswith("VmRSS")).split()[1]) * 1024


def watch():
    while True:
        seen.append(resident_bytes())
        time.sleep(0.002)


seen = []
threading.Thread(target=watch, daemon=True).start()
held = resident_bytes()
found = merge(models, method, start=place / "base", folder=place / "merged", log=str).outcome.student
print("tensors", (max(seen) - held) / size, len(seen))
assert len(seen) > 100 and max(seen) - held < 16 * size
assert len(found) == tensors
assert float(found["layer3.weight"].abs().max()) == 0.0

run = RunFolder.create(place / "run", {})  # the server stage of a run with the same uploads
(run.path / "uploads").mkdir()
names = [f"layer{k}.weight" for k in range(tensors)]
head = json.dumps({
    one: {"dtype": "F32", "shape": [2**10, 2**10], "data_offsets": [k * size, (k + 1) * size]}
    for k, one in enumerate(names)
}).encode()
for name in "abc":
    path = run.path / "uploads" / f"{name}.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + tensors * size)
    record = UploadRecord(UploadFacts(name, "x", 1), sha256_file(path), path.stat().st_size, "2026-01-01")
    run.round().index.append(record.as_row())
seen.clear()
job = Job(
    run.round().uploads(), {}, "x", 0, (1, 1, 1), Normalization((0.0,), (1.0,)), METHODS[method].config(),
    start=OpenFile(path), clients_seed=0,
)
report = run_stage(METHODS[method], job, InProcess(), run.round(), log=str)
keep_outcome(run, report)
print("tensors", (max(seen) - held) / size, len(seen))
assert len(seen) > 50 and max(seen) - held < 16 * size
stored = OpenFile(run.path / "student.safetensors")
assert sorted(stored) == sorted(report.outcome.student) == sorted(names)
assert all(torch.equal(stored[one], report.outcome.student[one]) for one in names)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux knows of a process")
@pytest.mark.parametrize("method", ["fedavg", "task-arithmetic"])
def test_checkpoints_merge_in_the_memory_of_a_few_of_their_tensors(method: str, tmp_path: Path) -> None:
    """At most of sixteen, with the pages of mapped files: one model has 24, and all have 96."""
    words = [sys.executable, "-c", LARGE, str(tmp_path), method]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes at once
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=own)
    assert not done.returncode, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("rule", ["average", "ties", "tsv"])
def test_dare_without_drops_is_its_rule_and_draws_by_the_seed(rule: str) -> None:
    plain = merge(MODELS, "task-arithmetic" if rule == "average" else rule, start=BASE, log=str)
    kept, drawn, again, other = (
        merge(MODELS, "dare", start=BASE, config=DareConfig(drop=drop, rule=rule), seed=seed, log=str).outcome.student
        for drop, seed in ((0.0, 0), (0.5, 0), (0.5, 0), (0.5, 1))
    )
    name = "embedding.weight"
    assert torch.equal(kept[name], plain.outcome.student[name])
    assert torch.equal(drawn[name], again[name])
    assert not torch.equal(drawn[name], other[name])


def wider() -> nn.Module:
    model = Embedder()
    model.embedding = nn.Embedding(12, 8)
    return model


@pytest.mark.parametrize(
    ("models", "more", "said"),
    [
        (MODELS, {}, "needs that every client started from the same weights, which are known: give them as start="),
        ({**MODELS, "d": wider().state_dict()}, {"start": BASE, "model": Embedder}, r"float32\[12, 8\]"),
        ({"a": BASE.state_dict(), "b": {}}, {"start": BASE}, "model 'b'.*attention.in_proj_bias"),
        ({"a": {**BASE.state_dict(), "norm.weight": torch.full((8,), torch.nan)}}, {"start": BASE}, "norm.weight"),
        (MODELS, {"start": [BASE]}, "start is list"),
        ({"a": {"w": torch.ones(2), "b": torch.ones(1)}}, {"start": {"w": torch.ones(2)}}, "fit the start.*expected b"),
        (
            {"a": {"w": torch.ones(2)}},
            {"start": {"w": torch.tensor([1.0, torch.nan])}},
            "the start: tensor 'w' holds NaN",
        ),
    ],
)
def test_models_that_do_not_share_a_start_and_a_form_are_refused(models: Any, more: Any, said: str) -> None:
    with pytest.raises(OneShotError, match=said):
        merge(models, "ties", log=str, **more)


@pytest.mark.parametrize("modules", [True, False])
def test_vocabularies_of_other_sizes_are_refused_with_both(modules: bool) -> None:
    models = {"a": BASE, "b": wider()}
    given: Any = models if modules else {name: model.state_dict() for name, model in models.items()}
    with pytest.raises(OneShotError, match=r"embedding.weight.*\[1[12], 8\].*\[1[12], 8\]"):
        merge(given, "fedavg", log=str)


def test_tensors_that_share_memory_are_saved_as_tensors_of_their_own(tmp_path: Path) -> None:
    memory = torch.arange(12.0).reshape(6, 2)
    state = {"low": memory[:4], "high": memory[2:], "turned": memory[:4].T, "same": memory[:4]}
    zero = {name: torch.zeros_like(value) for name, value in state.items()}
    merge({"a": state, "b": zero}, "fedavg", log=str).save(tmp_path / "result")
    found = load_file(tmp_path / "result" / "student.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value / 2) for name, value in state.items())


def test_a_method_of_classifiers_still_needs_classes_and_shapes() -> None:
    with pytest.raises(OptionError, match="'tally' needs num_classes and input_shape"):
        merge(MODELS, "tally", log=str)
    with pytest.raises(OptionError, match="input_shape is missing"):
        merge(MODELS, "ties", start=BASE, num_classes=3, log=str)


def test_a_counter_that_is_no_number_is_refused_of_its_client() -> None:
    own = nn.BatchNorm1d(3).state_dict()
    half = {name: value.half() for name, value in own.items()}
    merged = merge({"a": own, "b": half}, "fedavg", start=own, log=str).outcome.student
    assert torch.equal(merged["num_batches_tracked"], own["num_batches_tracked"])
    half["num_batches_tracked"] -= torch.inf
    with pytest.raises(UploadError, match=r"model 'b': .* is float16\[\], expected is int64"):
        merge({"a": own, "b": half}, "fedavg", start=own, log=str)


class Stretch(nn.Module):
    """A parametrization that counts the last columns of a weight more."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.arange(1.0, weight.shape[1] + 1)


def test_a_spectral_norm_behind_another_parametrization_keeps_its_vectors() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Stretch())
    state = nn.utils.parametrizations.spectral_norm(layer).state_dict()
    merged = merge({"a": state, "b": state}, "fedavg", log=str).outcome.student
    assert all(torch.allclose(merged[name], value, rtol=1e-6) for name, value in state.items())


def spectral(form: str, kind: str, seed: int) -> nn.Module:
    """Return a layer whose weight is divided by its spectral norm, after some steps of training with other examples."""
    torch.manual_seed(seed)
    layer = {"linear": nn.Linear(5, 4), "conv": nn.Conv2d(3, 4, 2), "transposed": nn.ConvTranspose2d(3, 3, 2)}[kind]
    normed = (nn.utils.spectral_norm if form == "old" else nn.utils.parametrizations.spectral_norm)(layer)
    for _ in range(50):
        normed(torch.randn(2, 5) if kind == "linear" else torch.randn(2, 3, 4, 4))
    return normed.eval()


@pytest.mark.parametrize("in_folder", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "ties"])
@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
@pytest.mark.parametrize("form", ["old", "new"])
def test_a_merged_weight_with_a_spectral_norm_has_norm_1(
    form: str, kind: str, method: str, in_folder: bool, tmp_path: Path
) -> None:
    first, second = (spectral(form, kind, seed) for seed in (1, 2))
    own = first.state_dict()
    vectors = [name for name in own if name.endswith(("_u", "_v"))]
    opposite = {name: -value if name in vectors else value for name, value in own.items()}  # as good as the others
    start = spectral(form, kind, 3).state_dict() if method == "ties" else None
    place = {"folder": tmp_path / "merged"} if in_folder else {}
    models = {"a": own, "b": opposite, "c": second.state_dict()}
    merged = merge(models, method, start=start, log=lambda _: None, **place).outcome.student
    assert merged is not None
    second.load_state_dict(dict(merged))
    second(torch.zeros(1, 5) if kind == "linear" else torch.zeros(1, 3, 4, 4))  # the old form then writes its weight
    weight = second.weight.detach()
    rows = (weight.transpose(0, 1) if kind == "transposed" else weight).flatten(1).numpy()
    assert np.linalg.norm(rows, 2) == pytest.approx(1.0, abs=1e-5)
