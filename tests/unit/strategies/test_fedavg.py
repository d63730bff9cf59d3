from dataclasses import replace

import pytest
import torch
from method_fakes import Book
from torch import nn

from strategies.core.facts import UploadFacts
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods.fedavg import FedAvgConfig, fit


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))


def job(config: FedAvgConfig | None = None, examples: tuple[int | None, ...] = (10, 30)) -> Job:
    def upload(k: int, count: int | None) -> Upload:
        torch.manual_seed(k)
        state = net().state_dict()
        state["1.running_mean"] += k
        state["1.num_batches_tracked"] += 10 * k + 1
        return Upload(
            UploadFacts(f"c{k}", "net", count), lambda: {name: value.clone() for name, value in state.items()}
        )

    uploads = tuple(upload(k, count) for k, count in enumerate(examples))
    return Job(uploads, {"net": net}, "net", 3, (1, 8, 8), Normalization((0.5,), (0.5,)), config or FedAvgConfig())


def test_fit_weighs_by_examples_and_averages_the_buffers_too() -> None:
    one = job()
    a, b = (upload.read() for upload in one.uploads)
    student = fit(one, Silent()).student
    for name in ("0.weight", "1.running_mean", "3.bias"):
        torch.testing.assert_close(student[name], 0.25 * a[name] + 0.75 * b[name])
    assert student["1.num_batches_tracked"].item() == 8  # 0.25 * 1 + 0.75 * 11 = 8.5, cut


def test_fit_with_uniform_weights_or_a_client_that_tells_no_examples_is_the_plain_mean_and_says_so_once() -> None:
    one, progress = job(FedAvgConfig(weights="uniform")), Book()
    a, b = (upload.read() for upload in one.uploads)
    uniform, untold = fit(one, Silent()).student, fit(job(examples=(10, None)), progress).student
    torch.testing.assert_close(uniform["0.weight"], (a["0.weight"] + b["0.weight"]) / 2)
    assert all(torch.equal(untold[name], value) for name, value in uniform.items())
    [row] = progress.rows
    assert "no num-examples from c1" in row["note"]


def test_fit_with_first_buffers_keeps_them_and_averages_the_weights() -> None:
    one = job(FedAvgConfig(bn_buffers="first"))
    student, first = fit(one, Silent()).student, one.uploads[0].read()
    assert torch.equal(student["1.running_mean"], first["1.running_mean"])
    assert student["1.num_batches_tracked"].item() == 1
    assert not torch.equal(student["0.weight"], first["0.weight"])


def test_fit_with_first_buffers_keeps_the_norm_of_a_spectral_layer() -> None:
    def build() -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(5, 4))

    def upload(seed: int) -> Upload:
        torch.manual_seed(seed)
        state = build().state_dict()
        return Upload(UploadFacts(f"c{seed}", "net", 10), lambda: dict(state))

    one = replace(job(FedAvgConfig(bn_buffers="first")), uploads=(upload(1), upload(2)), builders={"net": build})
    model = build().eval()
    model.load_state_dict(fit(one, Silent()).student)
    assert float(torch.linalg.matrix_norm(model.weight.detach(), 2)) == pytest.approx(1.0, abs=1e-5)
