"""A pool whose members weigh, image by image, by how much of the image lies in the span of their own updates.

A client's update of a linear layer, ``W_k - W_0``, is a sum of outer products with the layer's inputs for the client's
own examples. So its rows span nothing but such inputs. Where the layers below have hardly moved, their start weights
map an image to a comparable input ``a(x)``, the same for all members. An image of a class that a client never saw
leaves more of ``a(x)`` outside the client's span. Logits say little of that: a model of two classes is sure of any
image.

The same fact reveals inputs of a batch from its gradient (Zhu, Liu, Han, *Deep Leakage from Gradients*, NeurIPS 2019).
Symbols, V_k an orthonormal basis of the rows of ``W_k - W_0``::

    r_k(x)   = 1 - ||V_k a(x)||^2 / ||a(x)||^2
    d_k(x)   = r_k(x)^-b, relative to the largest
    l_k(c|x) = w_k n_k^c d_k(x) / sum_j w_j n_j^c d_j(x)

The pool has ``l_k(c|x)`` in place of ``l_k(c)``, and adds ``log sum_k l_k(c) d_k(x)``, how well the holders of class c
explain the image. The power b falls as the layers below move: ``b = 2 / max(m, 1/2)`` for their mean relative change m.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.gpu import has_hooks
from ..core.seeds import build_module
from ..method import Job, Progress, State, Upload
from ..teacher.average import repeat_tied_weights
from ..teacher.merged import linear_layers, merge_layers, resembles_start
from ..teacher.student import draw_start, start_model
from .opinion_pools import RULES, UNHELD, OpinionPool, center_logits
from .trained import hold_as_buffers, register

SHARE = 0.3  # largest number of basis vectors, as a share of the layer's inputs
LEAST_RESIDUAL = 1e-5  # r_k(x) is exact to about a tenth of it in float32
LEAST_SINGULAR = 1e-6  # singular values below it, as a share of the largest, are rounding
POWER, LEAST_CHANGE = 2.0, 0.5
# Why updates have no meaning.
UNKNOWN_START = "the weights that the clients started from are not known"
OTHER_START = "{} did not start from the weights of the others"
BELOW = "below."  # prefix of the start weights among the combiner's tensors


class GatedPool(OpinionPool):
    """An opinion pool that also sees the image; see the module's description.

    Args:
        bases: V_k [M, R, D]; rows of zeros where a span has fewer dimensions.
        power: b >= 0 [1].
        below: The layers below the linear one, with the start weights: images [B, ch, H, W] to a(x) [B, D].

    Raises:
        ValueError: A tensor's shape or range is wrong.
    """

    kind = "gated-"
    sees_input = True
    bases: Tensor
    power: Tensor

    def __init__(self, pool: OpinionPool, bases: Tensor, power: Tensor, below: nn.Module) -> None:
        tensors = (pool.counts, pool.weights, pool.temperatures, pool.smoothing)
        super().__init__(pool.rule, *tensors, scales=pool.scales, bias=pool.bias)
        register(self, {"bases": (bases, 3), "power": (power, 1)})
        if len(bases) != len(self.counts) or len(power) != 1 or not float(power) >= 0:
            raise ValueError(
                f"bases of a gated pool are {list(bases.shape)} and its power {power.tolist()}: must be [M, R, D] for "
                f"{len(self.counts)} members, and one number from 0"
            )
        self.below = copy.deepcopy(below)
        hold_as_buffers(self.below)

    def outside(self, x: Tensor) -> Tensor:
        """Return r_k(x) [M, B], in (0, 1], of normalised images [B, ch, H, W]."""
        return residual(self.below(x), self.bases)

    def densities(self, x: Tensor) -> Tensor:
        """Return log d_k(x) [M, B], at most 0, of normalised images [B, ch, H, W]."""
        logs = -self.power * self.outside(x).log()
        masked = torch.where(self.weights[:, None] > 0, logs, logs.detach().amin())
        return masked - masked.amax(0, keepdim=True)

    def forward(self, logits: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]  # it sees the image as well
        """Combine member logits [M, B, C], given the normalised images [B, ch, H, W], to logits [B, C]."""
        logits = self._zero_left_out(logits)
        mass = self.shares()[:, None] * self.densities(x).exp()[:, :, None]
        total = mass.sum(0)
        shares = mass / total.clamp_min(torch.finfo(mass.dtype).tiny)
        evidence = (shares * self.scales[:, None, None] * center_logits(logits)).sum(0)
        combined = RULES[self.rule](shares, self.opinions(logits)) + evidence + self.bias
        held = self.shares().sum(0) > 0
        explained = total.clamp_min(torch.finfo(mass.dtype).tiny).log()
        combined = combined + torch.where(held, explained, torch.zeros_like(explained))
        return torch.where(held, combined, combined.detach().amin(1, keepdim=True) - UNHELD)


@dataclass(frozen=True)
class GatedPools:
    """The gated pools of one rule, for :data:`.combiners.COMBINERS`."""

    rule: str

    def __call__(self, pool: OpinionPool, bases: Tensor, power: Tensor, below: nn.Module) -> GatedPool:
        """Return a gated pool; arguments as for :class:`GatedPool`."""
        return GatedPool(pool, bases, power, below)

    def of_member(self, member: Callable[[], nn.Module] | None, weights: Mapping[str, Tensor]) -> GatedPool:
        """Return the pool that has these tensors as its ``state_dict``.

        Raises:
            ValueError: The member lacks the layers of these tensors.
        """
        own = {key.removeprefix(BELOW): value for key, value in weights.items() if key.startswith(BELOW)}
        rest = {key: value for key, value in weights.items() if not key.startswith(BELOW)}
        below = lower_part(build_module(member))[1] if member is not None else None
        shapes = {key: value.shape for key, value in own.items()}
        if below is None or {key: value.shape for key, value in below.state_dict().items()} != shapes:
            raise ValueError(f"a gated pool needs members with the layers of its tensors {', '.join(own) or '(none)'}")
        below.load_state_dict(own)
        bases, power = rest.pop("bases"), rest.pop("power")
        return GatedPool(OpinionPool(self.rule, **rest), bases, power, below)


GATED_LOG_POOL = GatedPools("log")
GATED_LINEAR_POOL = GatedPools("linear")


def lower_part(model: nn.Module) -> tuple[str, nn.Sequential | None]:
    """Return a model's first linear layer that is not its last, by name, and the layers below, which are not copied.

    Returns:
        ``("", None)`` if the model is no plain chain of layers, or normalises batches, or has no such layer with a
        weight of its own.
    """
    plain = getattr(type(model), "forward", None) is nn.Sequential.forward and not has_hooks(model)
    if not plain or any("BatchNorm" in type(one).__name__ for one in model.modules()):
        return "", None
    layers = list(model._modules.items())  # one that stands twice, too, unlike named_children
    linear = [place for place, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    name = layers[linear[0]][0] if len(linear) > 1 else ""
    if f"{name}.weight" not in model.state_dict():
        return "", None
    below = nn.Sequential()
    for key, layer in layers[: linear[0]]:
        below.add_module(key, layer)
    return name, below


def check_gate(job: Job, key: str, value: str = "'updates'", otherwise: str = "'none'") -> None:
    """Refuse an architecture whose updates have no span.

    Args:
        job: Its builders and student; uploads may be missing.

    Raises:
        OptionError: Names the setting and its possible values.
    """
    _, below = lower_part(draw_start(job, 0))
    with torch.no_grad():
        if below is None or below.eval()(torch.zeros(1, *job.input_shape)).dim() != 2:
            raise OptionError(
                f"{key} is {value}, and the model is {job.student}: must be a chain of layers without batch "
                f"normalisation or hooks, with a linear layer of flat inputs before the last; else {otherwise}"
            )


@dataclass(frozen=True)
class Spans:
    """The spans of the clients' updates of one linear layer.

    Attributes:
        below: The layers below it, with the weights that the clients started from.
        bases: V_k [M, R, D]; of a client that is not counted, zeros.
        change: The mean relative change of the weights below, over the clients that are counted.
    """

    below: nn.Sequential
    bases: Tensor
    change: float


def gate_pool(job: Job, pool: OpinionPool) -> GatedPool | str:
    """Return a pool with the gate of its members' updates, or the reason why there is none.

    Args:
        job: Its uploads, one for each member of the pool and of one architecture; their start; their input space.
    """
    spans = find_spans(job, (pool.weights > 0).tolist())
    if isinstance(spans, str):
        return spans
    power = torch.tensor([POWER / max(spans.change, LEAST_CHANGE)])
    return GatedPool(pool.cpu(), spans.bases, power, spans.below).to(job.device).eval()


def find_spans(job: Job, counted: Sequence[bool], *, share: float = SHARE) -> Spans | str:
    """Return the spans of the clients' updates of their first linear layer, or the reason why there are none.

    Args:
        job: Its uploads, of one architecture, and their start.
    """
    if job.clients_seed is None:  # in rounds ``start`` is the uploads' mean, from which no client started
        return UNKNOWN_START
    model = start_model(job)
    name, below = lower_part(model)
    if below is None or {upload.architecture for upload in job.uploads} != {job.student}:
        return "the clients' models are not of one architecture that fits"
    start = model.state_dict()
    bases, changes = [], []
    for upload, read in zip(job.uploads, counted, strict=True):
        state = upload.read() if read else start
        weight, began = state[f"{name}.weight"].double(), start[f"{name}.weight"].double()
        if read and not resembles_start(weight, began):
            return OTHER_START.format(upload.client)
        bases.append(span(weight - began, share))
        if read:
            changes.append(mean_relative_change(state, {key: start[key] for key in below.state_dict()}))
    return Spans(below, torch.stack(bases), float(torch.tensor(changes).mean()))


def residual(inputs: Tensor, bases: Tensor) -> Tensor:
    """Return the share of each input's square that lies outside of each span, [M, B], in (0, 1].

    Args:
        inputs: a [B, D].
        bases: V_k [M, R, D].
    """
    inside = torch.einsum("bd,mrd->mbr", inputs, bases).square().sum(2)
    whole = inputs.square().sum(1).clamp_min(torch.finfo(inputs.dtype).tiny)
    outside: Tensor = (1 - inside / whole).clamp_min(LEAST_RESIDUAL)
    return outside


def span(update: Tensor, share: float = SHARE) -> Tensor:
    """Return an orthonormal basis of an update's rows [R, D], float32, the directions of the largest changes first.

    Args:
        update: W_k - W_0 [O, D], float64. R is the smaller of O and the share of D; rows beyond the rank are zero.
        share: Largest number of directions, as a share of the layer's inputs.
    """
    _, sizes, rows = torch.linalg.svd(update, full_matrices=False)
    kept = sizes > LEAST_SINGULAR * sizes[0].clamp_min(torch.finfo(sizes.dtype).tiny)
    most = min(len(update), max(1, int(share * update.shape[1])))
    basis: Tensor = (rows * kept[:, None])[:most].float()
    return basis


def mean_relative_change(state: State, start: State) -> float:
    """Return the mean relative change of the weights, not biases, that ``start`` names; 0 without any."""
    keys = [key for key, value in start.items() if value.dim() > 1]
    moves = [float((state[key] - start[key]).norm() / start[key].norm().clamp_min(1e-12)) for key in keys]
    return sum(moves) / len(moves) if moves else 0.0


# The merged linear layers of a job's uploads, where the weights that their clients began from are known.


def merge_uploads(
    job: Job, uploads: Sequence[Upload], weights: Sequence[float], progress: Progress, *, but: str = ""
) -> State:
    """Return the merged weights and biases of the linear layers; none, and a note why, if they cannot be merged.

    A note names the clients that did not start from those weights: they have no part in the merge. They are fewer than
    half, so that no single client can turn it off; otherwise there is no merge.

    Args:
        uploads: Of the student's architecture; each is read twice.
        but: The name of a weight that is not merged.
    """
    averaged = "linear layers are averaged and not merged"
    if job.clients_seed is None:  # in rounds ``start`` is the uploads' mean, from which no client started
        progress.record({"note": f"{averaged}: {UNKNOWN_START}"})
        return {}
    model = start_model(job)
    start, names = model.state_dict(), [name for name in linear_layers(model) if f"{name}.weight" != but]
    others = [upload.client for upload in uploads if not _began_from(upload, start, names[:1])]
    if 2 * len(others) >= len(uploads):
        progress.record({"note": f"{averaged}: {OTHER_START.format(others[0])}"})
        return {}
    for client in others:
        progress.record({"note": f"linear layers are merged without {client}: {OTHER_START.format('it')}"})
    pairs = zip(uploads, weights, strict=True)
    merged = ((one.read(), weight) for one, weight in pairs if one.client not in others)
    return repeat_tied_weights(model, merge_layers(start, merged, names))


def _began_from(upload: Upload, start: State, first: Sequence[str]) -> bool:
    """Return whether a client's first such layer is still like its start."""
    state = upload.read()
    return all(resembles_start(state[f"{name}.weight"], start[f"{name}.weight"]) for name in first)
