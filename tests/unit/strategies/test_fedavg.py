from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from method_fakes import Book
from torch import Tensor, nn

from strategies.core.facts import UploadFacts
from strategies.core.seeds import initial_torch
from strategies.method import Job, Normalization, Silent, Upload
from strategies.methods import tally
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


# Linear layers merged by what the clients' updates have read, as an option of FedAvg and as a start of Tally's student.


SHAPE, CLASSES, SEED = (1, 4, 4), 3, 5
STILL = tally.TallyConfig(
    epochs=1, student_lr=1e-12, images=8, batch_size=4, probes=8, start="merged", counts="noise-rows"
)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def began(seed: int = SEED) -> dict[str, Tensor]:
    with initial_torch(seed, "net"):
        return linear().state_dict()


def moved_job(config: Any, *, seed: int | None = SEED) -> Job:
    """Three clients whose first layers move for inputs of their own, and whose last layers move alike."""
    uploads = []
    for number in range(3):
        state = {key: value.clone() for key, value in began().items()}
        state["1.weight"][:, 4 * number : 4 * number + 4] += 0.5
        state["3.bias"] += 1.0
        uploads.append(Upload(UploadFacts(f"c{number}", "net", 10), partial(dict, state)))
    space = Normalization((0.5,), (0.5,))
    return Job(tuple(uploads), {"net": linear}, "net", CLASSES, SHAPE, space, config, clients_seed=seed)


def test_fedavg_keeps_what_each_client_has_moved_alone() -> None:
    averaged, merged = (
        fit(moved_job(FedAvgConfig(linear=how)), Silent()).student or {} for how in ("averaged", "merged")
    )
    moved = {name: (state["1.weight"] - began()["1.weight"]).mean() for name, state in
             (("averaged", averaged), ("merged", merged))}  # fmt: skip

    assert float(moved["averaged"]) == pytest.approx(0.5 * 12 / 16 / 3, rel=1e-4)
    # G_k has the one direction of the update: its share is 1 + a / d of the client's own, a / d of the others.
    share = 0.6 / 17
    assert float(moved["merged"]) == pytest.approx(0.5 * 12 / 16 * (1 + share) / (1 + 3 * share), rel=1e-4)
    torch.testing.assert_close(merged["3.bias"], averaged["3.bias"])  # equal updates are their mean


def test_tally_starts_from_merged_layers_but_the_last_which_counts_weigh() -> None:
    starts = {}
    for how in ("merged", "class-weighted"):
        starts[how] = tally.fit(moved_job(replace(STILL, start=how)), Silent()).student or {}
    whole = fit(moved_job(FedAvgConfig(linear="merged")), Silent()).student or {}

    torch.testing.assert_close(starts["merged"]["1.weight"], whole["1.weight"])
    torch.testing.assert_close(starts["merged"]["3.weight"], starts["class-weighted"]["3.weight"])
    assert not torch.allclose(starts["merged"]["1.weight"], starts["class-weighted"]["1.weight"])
