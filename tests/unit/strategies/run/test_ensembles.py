from dataclasses import replace
from pathlib import Path

import pytest
import torch
from method_fakes import telling
from torch import nn

from strategies import dw_fedens, fedens, label_count_ensemble
from strategies.combiners.outcomes import ensemble_of, load_model
from strategies.core.facts import UploadFacts
from strategies.method import EnsembleSpec, Job, Method, Normalization, Silent, Upload
from strategies.run.ensembles import load_ensemble_module, save_ensemble
from strategies.uploads.quantization import as_int8

IMAGES = torch.rand(4, 1, 4, 4, generator=torch.Generator().manual_seed(9))


def narrow() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


BUILDERS = {"narrow": narrow, "wide": wide}


def upload(client: str, architecture: str, examples: int | None, counts: tuple[int, ...] | None) -> Upload:
    torch.manual_seed(sum(map(ord, client)))
    state = BUILDERS[architecture]().state_dict()
    return Upload(UploadFacts(client, architecture, examples, counts), lambda: state)


def job(method: Method) -> Job:
    uploads = (upload("a", "narrow", 10, (10, 0, 0)), upload("b", "wide", 30, (10, 20, 0)))
    return Job(uploads, BUILDERS, "narrow", 3, (1, 4, 4), Normalization((0.5,), (0.5,)), method.config())


def logits(one: Job) -> list[torch.Tensor]:
    models = []
    for entry in one.uploads:
        model = one.builders[entry.architecture]()
        model.load_state_dict(entry.read())
        models.append(model.eval())
    return [model(IMAGES).detach() for model in models]


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
    a, b = logits(one)
    model = load_model(method.fit(one, Silent()), one)
    torch.testing.assert_close(model(IMAGES), torch.tensor(weights[0]) * a + torch.tensor(weights[1]) * b)


def test_ensemble_of_a_part_of_the_clients_takes_only_those_in_their_order() -> None:
    one = job(fedens.METHOD)
    a, b = logits(one)
    ensemble = ensemble_of(one, EnsembleSpec(("b", "a"), "weighted", {"weights": torch.tensor([1.0, 0.0])}))
    torch.testing.assert_close(ensemble(IMAGES), b)
    torch.testing.assert_close(ensemble_of(one, EnsembleSpec(("a",), "mean"))(IMAGES), a)


def test_ensemble_in_int8_quantises_its_members_in_memory_and_from_a_folder(tmp_path: Path) -> None:
    one = job(fedens.METHOD)
    first = telling(one.uploads[0], ranges={"1": (-0.25, 0.5)})
    one = replace(one, uploads=(first, one.uploads[1]))
    spec = EnsembleSpec(("a", "b"), "mean", precision="int8")
    expected = torch.zeros(4, 3)
    for upload in one.uploads:
        model = BUILDERS[upload.architecture]()
        model.load_state_dict(upload.read())
        expected = expected + as_int8(model, upload.ranges)(IMAGES) / 2
    save_ensemble(tmp_path, spec, one.uploads)
    for ensemble in (ensemble_of(one, spec), load_ensemble_module(tmp_path, BUILDERS)):
        torch.testing.assert_close(ensemble(IMAGES), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(ensemble_of(one, replace(spec, precision="float32"))(IMAGES), expected, atol=1e-4)
