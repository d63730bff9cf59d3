"""Noise images moved into the spans of the clients' updates.

The rows of a client's update of its first linear layer span the layer's inputs for its own examples, and little else
(:mod:`..combiners.update_gate`). Noise leaves more of its inputs outside of that span. So each image is moved for one
client, until its inputs lie inside: then it is more like what the client saw, and teaches a student more. Its class is
drawn too, so that the images of a client are not all alike.

Symbols, for an image of client k and class y: r_k is ``update_gate.residual``. a_0 stands for the layers below the
linear one with the start weights, a_k for those of the client. G is a Gaussian blur of one pixel::

    min_v  log r_k(a_0(x)) + log r_k(a_k(x)) + 0.1 CE(f_k(x), y),   x = sigmoid(G v)

Without r_k it is an inversion of the client's model (:mod:`.inverted`). Images of the span do not look like examples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..combiners.update_gate import Spans, lower_part, residual
from ..core.gpu import eager, has_hooks
from ..core.layout import fast_layout, settle_input
from ..core.seeds import build_module
from ..core.work import work
from ..method import Job
from ..teacher.augment import Standardize, dequantize
from ..teacher.calls import evaluate_calls, group_calls, single_calls
from ..teacher.ensemble import disable_inplace
from ..teacher.frozen import simplify
from .pool import quantize

BATCH = 256
DIRECTIONS = 0.5  # of a span at most, as a share of the layer's inputs: a full-rank span contains noise
RATE = 0.3  # Adam's learning rate of v
LABEL_WEIGHT = 0.1
BLUR, RADIUS = 1.0, 3  # standard deviation of G and half its width, in pixels
MARGIN = 0.02  # of the first image from black and white, where the gradient of the sigmoid vanishes


class BlurredPixels(nn.Module):
    """A batch of images as parameters v: pixels are ``sigmoid(G v)``.

    Args:
        start: The images [B, ch, H, W] in [0, 1], of which v is the inverse sigmoid.
    """

    down: Tensor
    across: Tensor

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.logit(start.clamp(MARGIN, 1 - MARGIN)))
        self.register_buffer("down", blur_matrix(start.shape[2]).to(start.device))
        self.register_buffer("across", blur_matrix(start.shape[3]).to(start.device))

    def forward(self) -> Tensor:
        """Return pixels [B, ch, H, W] in [0, 1]."""
        return torch.sigmoid(self.down @ self.values @ self.across.T)


def blur_matrix(size: int) -> Tensor:
    """Return the blur of a column of pixels as a matrix [size, size]; pixels beyond an end are as those at the end.

    Matrix products take a tenth of the time of convolutions with one channel.
    """
    offsets = torch.arange(-RADIUS, RADIUS + 1)
    weights = torch.softmax(-offsets.square() / (2 * BLUR**2), 0)
    pixels = torch.arange(size)[:, None].expand(size, len(offsets))
    return torch.zeros(size, size).index_put_(
        (pixels, (pixels + offsets).clamp(0, size - 1)), weights.expand_as(pixels), accumulate=True
    )


def move_into_spans(
    job: Job,
    spans: Spans,
    examples: Tensor,
    images: Tensor,
    *,
    steps: int,
    rng: torch.Generator,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return images, uint8 [N, ch, H, W], moved into the span of one client each.

    A client is drawn by its number of examples, and a class by the square root of the client's examples of it.

    Args:
        examples: n_k^c [M, C], on the CPU; a client without any gets no image.
        images: The images to move, uint8 [N, ch, H, W].
        steps: Steps of Adam, per batch of 256 images of one client.
        rng: A CPU generator.
    """
    clients = torch.multinomial(examples.sum(1), len(images), replacement=True, generator=rng)
    labels = torch.multinomial(examples.sqrt()[clients], 1, generator=rng).flatten()
    made = torch.empty_like(images)
    for k in sorted({*clients.tolist()}):
        objective = Objective(job, spans, k)
        for part in torch.split(torch.nonzero(clients == k).flatten(), BATCH):
            made[part] = optimize_images(images[part], labels[part], objective, steps=steps, tick=tick)
    return made


class Objective(nn.Module):
    """What images of one client minimise; see the module's description.

    Args:
        k: The client's place among them.
    """

    basis: Tensor

    def __init__(self, job: Job, spans: Spans, k: int) -> None:
        super().__init__()
        upload = job.uploads[k]
        model = build_module(job.builders[upload.architecture])
        model.load_state_dict(upload.read())
        _, below = lower_part(model)
        assert isinstance(model, nn.Sequential)  # noqa: S101  the architecture has spans
        assert below is not None  # noqa: S101  as above
        self.above = nn.Sequential(*[*model][len(below) :])
        self.start, self.below = (simplify(disable_inplace(part)) for part in (copy.deepcopy(spans.below), below))
        self.standardize = Standardize(job.normalization)
        self.register_buffer("basis", spans.bases[k : k + 1])
        fast_layout(self.to(job.device).eval().requires_grad_(False))
        parts = [self.start, self.below]
        for part in parts:
            settle_input(part, torch.zeros(2, *job.input_shape, device=job.device))
        # Both read the same images, so that on a CPU a narrow first layer is one for both.
        joint = job.device == "cpu" and not any(map(has_hooks, parts))
        self._calls = group_calls(parts, ["", ""], stack=False) if joint else single_calls(parts)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over images [B, ch, H, W] in [0, 1] of classes [B]; a scalar."""
        before, after = evaluate_calls(self._calls, self.standardize(pixels))
        outside = residual(before, self.basis).log() + residual(after, self.basis).log()
        logits = self.above(after)[None]
        work().passed(logits)
        return outside.sum() + LABEL_WEIGHT * F.cross_entropy(logits[0], labels, reduction="sum")


def optimize_images(
    images: Tensor, labels: Tensor, objective: Objective, *, steps: int, tick: Callable[[], None] = lambda: None
) -> Tensor:
    """Return images, uint8 [B, ch, H, W] on the CPU, after some steps of Adam from others; arguments as above."""
    device = objective.basis.device
    wanted, pixels = labels.to(device), BlurredPixels(dequantize(images.to(device)))
    optimizer = eager(torch.optim.Adam)(pixels.parameters(), RATE, fused=True)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(pixels(), wanted).backward()
        optimizer.step()
        work().generator_stepped()
        tick()
    with torch.no_grad():
        return quantize(pixels()).cpu()
