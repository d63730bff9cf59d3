from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from method_fakes import Book, same, telling
from torch import nn

from strategies import fedcvae_ens
from strategies.combiners.outcomes import load_model
from strategies.core.errors import OptionError, UploadError
from strategies.core.facts import UploadFacts
from strategies.fedcvae_ens import METHOD, FedCvaeEnsConfig, fit, shares, truncated_normal
from strategies.method import Job, Normalization, Outcome, Silent, Upload
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
    return fedcvae_ens._Server(job, Silent()).table


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


def test_shares_without_training_examples_are_refused() -> None:
    with pytest.raises(OptionError, match="every client has 0"):
        shares([0, 0], 5000)


def test_noise_is_normal_within_three_deviations() -> None:
    drawn = truncated_normal((200_000,), torch.Generator().manual_seed(0)).double().numpy()

    grid = np.linspace(-3, 3, 60_001)
    density = np.exp(-(grid**2) / 2)
    variance = (grid**2 * density).sum() / density.sum()
    assert np.abs(drawn).max() <= 3.0
    assert np.abs(drawn).max() > 2.99
    assert drawn.mean() == pytest.approx(0.0, abs=0.01)
    assert drawn.var() == pytest.approx(variance, rel=0.01)
    inside = density[np.abs(grid) < 1].sum() / density.sum()
    assert (np.abs(drawn) < 1).mean() == pytest.approx(inside, abs=0.005)


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


def test_images_are_the_sigmoid_of_the_decoder_s_output() -> None:
    one = tiny_job(uploads=(upload(1),))
    seen: list[torch.Tensor] = []

    class Watched(Rows):
        def forward(self, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            assert not self.training
            seen.append(super().forward(noise, labels))
            return seen[-1]

    images = table(replace(one, builders={**BUILDERS, "cvae-decoder": Watched}))["images"]

    wanted = np.floor(255 / (1 + np.exp(-torch.cat(seen).double().numpy())) + 1e-4)
    assert np.abs(images.numpy() - wanted).max() <= 1


def test_student_learns_from_the_images() -> None:
    one = tiny_job(replace(SMALL, epochs=8))

    model = load_model(fit(one, Silent()), one)

    test = table(tiny_job(seed=5))
    with torch.no_grad():
        found = model((test["images"] / 255 - 0.5) / 0.5).argmax(1)
    assert float((found == test["labels"]).float().mean()) > 0.95


@pytest.fixture(scope="module")
def usual() -> Outcome:
    return fit(tiny_job(), Silent())


def test_fit_with_the_same_seed_gives_the_same_bits_and_with_another_others(usual: Outcome) -> None:
    assert same(fit(tiny_job(), Silent()), usual)
    assert not same(fit(tiny_job(seed=1), Silent()), usual)


def test_fit_does_not_depend_on_the_order_of_uploads(usual: Outcome) -> None:
    assert same(fit(tiny_job(uploads=UPLOADS[::-1]), Silent()), usual)


def test_fit_resumed_after_a_crash_ends_with_the_same_bits(usual: Outcome) -> None:
    kept = Book(keep=True)
    fit(tiny_job(), kept)

    assert [snapshot.step for snapshot in kept.snapshots] == [1, 2, 3]
    for snapshot in kept.snapshots:
        assert same(fit(tiny_job(), Book(snapshot)), usual)


def test_epochs_are_recorded_and_a_sample_of_the_images_shown(usual: Outcome) -> None:
    book = Book()
    fit(tiny_job(), book)

    assert [row["epoch"] for row in book.rows] == [1, 2, 3]
    losses = [row["loss"] for row in book.rows]
    assert losses == sorted(losses, reverse=True)
    assert usual.images is not None
    assert usual.images.shape == (60, *SHAPE)  # all that it draws
    assert usual.images.dtype == torch.uint8
    assert usual.timings.keys() >= {"synthesis", "training"}


def test_a_client_whose_share_is_less_than_an_image_makes_none() -> None:
    few = (upload(0, (1, 0, 0)), upload(1, (0, 0, 2000)))

    assert table(tiny_job(uploads=few))["labels"].tolist() == [2] * 60


def test_clients_that_tell_no_counts_are_refused() -> None:
    check_needs(METHOD, tiny_job())

    with pytest.raises(OptionError, match="'fedcvae-ens' needs label counts, .* c1"):
        check_needs(
            METHOD,
            tiny_job(uploads=(UPLOADS[0], telling(UPLOADS[1], label_counts=None))),
        )


def test_classifiers_are_refused() -> None:
    wrong = telling(UPLOADS[0], architecture="net")

    with pytest.raises(OptionError, match="'fedcvae-ens' works on uploads of kind 'cvae'; of kind 'classifier'"):
        check_needs(METHOD, tiny_job(uploads=(wrong, *UPLOADS[1:])))


def test_a_decoder_of_another_size_is_refused() -> None:
    broken = replace(UPLOADS[0], read=lambda: {"dark": torch.zeros(5)})

    with pytest.raises(UploadError, match="upload of 'c0' does not fit 'cvae-decoder'"):
        fit(tiny_job(uploads=(broken, *UPLOADS[1:])), Silent())


OTHER: dict[str, Any] = {"epochs": 1, "images": 30, "batch_size": 4, "student_lr": 0.1}


@pytest.mark.parametrize("name", [field.name for field in fields(FedCvaeEnsConfig)])
def test_every_option_changes_the_result(name: str, usual: Outcome) -> None:
    assert not same(fit(tiny_job(replace(SMALL, **{name: OTHER[name]})), Silent()), usual)


@pytest.mark.parametrize(("field", "value"), [("images", 1), ("student_lr", 0.0), ("batch_size", 1), ("epochs", 0)])
def test_config_out_of_range_names_its_key(field: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"fedcvae-ens.{field.replace('_', '-')}"):
        FedCvaeEnsConfig(**{field: value})  # type: ignore[arg-type]
