from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_fakes import drawn_upload, model_of, telling
from store_faults import Faults, disk_full
from torch import nn

from strategies.combiners.outcomes import build_ensemble, load_model
from strategies.core.errors import StoreError
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec, Job, Method, Normalization, Silent, Upload
from strategies.methods import dw_fedens, fedens, label_count_ensemble
from strategies.run import ensembles
from strategies.run.ensembles import load_ensemble_module, save_ensemble
from strategies.run.run_folder import RunFolder, load_ensemble
from strategies.uploads.quantization import simulate_int8

IMAGES = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(9))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


BUILDERS = {"narrow": narrow, "wide": wide}


def job(method: Method) -> Job:
    drawn = drawn_upload(0, "narrow", BUILDERS, 10, (10, 0, 0)), drawn_upload(1, "wide", BUILDERS, 30, (10, 20, 0))
    uploads = tuple(telling(upload, client=name) for upload, name in zip(drawn, "ab", strict=True))
    return Job(uploads, BUILDERS, "narrow", 3, (1, 4, 4), Normalization((0.5,), (0.5,)), method.config())


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        (fedens.METHOD, [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]),
        (dw_fedens.METHOD, [[0.25, 0.25, 0.25], [0.75, 0.75, 0.75]]),
        (label_count_ensemble.METHOD, [[0.5, 0.0, 0.0], [0.5, 1.0, 0.0]]),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
def test_loaded_ensemble_of_two_architectures_weighs_logits_as_the_formula_says(
    method: Method, weights: list[list[float]]
) -> None:
    one = job(method)
    a, b = (model_of(upload, BUILDERS)(IMAGES).detach() for upload in one.uploads)
    model = load_model(method.fit(one, Silent()), one)
    torch.testing.assert_close(model(IMAGES), torch.tensor(weights[0]) * a + torch.tensor(weights[1]) * b)


def test_ensemble_in_int8_quantises_its_members_in_memory_and_from_a_folder(tmp_path: Path) -> None:
    one = job(fedens.METHOD)
    first = telling(one.uploads[0], ranges={"1": (-0.25, 0.5)})
    one = replace(one, uploads=(first, one.uploads[1]))
    spec = EnsembleSpec(("a", "b"), "mean", precision="int8")
    expected = torch.zeros(4, 3)
    for upload in one.uploads:
        expected = expected + simulate_int8(model_of(upload, BUILDERS), upload.ranges)(IMAGES) / 2
    save_ensemble(tmp_path, spec, one.uploads)
    for ensemble in (build_ensemble(one, spec), load_ensemble_module(tmp_path, BUILDERS)):
        torch.testing.assert_close(ensemble(IMAGES), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(build_ensemble(one, replace(spec, precision="float32"))(IMAGES), expected, atol=1e-4)


# An ensemble on disk comes back with its members, its combiner and its order.


ENSEMBLES_BUILDERS = {"x": lambda: torch.nn.Linear(1, 1), "y": lambda: torch.nn.Linear(2, 1)}
SPEC = EnsembleSpec(clients=("b", "a"), combiner="weighted", weights={"weights": torch.tensor([0.25, 0.75])})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run", {})
    for value, (client, architecture) in enumerate((("a", "x"), ("b", "y"), ("c", "x"))):
        state = {"w": torch.full((2,), float(value))}
        counts = (value, 1) if value else None
        run.round().accept(UploadFacts(client, architecture, value or None, counts), state)
    return run


def check(spec: EnsembleSpec, members: tuple[Upload, ...]) -> None:
    assert (spec.clients, spec.combiner) == (SPEC.clients, SPEC.combiner)
    assert torch.equal(spec.weights["weights"], SPEC.weights["weights"])
    assert [(m.client, m.architecture, m.num_examples, m.label_counts) for m in members] == [
        ("b", "y", 1, (1, 1)),
        ("a", "x", None, None),
    ]
    assert [m.read()["w"][0].item() for m in members] == [1.0, 0.0]


def test_ensemble_round_trips_from_either_folder(run: RunFolder) -> None:
    ensembles.save_ensemble(run.path / "ensemble", SPEC, run.round().uploads(), {"x": {"num_classes": 10}})
    check(*load_ensemble(run.path, ENSEMBLES_BUILDERS))
    check(*load_ensemble(run.path / "ensemble", ENSEMBLES_BUILDERS))


def test_ensemble_saved_again_replaces_the_first_and_after_a_failure_there_is_never_a_part(
    run: RunFolder, faults: Faults
) -> None:
    uploads, first = run.round().uploads(), EnsembleSpec(("c",), "mean")
    ensembles.save_ensemble(run.path / "ensemble", first, uploads)
    kept = []
    for index in range(faults.count(lambda: ensembles.save_ensemble(run.path / "ensemble", first, uploads))):
        with faults.at(index, disk_full), pytest.raises(StoreError, match="No space"):
            ensembles.save_ensemble(run.path / "ensemble", SPEC, uploads)
        there = (run.path / "ensemble" / "ensemble.json").exists()
        kept.append(load_ensemble(run.path, ENSEMBLES_BUILDERS)[0].clients if there else ())
        ensembles.save_ensemble(run.path / "ensemble", first, uploads)
    assert set(kept) == {first.clients, (), SPEC.clients}
    assert sorted(kept, key=(first.clients, (), SPEC.clients).index) == kept
    ensembles.save_ensemble(run.path / "ensemble", SPEC, uploads)
    check(*load_ensemble(run.path, ENSEMBLES_BUILDERS))
    assert not (run.path / "ensemble" / "members" / "c.safetensors").exists()
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".ensemble")] == []


def test_a_folder_of_other_files_is_no_place_for_an_ensemble(tmp_path: Path) -> None:
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "my_work.py").touch()
    spec, uploads = EnsembleSpec(("a",), "mean"), [Upload(UploadFacts("a", "x"), lambda: {"w": torch.zeros(2)})]

    with pytest.raises(StoreError, match="my_work.py is not a file of an ensemble: must be a new folder"):
        ensembles.save_ensemble(tmp_path / "ensemble", spec, uploads)

    assert [path.name for path in (tmp_path / "ensemble").iterdir()] == ["my_work.py"]


def test_a_part_that_a_killed_process_has_left_is_replaced_and_the_only_copy_is_kept(run: RunFolder) -> None:
    place = run.path / "ensemble"
    (place / "members").mkdir(parents=True)
    (place / "members" / "a.safetensors").touch()
    ensembles.save_ensemble(run.path / "ensemble", SPEC, run.round().uploads())
    check(*load_ensemble(run.path, ENSEMBLES_BUILDERS))

    place.replace(place.with_name(".ensemble.old"))  # between the two renames
    with pytest.raises(StoreError, match="without an upload: absent"):
        ensembles.save_ensemble(run.path / "ensemble", EnsembleSpec(("absent",), "mean"), run.round().uploads())
    state = {"w": torch.zeros(2)}
    ensembles.save_ensemble(place, EnsembleSpec(("a",), "mean"), [Upload(UploadFacts("a", "x"), lambda: state)])
    assert load_ensemble(run.path, ENSEMBLES_BUILDERS)[0].clients == ("a",)
