"""Gathers the evidence on all uploads before any is judged; memory holds one model at a time.

Synthetic images probe the models: noise, images inverted from a model, and the smallest trigger that fools one.

Paper: Wang, Yao, Shan, Li, Viswanath, Zheng, Zhao, Neural Cleanse: Identifying and Mitigating Backdoor Attacks in
    Neural Networks, IEEE S&P 2019, https://doi.org/10.1109/SP.2019.00031. Read version: a summary of the paper.
Symbols: m -> masks; Delta -> patterns; lambda -> SPARSITY; y_t -> targets.
Where: ``A(x, m, Delta) = (1 - m) x + m Delta``, Eq. (2) -> stamped; the minimum of ``CE(f(A(x)), y_t) + lambda |m|_1``,
    Eq. (3) -> search_triggers.
Deviations: x are images inverted from the clients' models, because the server has none of the clients' images. lambda
    is fixed; the paper adapts it to an attack rate of 99 %. All targets are searched in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.facts import CLASSIFIER, holds_images, is_head, kind_of
from ..core.gpu import eager
from ..core.layout import settle_input
from ..core.seeds import generator
from ..core.stage_options import GatekeeperConfig
from ..method import Job, Progress, Upload
from ..teacher.augment import Standardize, jitter
from ..teacher.batchnorm import batchnorm_loss
from ..teacher.ensemble import Ensemble
from .measures import median, statistic_norms, weight_norms, weight_vector

INVERSION_LR = 0.1  # Adam's, of inverted pixels
SMOOTHNESS = 0.02  # weight of their roughness
STATISTICS = 0.1  # weight of the batch-normalisation loss
COARSE = 4  # side of the noise that is upsampled to an image
TRIGGER_LR = 0.3  # Adam's, of masks and patterns
SPARSITY = 0.05  # weight of a mask's size
FAINT = -2.0  # initial logit of a mask
AT_ONCE = 256  # images in one forward pass

Shape = tuple[int, int, int]
Tick = Callable[[], None]


def noise_images(count: int, shape: Shape, rng: torch.Generator) -> Tensor:
    """Return pixels [count, ch, H, W] in [0, 1]: a third each uniform, normal, and smooth.

    Args:
        count: At least 1.
        shape: (channels, height, width).
    """
    channels, height, width = shape
    uniform = torch.rand((count, *shape), generator=rng)
    normal = (0.5 + 0.25 * torch.randn((count, *shape), generator=rng)).clamp(0, 1)
    coarse = torch.rand((count, channels, COARSE, COARSE), generator=rng)
    smooth = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    kinds = torch.stack([uniform, normal, smooth])
    return kinds[torch.arange(count) % 3, torch.arange(count)]


def invert(
    model: nn.Module,
    labels: Tensor,
    shape: Shape,
    standardize: Standardize,
    *,
    steps: int,
    rng: torch.Generator,
    tick: Tick,
) -> Tensor:
    """Return pixels [B, ch, H, W] in [0, 1] that a model predicts as these classes.

    They minimise ``CE(f(x), y) + 0.02 TV(x) + 0.1 L_BN(x)`` by Adam, TV the sum of squared differences of neighbours.

    Args:
        model: Frozen, in eval mode.
        labels: y [B].
        shape: (channels, height, width).
        steps: Steps of Adam.
    """
    channels, height, width = shape
    coarse = torch.rand((len(labels), channels, COARSE, COARSE), generator=rng)
    start = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    free = torch.logit(0.1 + 0.2 * start).to(labels.device).requires_grad_()
    optimizer = eager(torch.optim.Adam)([free], lr=INVERSION_LR)
    with torch.enable_grad(), batchnorm_loss([model]) as statistics:
        for _ in range(steps):
            pixels = torch.sigmoid(free)
            logits = model(standardize(jitter(pixels, 1, rng)))
            loss = F.cross_entropy(logits, labels) + SMOOTHNESS * _roughness(pixels) + STATISTICS * statistics()
            (free.grad,) = torch.autograd.grad(loss, [free])
            optimizer.step()
            tick()
    return torch.sigmoid(free).detach()


def _roughness(pixels: Tensor) -> Tensor:
    down = (pixels[..., 1:, :] - pixels[..., :-1, :]).square().sum()
    return (down + (pixels[..., 1:] - pixels[..., :-1]).square().sum()) / len(pixels)


@dataclass(frozen=True)
class Triggers:
    """The triggers found for each target class of one model.

    Attributes:
        masks: m [T, 1, H, W] in [0, 1].
        patterns: Delta [T, ch, H, W], pixels in [0, 1].
        success: Of the images not predicted as the target, the share that the trigger moves to it [T].
    """

    masks: Tensor
    patterns: Tensor
    success: Tensor

    @property
    def sizes(self) -> Tensor:
        """``|m|_1`` of each target [T], in pixels."""
        return self.masks.sum((1, 2, 3))


def stamp_trigger(images: Tensor, mask: Tensor, pattern: Tensor) -> Tensor:
    """Return ``(1 - m) x + m Delta``, Eq. (2)."""
    return (1 - mask) * images + mask * pattern


def search_triggers(
    model: nn.Module, images: Tensor, classes: int, standardize: Standardize, *, steps: int, tick: Tick
) -> Triggers:
    """Return the smallest trigger found for each class: Eq. (3) of Neural Cleanse, from the same start for all.

    Args:
        model: Frozen, in eval mode.
        images: Pixels [B, ch, H, W] in [0, 1].
        classes: C; every class is a target.
        steps: Steps of Adam.
    """
    group = max(1, AT_ONCE // len(images))
    found = [
        _search(model, images, targets.to(images.device), standardize, steps=steps, tick=tick)
        for targets in torch.split(torch.arange(classes), group)
    ]
    masks, patterns = (torch.cat(parts) for parts in zip(*found, strict=True))
    before = predict_labels(model, images, standardize)
    success = [
        moved_share(before, predict_labels(model, stamp_trigger(images, masks[t], patterns[t]), standardize), t)
        for t in range(classes)
    ]
    return Triggers(masks, patterns, torch.tensor(success))


def _search(
    model: nn.Module, images: Tensor, targets: Tensor, standardize: Standardize, *, steps: int, tick: Tick
) -> tuple[Tensor, Tensor]:
    count, (batch, channels, height, width) = len(targets), images.shape
    mask = torch.full((count, 1, 1, height, width), FAINT, device=images.device).requires_grad_()
    pattern = torch.zeros((count, 1, channels, height, width), device=images.device).requires_grad_()
    optimizer = eager(torch.optim.Adam)([mask, pattern], lr=TRIGGER_LR, betas=(0.5, 0.9))
    wanted = targets.repeat_interleave(batch)
    with torch.enable_grad():
        for _ in range(steps):
            shown = stamp_trigger(images, torch.sigmoid(mask), torch.sigmoid(pattern))
            logits = model(standardize(shown.flatten(0, 1)))
            loss = F.cross_entropy(logits, wanted, reduction="sum") / batch + SPARSITY * torch.sigmoid(mask).sum()
            mask.grad, pattern.grad = torch.autograd.grad(loss, [mask, pattern])
            optimizer.step()
            tick()
    return torch.sigmoid(mask).detach()[:, 0], torch.sigmoid(pattern).detach()[:, 0]


def moved_share(before: Tensor, after: Tensor, target: int) -> float:
    """Return the share of predictions [B] that were not the target before and are after; NaN if all were."""
    others = before != target
    return float((after[others] == target).float().mean()) if others.any() else float("nan")


@torch.no_grad()
def logits_of(model: nn.Module, images: Tensor, standardize: Standardize) -> Tensor:
    """Return logits [N, C] in float32 of pixels [N, ch, H, W]."""
    return torch.cat([model(standardize(part)).float() for part in torch.split(images, AT_ONCE)])


def predict_labels(model: nn.Module, images: Tensor, standardize: Standardize) -> Tensor:
    """Return the predicted classes [N] of pixels [N, ch, H, W]."""
    return logits_of(model, images, standardize).argmax(1)


LEAST_EXAMPLES = 10  # a client knows a class from this many examples on,
LEAST_SHARE = 0.05  # which must also be this share of all its examples
MOST_PROBES = 1024  # images inverted from all clients together
MOST_CLASSES = 10  # classes of a client for which images are inverted
NOISE = 48  # images of noise besides the inverted ones
TRIGGER_IMAGES = 16  # images on which a trigger is searched
TRIGGER_SIZE = 0.5  # a trigger is suspect below this multiple of the median of the other clients' smallest
WORKS = 0.8  # a trigger works if it moves this share of the images


@dataclass(frozen=True)
class Trigger:
    """The smallest working trigger of one client's model.

    Attributes:
        size: ``|m|_1``, in pixels.
        mask: m [1, H, W].
        pattern: Delta [ch, H, W].
        transfer: Share of the images that it moves to the target in the other models that know the target, else in all
            others; NaN if it was not tried.
    """

    target: int
    size: float
    mask: Tensor
    pattern: Tensor
    transfer: float = math.nan


@dataclass(frozen=True)
class Behaviour:
    """The models' behaviour on synthetic images.

    Attributes:
        logits: [M, N, C]; the last ``NOISE`` images are noise, the others are inverted from the models.
        labels: The class that each inverted image was made for; noise images have none.
        makers: The client that each inverted image was made from.
        sizes: Size of the smallest trigger found for every class [M, C]; NaN if none works, empty without a search.
        triggers: Each client's smallest working trigger; None if none works.
    """

    logits: Tensor
    labels: Tensor
    makers: Tensor
    sizes: Tensor
    triggers: Sequence[Trigger | None]

    @property
    def inverted(self) -> Tensor:
        """The logits of the inverted images alone."""
        return self.logits[:, : len(self.labels)]


@dataclass(frozen=True)
class Evidence:
    """The evidence on a cohort of uploads.

    Attributes:
        clients: Names [M].
        architectures: [M].
        known: Whether a client knows a class [M, C].
        norms: Layer -> norm of its weight, per client.
        statistics: Layer -> mean running variance, per client.
        behaviour: None for uploads that are no classifiers of images.
    """

    clients: Sequence[str]
    architectures: Sequence[str]
    known: Tensor
    norms: Sequence[dict[str, float]]
    statistics: Sequence[dict[str, float]]
    vectors: Sequence[Tensor]
    behaviour: Behaviour | None


def can_judge_by_images(job: Job) -> bool:
    """Return whether the uploads are classifiers of images that gradients reach, whose predictions can be judged."""
    names = [upload.architecture for upload in job.uploads]
    return holds_images(job.input_shape) and all(kind_of(one) == CLASSIFIER and not is_head(one) for one in names)


def gather_evidence(job: Job, config: GatekeeperConfig, progress: Progress) -> Evidence:
    """Measure every upload of a job.

    Args:
        job: The job; its device must belong to this process.
        progress: Receives the percentage that is done.

    Raises:
        UploadError: An upload's weights do not fit its architecture.
    """
    return _Gatherer(job, config, progress).run()


class _Gatherer:
    """Three passes over the uploads: weights and images; logits and triggers; the triggers' effect on other models."""

    def __init__(self, job: Job, config: GatekeeperConfig, progress: Progress) -> None:
        self.job, self.config, self.progress = job, config, progress
        self.standardize = Standardize(job.normalization).to(job.device)
        self.known = known_classes(job)
        self.images = can_judge_by_images(job)
        # Work is counted in images that pass through a model and back.
        self.done, self.inverting = 0, config.images * min(MOST_CLASSES, job.num_classes)
        self.total = len(job.uploads) * (
            (config.steps * self.inverting + config.trigger_steps * job.num_classes * TRIGGER_IMAGES)
            if self.images
            else 1
        )

    def run(self) -> Evidence:
        norms, statistics, vectors = [], [], []
        made: list[Tensor] = []
        labels: list[Tensor] = []
        for number, upload in enumerate(self.job.uploads):
            model = self.model(upload)
            state = model.state_dict()
            norms.append(weight_norms(state))
            statistics.append(statistic_norms(state))
            vectors.append(weight_vector(state, generator(self.job.seed, "gatekeeper", "signs")).cpu())
            if self.images:
                labels.append(self.wanted(number))
                made.append(self.inverted(model, number, labels[-1]))
            else:
                self.tick(1)
        names, kinds = [u.client for u in self.job.uploads], [u.architecture for u in self.job.uploads]
        behaviour = self.behaviour(made, labels) if self.images else None
        if behaviour is not None:
            self.learn_known(behaviour)
        self.progress.report(100, 100)
        return Evidence(names, kinds, self.known, norms, statistics, vectors, behaviour)

    def model(self, upload: Upload) -> nn.Module:
        nobody = nn.Identity()  # combines the answers of no others
        ensemble = Ensemble.from_uploads([upload], self.job.builders, nobody, device=self.job.device, fold=False)
        model = ensemble.get_submodule("members.0")
        if self.images:  # called past the ensemble, which settles its members at their first images
            settle_input(model, torch.zeros(2, *self.job.input_shape, device=self.job.device))
        return model

    def tick(self, images: int) -> None:
        self.done += images
        self.progress.report(min(99, 100 * self.done // max(1, self.total)), 100)

    def wanted(self, number: int) -> Tensor:
        """Return the labels of the images to invert from a model, those of the classes that it knows best."""
        counts = self.job.uploads[number].label_counts
        classes = torch.nonzero(self.known[number])[:, 0] if counts is not None else torch.arange(self.job.num_classes)
        if counts is not None:
            classes = classes[torch.tensor(counts)[classes].argsort(descending=True, stable=True)]
        classes = classes[:MOST_CLASSES]
        most = MOST_PROBES // (len(self.job.uploads) * max(1, len(classes)))
        return classes.repeat_interleave(max(1, min(self.config.images, most)))

    def inverted(self, model: nn.Module, number: int, labels: Tensor) -> Tensor:
        rng = generator(self.job.seed, "gatekeeper", "inversion", self.job.uploads[number].client)
        shape, steps = self.job.input_shape, self.config.steps
        if not len(labels):
            return torch.zeros((0, *shape))
        return invert(
            model, labels.to(self.job.device), shape, self.standardize, steps=steps, rng=rng,
            tick=lambda: self.tick(self.inverting),
        ).cpu()  # fmt: skip

    def behaviour(self, made: list[Tensor], labels: list[Tensor]) -> Behaviour:
        job, device = self.job, self.job.device
        rng = generator(job.seed, "gatekeeper", "noise")
        shown = torch.cat([*made, noise_images(NOISE, job.input_shape, rng)]).to(device)
        whole = torch.cat([*made])
        drawn = torch.randperm(len(whole), generator=generator(job.seed, "gatekeeper", "pool"))[:TRIGGER_IMAGES]
        pool = whole[drawn.to(whole.device)].to(device)
        logits, sizes, triggers = [], [], list[Trigger | None]()
        for upload in job.uploads:
            model = self.model(upload)
            logits.append(logits_of(model, shown, self.standardize).cpu())
            if self.config.trigger_steps and len(pool):
                found, trigger = self.trigger(model, pool)
                sizes.append(found)
                triggers.append(trigger)
        makers = torch.arange(len(labels)).repeat_interleave(torch.tensor([len(own) for own in labels]))
        triggers = self.tried(triggers, pool) if triggers else [None] * len(job.uploads)
        found_sizes = torch.stack(sizes) if sizes else torch.zeros((0, job.num_classes))
        return Behaviour(torch.stack(logits), torch.cat(labels), makers, found_sizes, triggers)

    def trigger(self, model: nn.Module, pool: Tensor) -> tuple[Tensor, Trigger | None]:
        """Return the size of every class's trigger [C], NaN if it does not work, and the smallest working trigger."""
        group = max(1, 256 // len(pool))
        work = len(pool) * min(group, self.job.num_classes)
        found = search_triggers(
            model, pool, self.job.num_classes, self.standardize, steps=self.config.trigger_steps,
            tick=lambda: self.tick(work),
        )  # fmt: skip
        sizes = torch.where(found.success.to(found.sizes) >= WORKS, found.sizes, torch.nan).cpu()
        if sizes.isnan().all():
            return sizes, None
        best = int(sizes.nan_to_num(nan=math.inf).argmin())
        return sizes, Trigger(best, float(sizes[best]), found.masks[best].clone(), found.patterns[best].clone())

    def tried(self, triggers: list[Trigger | None], pool: Tensor) -> list[Trigger | None]:
        """Return the triggers, with the transfer to the other models for those that are suspiciously small."""
        sizes = [t.size if t is not None else math.nan for t in triggers]
        looked = [k for k, size in enumerate(sizes) if size < TRIGGER_SIZE * usual_size(sizes, k)]
        seen: dict[int, dict[int, float]] = {k: {} for k in looked}
        for j, upload in enumerate(self.job.uploads if looked else ()):
            model = self.model(upload)
            before = predict_labels(model, pool, self.standardize)
            for k in looked:
                trigger = triggers[k]
                if k != j and trigger is not None:
                    after = predict_labels(model, stamp_trigger(pool, trigger.mask, trigger.pattern), self.standardize)
                    seen[k][j] = moved_share(before, after, trigger.target)
        return [self.with_transfer(t, seen.get(k, {})) for k, t in enumerate(triggers)]

    def with_transfer(self, trigger: Trigger | None, seen: dict[int, float]) -> Trigger | None:
        if trigger is None or not seen:
            return trigger
        knowing = [share for j, share in seen.items() if self.known[j, trigger.target]] or list(seen.values())
        transfer = sum(knowing) / len(knowing)
        return Trigger(trigger.target, trigger.size, trigger.mask, trigger.pattern, transfer)

    def learn_known(self, behaviour: Behaviour) -> None:
        """Set the known classes of clients without label counts to those that they predict often enough."""
        predictions = behaviour.inverted.argmax(2)
        for number, upload in enumerate(self.job.uploads):
            if upload.label_counts is None and predictions.shape[1]:
                votes = torch.bincount(predictions[number], minlength=self.job.num_classes)
                self.known[number] = votes[: self.job.num_classes] >= LEAST_SHARE * predictions.shape[1]


def usual_size(sizes: Sequence[float], client: int) -> float:
    """Return the median of the other clients' smallest triggers."""
    return median([size for j, size in enumerate(sizes) if j != client])


def known_classes(job: Job) -> Tensor:
    """Return which classes each client knows by its label counts [M, C]; all classes for a client without counts."""
    known = torch.ones((len(job.uploads), job.num_classes), dtype=torch.bool)
    for number, upload in enumerate(job.uploads):
        if upload.label_counts is not None:
            counts = torch.tensor(upload.label_counts)
            known[number] = (counts >= LEAST_EXAMPLES) & (counts >= LEAST_SHARE * counts.sum())
    return known
