from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from method_fakes import check_resume, same, telling
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.method import Job, Normalization, Outcome, Silent, Upload
from strategies.methods import fedcvae_ens
from strategies.methods.fedcvae_ens import METHOD, FedCvaeEnsConfig, fit, shares
from strategies.uploads.needs import check_needs

CLASSES, SHAPE = 3, (1, 4, 4)
SMALL = FedCvaeEnsConfig(epochs=3, images=60, batch_size=8, student_lr=0.02)


class Rows(nn.Module):
    """Makes images whose row y is bright, shaded by the noise; the client's own column is dark."""

    latent = 4

    def __init__(self) -> None:
        super().__init__()
        self.dark = nn.Parameter(torch.zeros(4))

    def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        bright = nn.functional.one_hot(labels, 4) * 8.0 - 4.0
        return (bright[:, :, None] + noise[:, None, :] / 3 + self.dark)[:, None]


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))


BUILDERS = {"net": plain, "cvae-decoder": Rows}
COUNTS = ((10, 0, 0), (0, 20, 0), (0, 5, 25))


def upload(k: int, counts: tuple[int, ...] | None = None) -> Upload:
    dark = {"dark": torch.nn.functional.one_hot(torch.tensor(k), 4) * -9.0}
    return Upload(UploadFacts(f"c{k}", "cvae-decoder", 10, COUNTS[k] if counts is None else counts), lambda: dark)


UPLOADS = tuple(map(upload, range(3)))


def tiny_job(config: FedCvaeEnsConfig = SMALL, *, seed: int = 0, uploads: tuple[Upload, ...] = UPLOADS) -> Job:
    return Job(uploads, BUILDERS, "net", CLASSES, SHAPE, Normalization((0.5,), (0.5,)), config, seed=seed)


def table(job: Job) -> dict[str, torch.Tensor]:
    return fedcvae_ens.FedCvaeServer(job, Silent()).table


@pytest.mark.parametrize(
    ("counts", "images", "made"),
    [
        ([1, 1, 1], 10, [3, 3, 4]),
        ([1, 2, 4], 10, [1, 2, 7]),
        ([10, 0, 30], 5000, [1250, 0, 3750]),
        ([1, 1, 0], 5, [2, 3, 0]),
        ([5] * 9, 5, [0] * 8 + [5]),
        ([0, 1, 0], 5, [0, 5, 0]),
    ],
)
def test_shares_are_rounded_down_and_the_last_client_with_examples_makes_the_remainder(
    counts: list[int], images: int, made: list[int]
) -> None:
    assert shares(counts, images) == made


def test_images_are_made_by_every_client_in_its_share_with_the_labels_it_has() -> None:
    drawn = table(tiny_job(replace(SMALL, images=600)))

    images, labels = drawn["images"], drawn["labels"]
    assert images.shape == (600, 1, 4, 4)
    assert images.dtype == torch.uint8
    first, second, third = labels[:100], labels[100:300], labels[300:]
    assert set(first.tolist()) == {0}
    assert set(second.tolist()) == {1}
    assert float((third == 1).float().mean()) == pytest.approx(5 / 30, abs=0.06)
    for k, part in enumerate((images[:100], images[100:300], images[300:])):
        assert int(part.float().mean((0, 1, 2)).argmin()) == k  # the column that this client's decoder makes dark
    rows = images.float().mean((1, 3)).argmax(1)
    assert float((rows == labels).float().mean()) > 0.95


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return fit(tiny_job(), Silent())


def test_fit_resumed_after_a_crash_ends_with_the_same_bits() -> None:
    check_resume(METHOD, tiny_job())


def test_classifiers_are_refused() -> None:
    wrong = telling(UPLOADS[0], architecture="net")

    with pytest.raises(OptionError, match="'fedcvae-ens' works on uploads of kind 'cvae'; of kind 'classifier'"):
        check_needs(METHOD, tiny_job(uploads=(wrong, *UPLOADS[1:])))


OTHER: dict[str, Any] = {"epochs": 1, "images": 30, "batch_size": 4, "student_lr": 0.1}


@pytest.mark.parametrize("name", [field.name for field in fields(FedCvaeEnsConfig)])
def test_every_option_changes_the_result(name: str, usual: Outcome) -> None:
    assert not same(fit(tiny_job(replace(SMALL, **{name: OTHER[name]})), Silent()), usual)
