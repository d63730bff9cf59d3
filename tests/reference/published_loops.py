"""The published server loops of DENSE and Co-Boosting, in plain PyTorch: one line per formula, no thought of speed.

Written from the two papers' formulas and from the settings of Co-Boosting's released code (which runs DENSE with the
same ones), and from nothing else in this repository; the shipped code is compared with these loops. They do the
work of the releases: default memory layout; teachers whose weights collect unused gradients; an ensemble forward used
only for its shape; the weights' gradient through the whole graph; every pool image read and augmented one by one. Only
the image files are left out: the pool is in memory here too.

Letters: n clients, f_k(x) logits [B, C] of client k, A_w(x) = sum_k w_k f_k(x) / sum_k w_k, S student, G generator.

Every function draws from the ``torch.Generator`` it is given, in the order in which its formulas read: weights of the
generator, noise, labels; order of the pool, then per batch the crops, the mirrorings, and the directions u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rngs = Callable[[str, int], torch.Generator]  # (what for, epoch) -> its random numbers
GeneratorLoss = Callable[["State", "Settings", Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """What the released code of Co-Boosting runs with; the epochs are the paper's.

    Attributes:
        epochs: T, server epochs.
        steps: T_G, generator steps per epoch.
        batch: b, of synthesis and of distillation.
        student_batch: Of distillation and reweighting, where it differs; 0: b.
        latent: Length of the noise z.
        wide: Channels of the generator, an even number.
        classes: C.
        generator_lr: Adam's, betas (0.5, 0.999).
        generator_clip: Largest norm of the generator's gradient.
        student_lr: SGD's at the first epoch; it falls to 0 along a cosine.
        momentum: SGD's.
        weight_decay: SGD's.
        student_clip: Largest norm of the student's gradient.
        kd_temperature: Of the distillation loss.
        adversarial_weight: beta, of the loss L_A (l_div of DENSE, lambda_2).
        adversarial_temperature: Its temperature; its square is a factor.
        perturbation: epsilon of the on-the-fly perturbation, in normalised space.
        perturbation_temperature: Of the probabilities whose gradient it follows.
        mu: Step of the clients' weights.
        mu_decay: What mu is multiplied by every epoch.
        augment: Pool images are cropped and mirrored whenever they are read (CIFAR), or not (digits and clothes).
        eight_bits: The pool holds 8 bits per pixel, as image files do.
    """

    epochs: int = 500
    steps: int = 30
    batch: int = 128
    student_batch: int = 0
    latent: int = 256
    wide: int = 128
    classes: int = 10
    generator_lr: float = 1e-3
    generator_clip: float = 10.0
    student_lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    student_clip: float = 10.0
    kd_temperature: float = 4.0
    adversarial_weight: float = 1.0
    adversarial_temperature: float = 3.0
    perturbation: float = 8 / 255
    perturbation_temperature: float = 4.0
    mu: float = 0.01
    mu_decay: float = 0.99
    augment: bool = False
    eight_bits: bool = True


@dataclass
class State:
    """Everything that changes from epoch to epoch.

    Attributes:
        teachers: The n client models f_k, normalised images [B, ch, H, W] -> logits [B, C].
        student: S.
        generator: G, noise [B, Z] -> pixels [B, ch, H, W] in [0, 1].
        optimizer: SGD of the student.
        weights: w [n].
        images: The pool's pixels [N, ch, H, W], uint8 (or in [0, 1]).
        labels: The classes they were meant to have [N].
        losses: What the last generator step's total loss and the last epoch's mean distillation loss were.
    """

    teachers: list[nn.Module]
    student: nn.Module
    generator: nn.Module
    optimizer: torch.optim.Optimizer
    weights: Tensor
    images: Tensor
    labels: Tensor
    losses: dict[str, float] = field(default_factory=dict)


class PlainGenerator(nn.Module):
    """The generator of both papers: Linear, BN, twice [nearest upsampling, convolution, BN, leaky ReLU], sigmoid.

    Args:
        latent: Z.
        shape: (channels, height, width) of an image, height and width multiples of 4.
        wide: The papers' 128 channels, an even number.
    """

    def __init__(self, latent: int, shape: tuple[int, int, int], wide: int = 128) -> None:
        super().__init__()
        channels, height, width = shape
        self.first = (wide, height // 4, width // 4)
        self.project = nn.Linear(latent, math.prod(self.first))
        self.norm0 = nn.BatchNorm2d(wide)
        self.up1, self.norm1 = nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.BatchNorm2d(wide)
        self.up2, self.norm2 = nn.Conv2d(wide, wide // 2, 3, padding=1, bias=False), nn.BatchNorm2d(wide // 2)
        self.pixels = nn.Conv2d(wide // 2, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Map noise [B, Z] to pixels [B, channels, height, width] in [0, 1]."""
        x: Tensor = self.norm0(self.project(z).view(-1, *self.first))
        x = F.leaky_relu(self.norm1(self.up1(F.interpolate(x, scale_factor=2))), 0.2)
        x = F.leaky_relu(self.norm2(self.up2(F.interpolate(x, scale_factor=2))), 0.2)
        pixels: Tensor = torch.sigmoid(self.pixels(x))
        return pixels


