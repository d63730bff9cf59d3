"""FedCVAE-Ens: the server draws images from the clients' decoders and trains one classifier on them.

Paper: Heinbaugh, Luz-Ricca, Shao, Data-Free One-Shot Federated Learning Under Very High Statistical Heterogeneity, ICLR
    2023, https://openreview.net/forum?id=_hb4vM3jspB; in the setting of FENS (Allouah et al., NeurIPS 2024,
    https://arxiv.org/abs/2411.07182). Read version: a summary of both papers.
Symbols: n_k -> sum of uploads[k].label_counts; N = sum_k n_k; S -> images; p_k(y) = n_k^y / n_k; z -> noise.
Where: floor(n_k / N * S) images of each client, the rest of S of the last -> shares;
    z ~ N(0, 1) within [-3, 3] -> truncated_normal; x = sigmoid(decoder_k(z, y)), y ~ p_k -> FedCvaeServer.draw;
    the classifier's training -> FedCvaeServer.epoch.
Deviations: images are drawn once and kept as 8-bit pixels, as image files are. The paper pads images to 32 pixels a
    side; here they have their own size, 16 or 32. The epochs are those of the authors' best runs on MNIST.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import OptionError
from ..core.gpu import adam
from ..core.options import config_class, option
from ..core.seeds import generator
from ..distillation.distill import Distillation
from ..distillation.epochs import Stage, run_epochs, sample_images
from ..distillation.losses import cross_entropy
from ..distillation.pool import Pool, batch_count, quantize, shuffled_batches
from ..distillation.settings import shared
from ..method import Job, Method, Need, Outcome, Progress, Upload
from ..teacher.augment import Standardize, dequantize
from ..teacher.ensemble import load_member
from ..teacher.student import fast_student

CUT = 3.0  # the noise stays within so many standard deviations
CHUNK = 500  # images decoded at once


@config_class("fedcvae-ens")
class FedCvaeEnsConfig:
    """Options of FedCVAE-Ens; the defaults are those of its authors' best runs on MNIST, which FENS took over."""

    epochs: int = shared("epochs", 10)
    images: int = option(5000, "images S drawn from all decoders together", low=2, main=True)
    batch_size: int = shared("batch_size", 32)
    student_lr: float = shared("student_lr", 1e-3)  # of Adam


def fit(job: Job, progress: Progress) -> Outcome:
    """Run the server stage: draw the images, then train; the result is the last epoch's student."""
    server = FedCvaeServer(job, progress)
    outcome = run_epochs(job, progress, server.stage, epochs=job.config.epochs, step=server.epoch)
    return replace(outcome, images=sample_images(server.table["images"], job.store_images))


class FedCvaeServer:
    """The state of one run of FedCVAE-Ens, and the steps of an epoch."""

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.config, self.progress = job, job.config, progress
        self.student = fast_student(job)
        self.standardize = Standardize(job.normalization).to(job.device)
        optimizer = adam(self.student.parameters(), self.config.student_lr)
        self.training = Distillation(self.student, optimizer, loss=cross_entropy)
        self.stage = Stage({"student": self.student}, optimizer, Pool())
        with self.stage.clock("synthesis"):
            self.table = self.draw()

    def draw(self) -> dict[str, Tensor]:
        """Return ``images`` uint8 [S, ch, H, W] and their ``labels`` [S], in the order of client names."""
        uploads = sorted(self.job.uploads, key=lambda upload: upload.client)
        counts = [sum(upload.label_counts or ()) for upload in uploads]
        parts = [
            _images_of(upload, share, self.job)
            for upload, share in zip(uploads, shares(counts, self.config.images), strict=True)
            if share
        ]
        images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        return {"images": images, "labels": labels}

    def epoch(self, epoch: int) -> dict[str, float]:
        """One pass over the images, in a new order."""
        of = batch_count(len(self.table["images"]), self.config.batch_size)
        tick = self.stage.ticks(self.progress, epoch, self.config.epochs, of=of)
        with self.stage.clock("training"):
            batches = self._batches(generator(self.job.seed, "training", epoch))
            return {"loss": self.training.learn(batches, tick)}

    def _batches(self, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in shuffled_batches(self.table, self.config.batch_size, rng):
            yield self.standardize(dequantize(rows["images"])), rows["labels"]


def shares(counts: Sequence[int], images: int) -> list[int]:
    """Return how many images each client's decoder makes: ``floor(n_k / N * S)``, and S in all.

    The last client with training examples also makes the remainder; the published code gives it to the last client.

    Args:
        counts: n_k, training examples per client.
        images: S.

    Raises:
        OptionError: No client has training examples.
    """
    total = sum(counts)
    if total < 1:
        raise OptionError("method 'fedcvae-ens' needs training examples: every client has 0")
    made = [images * count // total for count in counts]
    last = max(place for place, count in enumerate(counts) if count)
    made[last] += images - sum(made)
    return made


def truncated_normal(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draw from N(0, 1) within :data:`CUT` of 0, by the inverse of its distribution function.

    Args:
        rng: A CPU generator.

    Returns:
        float32, on the CPU.
    """
    low = torch.special.ndtr(torch.tensor(-CUT, dtype=torch.float64))
    uniform = torch.rand(shape, generator=rng, dtype=torch.float64)
    noise: Tensor = torch.special.ndtri(low + (1 - 2 * low) * uniform)
    return noise.float()


@torch.no_grad()
def _images_of(upload: Upload, count: int, job: Job) -> tuple[Tensor, Tensor]:
    """Return images uint8 [count, ch, H, W] of one client's decoder, and their labels [count]."""
    rng = generator(job.seed, "images", upload.client)
    # It maps noise [B, latent] and labels [B] to the logits of pixels [B, ch, H, W].
    decoder: Any = load_member(upload, job.builders).to(job.device).eval()
    frequencies = torch.tensor(upload.label_counts, dtype=torch.float64)
    labels = torch.multinomial(frequencies, count, replacement=True, generator=rng).to(job.device)
    noise = truncated_normal((count, decoder.latent), rng).to(job.device)
    pairs = zip(torch.split(noise, CHUNK), torch.split(labels, CHUNK), strict=True)
    return torch.cat([quantize(decoder(z, y).sigmoid()) for z, y in pairs]), labels


METHOD = Method(
    name="fedcvae-ens",
    title="FedCVAE-Ens",
    source="Heinbaugh et al., ICLR 2023, as in Allouah et al., NeurIPS 2024",
    config=FedCvaeEnsConfig,
    fit=fit,
    needs=frozenset({Need.IMAGES, Need.LABEL_COUNTS}),
    uploads="cvae",
)
