"""The clients of one division, trained without Flower or read from their files, and what a bench asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from client_app.node import Asked, Node
from client_app.work import Own, own_examples, trained_model
from fl_app.data import normalize
from fl_app.data.halves import half_of
from server_app.settings.build import build_job
from server_app.settings.read import Settings, known_options, read_settings
from server_app.settings.server_data import open_half
from server_app.settings.text import merge_settings
from strategies.combiners.combiners import Mean
from strategies.combiners.opinion_pools import OpinionPool
from strategies.combiners.tally_pool import TallyPoolOptions, examples_per_class, probed
from strategies.core.facts import UploadFacts
from strategies.method import Job, Upload
from strategies.run.files import read_weights, save_weights
from strategies.teacher.ensemble import Ensemble

KEPT = 0.1  # of a client's examples, which it does not train on


@dataclass(frozen=True)
class Federation:
    """The trained clients of one division, and what they and the server can compute."""

    settings: Settings
    job: Job
    ensemble: Ensemble
    owns: tuple[Own, ...]

    @cached_property
    def images(self) -> tuple[Tensor, Tensor]:
        """The held-out images, normalised, and their labels."""
        split = open_half(self.settings, "test")
        data = split.take(torch.arange(len(split.labels)))
        return normalize(data.images, *split.normalization), data.labels

    def half(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the images and the labels of a half."""
        chosen = half_of(self.images[1], name)
        return self.images[0][chosen], self.images[1][chosen]

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the members' logits [M, B, C]."""
        parts = torch.split(images, 500)
        return torch.cat([self.ensemble.member_logits(part) for part in parts], dim=1)

    def with_uploads(self, uploads: Sequence[Upload]) -> Federation:
        """Return the clients with other uploads, in their order."""
        job = replace(self.job, uploads=tuple(uploads))
        return replace(self, job=job, ensemble=Ensemble.of_job(job, job.uploads, Mean()))

    @cached_property
    def noise(self) -> Tensor:
        """The members' logits on Tally's probes."""
        return probed(self.job, self.ensemble, TallyPoolOptions().probes)

    @property
    def told(self) -> Tensor:
        """The clients' label counts [M, C]."""
        return torch.tensor([one.label_counts for one in self.job.uploads]).float()

    @cached_property
    def read_off(self) -> Tensor:
        """Their estimates [M, C]."""
        return examples_per_class(self.job, self.noise, self.job.uploads, TallyPoolOptions(counts="noise-rows"))

    def pool(self, counts: Tensor, *, calibrated: bool = True) -> OpinionPool:
        """Return Tally's pool of some counts."""
        pool = OpinionPool("log", counts)
        if calibrated:
            pool.calibrate(self.noise)
        return pool

    @cached_property
    def kept(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The images that each client keeps, normalised, and their labels."""
        found = [own.split.take(own.held) for own in self.owns]
        space = self.owns[0].split.normalization
        return tuple((normalize(data.images, *space), data.labels) for data in found)


def trained(folder: Path, text: str, clients: int) -> Federation:
    """Return the clients of a division, from their files, or trained now.

    Args:
        folder: Has, or gets, a file for each client.
        text: The settings, as for ``oneshot run``.
        clients: n.
    """
    settings = read_settings(merge_settings([text], {o.key: o.kind for o in known_options()}))
    config, asked = settings.app, Asked("", 1, settings.app.seed, holdout=KEPT)
    folder.mkdir(parents=True, exist_ok=True)
    uploads, owns = [], []
    for number in range(clients):
        node = Node.of({"partition-id": number, "num-partitions": clients}, config)
        own, file = own_examples(config, node, asked), folder / f"{node.client}.safetensors"
        if not file.exists():
            save_weights(file, trained_model(config, node, asked, {})[1])
        facts = UploadFacts(node.client, node.architecture, len(own.train), own.label_counts)
        uploads.append(Upload(facts, partial(dict, read_weights(file))))
        owns.append(own)
    job = replace(build_job(settings, open_half(settings, "test"), None), uploads=tuple(uploads), device="cpu")
    return Federation(settings, job, Ensemble.of_job(job, job.uploads, Mean()), tuple(owns))