def new_state(
    teachers: Sequence[nn.Module], student: nn.Module, shape: tuple[int, int, int], settings: Settings
) -> State:
    """Return the state before the first epoch: equal weights, an empty pool; the models are used as they are."""
    optimizer = torch.optim.SGD(
        student.parameters(), settings.student_lr, settings.momentum, weight_decay=settings.weight_decay
    )
    return State(
        teachers=[teacher.eval() for teacher in teachers],
        student=student,
        generator=PlainGenerator(settings.latent, shape, settings.wide),
        optimizer=optimizer,
        weights=torch.full((len(teachers),), 1 / len(teachers)),
        images=torch.empty(0, *shape, dtype=torch.uint8 if settings.eight_bits else torch.float32),
        labels=torch.empty(0, dtype=torch.long),
    )


# One server epoch.


def dense_epoch(state: State, settings: Settings, epoch: int, rngs: Rngs) -> None:
    """One epoch of DENSE (epochs count from 0): SYNTH, the pool grows, KD."""
    images, labels = synthesize(state, settings, rngs("synthesis", epoch), dense_loss, sort=True)
    remember(state, settings, images, labels)
    distil(state, settings, epoch, rngs("distillation", epoch), perturb=False)


def co_boosting_epoch(state: State, settings: Settings, epoch: int, rngs: Rngs) -> None:
    """One epoch of Co-Boosting (epochs count from 0): SYNTH, REWEIGHT on the old pool, the pool grows, ODI and KD."""
    images, labels = synthesize(state, settings, rngs("synthesis", epoch), co_boosting_loss, sort=False)
    if epoch > 0:
        reweight(state, settings, epoch, rngs("reweighting", epoch))
    remember(state, settings, images, labels)
    distil(state, settings, epoch, rngs("distillation", epoch), perturb=True)


# SYNTH: the generator's loss, and the images it ends with.


def ensemble(state: State, x: Tensor) -> Tensor:
    """Return A_w(x) [B, C]."""
    total = torch.zeros(())
    for weight, teacher in zip(state.weights, state.teachers, strict=True):
        total = total + weight * teacher(x)
    return total / state.weights.sum()


def kl(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return T^2 KL(sm(t / T) || sm(s / T)) per image [B]."""
    log_student = F.log_softmax(student / temperature, dim=1)
    divergence = F.kl_div(log_student, F.softmax(teacher / temperature, dim=1), reduction="none").sum(1)
    return temperature**2 * divergence


def dense_loss(state: State, settings: Settings, x: Tensor, labels: Tensor) -> Tensor:
    """l_CE + lambda_2 l_div, with the mask of Eq. (6): only where teacher and student disagree."""
    teacher, student = ensemble(state, x), state.student(x)
    disagree = (teacher.argmax(1) != student.argmax(1)).float()
    divergence = -(disagree * kl(teacher, student, settings.adversarial_temperature)).mean()
    loss: Tensor = F.cross_entropy(teacher, labels) + settings.adversarial_weight * divergence
    return loss


def co_boosting_loss(state: State, settings: Settings, x: Tensor, labels: Tensor) -> Tensor:
    """L_H + beta L_A, Eqs. (5) to (8): cross-entropy, heavier on hard images; disagreement without a mask."""
    teacher, student = ensemble(state, x), state.student(x)
    difficulty = 1 - F.softmax(teacher, dim=1).gather(1, labels[:, None]).squeeze(1).detach()
    hard = (difficulty * F.cross_entropy(teacher, labels, reduction="none")).mean()
    return hard - settings.adversarial_weight * kl(teacher, student, settings.adversarial_temperature).mean()


def synthesize(
    state: State, settings: Settings, rng: torch.Generator, loss_of: GeneratorLoss, *, sort: bool
) -> tuple[Tensor, Tensor]:
    """Train a new generator on one batch of noise, which is optimised with it; return the images of the lowest loss.

    Returns:
        Pixels [b, ch, H, W] in [0, 1] and the classes they were meant to have [b].
    """
    reset(state.generator, rng)
    z = torch.randn(settings.batch, settings.latent, generator=rng).requires_grad_()
    labels = torch.randint(settings.classes, (settings.batch,), generator=rng)
    labels = labels.sort().values if sort else labels
    optimizer = torch.optim.Adam([*state.generator.parameters(), z], settings.generator_lr, betas=(0.5, 0.999))
    state.generator.train()
    state.student.eval()
    best, kept = math.inf, torch.empty(0)
    for _ in range(settings.steps):
        images = state.generator(z)
        loss = loss_of(state, settings, normalise(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(state.generator.parameters(), settings.generator_clip)
        optimizer.step()
        if loss.item() < best:
            best, kept = loss.item(), images.detach()
        state.losses["generator"] = loss.item()
    return kept, labels


def reset(generator: nn.Module, rng: torch.Generator) -> None:
    """Draw linear and convolution weights from N(0, 0.02), normalisation weights from N(1, 0.02); every bias is 0."""
    for module in generator.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
            centre = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
            module.weight.data = centre + 0.02 * torch.randn(module.weight.shape, generator=rng)
            if module.bias is not None:
                module.bias.data.zero_()


def normalise(pixels: Tensor) -> Tensor:
    """Return (x - 0.5) / 0.5."""
    return (pixels - 0.5) / 0.5


# The pool.


def remember(state: State, settings: Settings, images: Tensor, labels: Tensor) -> None:
    """Add images to the pool, as 8 bits per pixel: floor(255 x)."""
    stored = (images.clamp(0, 1) * 255).to(torch.uint8) if settings.eight_bits else images
    state.images, state.labels = torch.cat([state.images, stored]), torch.cat([state.labels, labels])


def read(state: State, settings: Settings, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Pass once over the pool in a random order, the last partial batch too: normalised images, intended classes."""
    for chosen in torch.split(
        torch.randperm(len(state.images), generator=rng), settings.student_batch or settings.batch
    ):
        pixels = state.images[chosen].float() / 255 if settings.eight_bits else state.images[chosen]
        yield normalise(crop_and_flip(pixels, rng) if settings.augment else pixels), state.labels[chosen]


def crop_and_flip(pixels: Tensor, rng: torch.Generator) -> Tensor:
    """Pad each image [ch, H, W] with 4 black pixels, cut it to its old size at a random place, mirror every second."""
    height, width = pixels.shape[2:]
    top, left = torch.randint(0, 9, (2, len(pixels)), generator=rng).tolist()
    mirrored = torch.randint(0, 2, (len(pixels),), generator=rng).tolist()
    cut = [F.pad(x, [4] * 4)[:, i : i + height, j : j + width] for x, i, j in zip(pixels, top, left, strict=True)]
    return torch.stack([x.flip(2) if flip else x for x, flip in zip(cut, mirrored, strict=True)])


# REWEIGHT, ODI, KD.


def reweight(state: State, settings: Settings, epoch: int, rng: torch.Generator) -> None:
    """Pass once over the pool; per batch, w <- clip(w - mu 0.99^e sign(d/dw CE(A_w(x), y)), 0, 1), Eqs. (11), (12)."""
    for x, labels in read(state, settings, rng):
        before = state.weights
        weights = weights_gradient(state, x, labels)
        state.weights = (before - settings.mu * settings.mu_decay**epoch * weights.sign()).clamp(0, 1)
        if state.weights.sum() < 1e-8:  # no ensemble would be left
            state.weights = before


def weights_gradient(state: State, x: Tensor, labels: Tensor) -> Tensor:
    """Return d/dw CE(A_w(x), y) [n], through the whole graph."""
    state.weights = state.weights.clone().requires_grad_()
    F.cross_entropy(ensemble(state, x), labels).backward()  # type: ignore[no-untyped-call]
    gradient, state.weights = state.weights.grad, state.weights.detach()
    assert gradient is not None
    return gradient


def diversify(state: State, settings: Settings, x: Tensor, rng: torch.Generator) -> Tensor:
    """ODI, Eq. (10): x + epsilon sign(grad_x u . sm(A_w(x) / 4)), u ~ U[-1, 1]."""
    u = torch.rand(ensemble(state, x).shape, generator=rng) * 2 - 1  # one forward for its shape
    return x + settings.perturbation * images_gradient(state, settings, x, u).sign()


def images_gradient(state: State, settings: Settings, x: Tensor, u: Tensor) -> Tensor:
    """Return grad_x sum_i u_i . sm(A_w(x_i) / 4) [B, ch, H, W]."""
    x = x.clone().requires_grad_()
    softened = F.softmax(ensemble(state, x) / settings.perturbation_temperature, dim=1)
    (u * softened).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


def distil(state: State, settings: Settings, epoch: int, rng: torch.Generator, *, perturb: bool) -> None:
    """Pass once over the pool; per batch one step of the student on T^2 KL(sm(A(x) / T) || sm(S(x) / T))."""
    for group in state.optimizer.param_groups:
        group["lr"] = settings.student_lr * (1 + math.cos(math.pi * epoch / settings.epochs)) / 2
    state.student.train()
    losses = []
    for clean, _ in read(state, settings, rng):
        x = diversify(state, settings, clean, rng) if perturb else clean
        with torch.no_grad():
            teacher = ensemble(state, x)
        loss = kl(teacher, state.student(x), settings.kd_temperature).mean()
        state.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(state.student.parameters(), settings.student_clip)
        state.optimizer.step()
        losses.append(loss.item())
    state.losses["distillation"] = sum(losses) / len(losses)
