"""The ensemble, frozen members and a combiner of their logits: the teacher of every method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import refusals
from ..core.facts import MODEL_ERRORS, holds_images
from ..core.gpu import has_hooks
from ..core.layout import channels_last, fast_layout, settle_input
from ..core.processor import in_bfloat16
from ..core.seeds import build_module
from ..core.shards import HeldMembers
from ..core.work import SMALL, count_multiplications, work
from ..method import Job, ModelBuilder, Upload
from ..uploads.quantization import simulate_int8
from .calls import Call, evaluate_calls, group_calls, single_calls
from .copies import FreshModules
from .frozen import Rewriting, forget_statistics, rewriting_of

Module = TypeVar("Module", bound=nn.Module)

# Batches that a GPU takes at once, of members that have at most so many weights, and images of so many numbers.
TOGETHER, WEIGHTS, PIXELS = 8, 2**18, 3 * 64 * 64
# The largest relative difference of logits in bfloat16: those of the zoo's models differ by 0.4 to 0.6 %.
COARSE = 0.05


class Ensemble(nn.Module):
    """M frozen members and a combiner of their logits.

    Members stay in eval mode. Gradients reach the input, never the members' weights. Only the first
    :data:`.calls.KEPT` members keep activations, so that with more members memory grows by their weights alone.

    Args:
        members: Modules [B, ch, H, W] -> [B, C]; they are changed (frozen, memory layout, precision, first layers). For
            sharded members only ``combiner`` is read of the other arguments.
        combiner: A module [M, B, C] -> [B, C]; one with the attribute ``sees_input`` takes the images as well. With the
            attribute ``batch_statistics`` set, the members normalise by the batch that they see.
        precision: ``"float32"`` leaves members unchanged; with ``"bfloat16"`` members compute in bfloat16 and their
            logits are returned as float32.
        form: ``"loop"`` calls one member after another, ``"stacked"`` calls members of one kind together (see
            :mod:`.calls`). ``"auto"`` stacks on a GPU, and on a CPU joins narrow first layers. Members with hooks are
            always called one by one.
        kinds: The kind of each member [M]: members of one kind differ only in the values of their weights. Without
            kinds nothing is called together.
        foreign: Whether members may be anybody's code, which the first images settle
            (:func:`..core.layout.settle_input`).
    """

    def __init__(
        self,
        members: Sequence[nn.Module] | HeldMembers,
        combiner: nn.Module,
        *,
        precision: str = "float32",
        form: str = "auto",
        kinds: Sequence[str] = (),
        foreign: bool = False,
    ) -> None:
        super().__init__()
        self.members: nn.ModuleList | HeldMembers
        if isinstance(members, HeldMembers):
            self.members = members
        else:
            self.members = nn.ModuleList([fast_layout(_cast(disable_inplace(member), precision)) for member in members])
        self.combiner = combiner
        if _by_batch(combiner) and isinstance(self.members, nn.ModuleList):
            forget_statistics(self.members)
        self.requires_grad_(False)
        self.train(False)
        self._dtype = torch.bfloat16 if precision == "bfloat16" else None
        self._settled = not foreign
        self._joined = () if _by_batch(combiner) or form == "loop" else tuple(kinds)
        self._stacked = form == "stacked"
        self._join()
        self.register_load_state_dict_post_hook(Ensemble._join)  # type: ignore[no-untyped-call]

    @classmethod
    def from_uploads(
        cls,
        uploads: Iterable[Upload],
        builders: Mapping[str, ModelBuilder],
        combiner: nn.Module,
        *,
        device: str = "cpu",
        fold: bool = True,
        precision: str = "float32",
        form: str = "auto",
    ) -> Ensemble:
        """Build the ensemble of some uploads, in their order, reading one at a time.

        Args:
            builders: Architecture -> a module with fresh weights.
            combiner: A module [M, B, C] -> [B, C].
            fold: Whether members may be rewritten (:func:`.frozen.rewriting_of`); false if the caller reads their batch
                normalisation or the names of their weights.
            precision: ``"float32"``, ``"bfloat16"`` or ``"int8"``. With int8 each member computes like its quantised
                form (:mod:`strategies.uploads.quantization`), with the weights that clients receive; it is neither
                rewritten nor stacked.
            form: ``"auto"``, ``"loop"`` or ``"stacked"``.

        Raises:
            UploadError: An upload's weights do not fit its architecture.
        """
        fold = fold and not _by_batch(combiner)
        loader = MemberLoader(builders, device=device, fold=fold, precision=precision)
        for upload in uploads:
            loader.add(upload)
        return loader.ensemble(combiner, form=form)

    @classmethod
    def of_job(
        cls,
        job: Job,
        uploads: Sequence[Upload],
        combiner: nn.Module,
        *,
        fold: bool = True,
        precision: str = "float32",
    ) -> Ensemble:
        """Build the ensemble of some of a job's uploads, in the job's shards if it has any, else in this process.

        Raises:
            UploadError: An upload's weights do not fit its architecture.
        """
        if precision == "auto":
            precision = "bfloat16" if not _by_batch(combiner) and _gains_in_bfloat16(job, uploads) else "float32"
        if job.shards is not None and not _by_batch(combiner):
            members = job.shards.hold([upload.client for upload in uploads], fold=fold, precision=precision)
            return cls(members, combiner.to(job.device), precision=precision)
        return cls.from_uploads(uploads, job.builders, combiner, device=job.device, fold=fold, precision=precision)

    @property
    def is_local(self) -> bool:
        """Whether the members are in this process, not in shards."""
        return isinstance(self.members, nn.ModuleList)

    def batches_at_once(self, pixels: int) -> int:
        """Return how many batches it takes at once: one of small images leaves small members on a GPU idle."""
        if not isinstance(self.members, nn.ModuleList) or any(map(_by_batch, self.combiner.modules())):
            return 1
        weights = [list(member.parameters()) for member in self.members]
        small = pixels <= PIXELS and all(sum(map(torch.numel, each)) <= WEIGHTS for each in weights)
        # Without running statistics a layer normalises by the batch that it sees.
        alone = any(isinstance(x, _BatchNorm) and x.running_mean is None for x in self.members.modules())
        return TOGETHER if small and not alone and any(weight.is_cuda for each in weights for weight in each) else 1

    def train(self, mode: bool = True) -> Ensemble:  # noqa: ARG002  the members' mode never changes
        """Stay in eval mode, whatever ``mode`` is."""
        return super().train(False)

    def member_logits(self, x: Tensor, part: slice | None = None) -> Tensor:
        """Return every member's logits [M, B, C], in torch's default precision, for normalised images [B, ch, H, W].

        Args:
            part: Evaluates only these members [m, B, C], one by one and in the images' own memory layout; None for all.
        """
        logits = self._passed(x, part)
        work().passed(logits, self._dtype is not None)
        return logits

    def _passed(self, x: Tensor, part: slice | None) -> Tensor:
        if not isinstance(self.members, nn.ModuleList):
            return self.members.logits(x, part)
        # Tokens are integers, and bfloat16 represents every integer only up to 256.
        x = x.to(self._dtype) if self._dtype and x.is_floating_point() else x
        if not self._settled and not torch.compiler.is_compiling() and len(x):
            self._settled = True
            for member in self.members:
                settle_input(member, x[:2])
        if part is not None:
            return torch.stack([member(x) for member in list(self.members)[part]]).to(torch.get_default_dtype())
        x = channels_last(x)  # once for all members
        alone = not self._together or any(map(has_hooks, self.members))
        logits = evaluate_calls(single_calls(list(self.members)) if alone else self._together, x)
        return logits.to(torch.get_default_dtype())

    def _join(self, _: object = None) -> None:
        """Build the calls of several members together, which hold copies of weights; also after others were loaded.

        Weights that are loaded into one member alone do not reach them.
        """
        self._together: list[Call] = []
        if isinstance(self.members, nn.ModuleList) and self._joined:
            on_gpu = any(parameter.is_cuda for parameter in self.members.parameters())
            self._together = group_calls(list(self.members), self._joined, stack=self._stacked or on_gpu)

    def _apply(self, *args: Any, **how: Any) -> Ensemble:
        """Move or cast the weights as any module's; the copies follow."""
        super()._apply(*args, **how)  # type: ignore[no-untyped-call]
        self._join()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return combined logits [B, C] for normalised images [B, ch, H, W]."""
        return self.combine(self.member_logits(x), x)

    def combine(self, logits: Tensor, x: Tensor) -> Tensor:
        """Return the combined logits [B, C] of member logits [M, B, C] on the images x."""
        sees_input = getattr(self.combiner, "sees_input", False)
        combined: Tensor = self.combiner(logits, x) if sees_input else self.combiner(logits)
        return combined


class MemberLoader:
    """Loads uploads one by one as members of an ensemble; see :meth:`Ensemble.from_uploads`.

    Args:
        builders: Architecture -> a module with fresh weights.
        fold: Whether members may be rewritten.
        precision: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
    """

    def __init__(
        self, builders: Mapping[str, ModelBuilder], *, device: str = "cpu", fold: bool = True, precision: str
    ) -> None:
        self._fresh, self._device, self._fold, self._precision = FreshModules(builders), device, fold, precision
        self.members: list[nn.Module] = []
        self._kinds: list[str] = []
        self._rewritings: dict[str, Rewriting | None] = {}

    def add(self, upload: Upload) -> None:
        """Load one more member.

        Raises:
            UploadError: Its weights do not fit its architecture.
        """
        member = _load(upload, self._fresh(upload.architecture))
        if self._precision == "int8":
            simulate_int8(member, upload.ranges)
        elif self._fold:
            if not (self._fresh.copies(upload.architecture) and upload.architecture in self._rewritings):
                self._rewritings[upload.architecture] = rewriting_of(member)  # tracing takes longer than the rest
            rewriting = self._rewritings[upload.architecture]
            member = member if rewriting is None else rewriting(member)
        self.members.append(member.to(self._device))
        self._kinds.append(upload.architecture)

    def ensemble(self, combiner: nn.Module, *, form: str = "auto") -> Ensemble:
        """Return the ensemble of the members loaded so far."""
        combiner = combiner.to(self._device)
        if self._precision == "int8":
            return Ensemble(self.members, combiner, form="loop", foreign=True)
        return Ensemble(self.members, combiner, precision=self._precision, form=form, kinds=self._kinds, foreign=True)


def disable_inplace(module: Module) -> Module:
    """Stop a module's first layers from changing its input in place: other members read the same images."""
    # A layer without weights may pass the images on as a view of them.
    leaves = (layer for layer in module.modules() if not [*layer.children()])
    for layer in takewhile(lambda layer: not [*layer.parameters()], leaves):
        if getattr(layer, "inplace", False):
            layer.inplace = False  # type: ignore[assignment]  # no module
    return module


def load_member(upload: Upload, builders: Mapping[str, ModelBuilder]) -> nn.Module:
    """Return one upload as a module in training mode, on the CPU; the caller's random state does not change.

    Raises:
        UploadError: Its weights do not fit its architecture.
    """
    return _load(upload, build_module(builders[upload.architecture]))


def _load(upload: Upload, module: nn.Module) -> nn.Module:
    try:
        module.load_state_dict(upload.read())
    except RuntimeError as error:
        raise refusals.misfit_weights(f"upload of {upload.client!r}", upload.architecture, error) from error
    return module


def _cast(member: Module, precision: str) -> Module:
    if precision == "bfloat16":
        for layer in member.modules():
            # Running statistics would lose too much precision; torch accepts them in float32 with bfloat16 images.
            if not isinstance(layer, _BatchNorm):
                for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                    tensor.data = tensor.data.bfloat16() if tensor.is_floating_point() else tensor.data
    return member


def _gains_in_bfloat16(job: Job, uploads: Sequence[Upload]) -> bool:
    """Return whether members are faster in bfloat16, and answer two images of noise nearly as in float32.

    They may be anybody's code, which mixes types or needs more digits.
    """
    if (
        torch.device(job.device).type != "cpu"  # small batches leave a GPU idle in any arithmetic
        or torch.get_default_dtype() != torch.float32
        or not holds_images(job.input_shape)
        or not in_bfloat16("auto", "cpu")
    ):
        return False
    firsts = {upload.architecture: upload for upload in reversed(uploads)}
    models = [build_module(job.builders[architecture]).eval() for architecture in firsts]
    return any(count_multiplications(model, job.input_shape) >= SMALL for model in models) and all(
        _stands_bfloat16(job, upload) for upload in firsts.values()
    )


def _stands_bfloat16(job: Job, upload: Upload) -> bool:
    noise = torch.rand(2, *job.input_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    exact, coarse = (
        Ensemble.from_uploads([upload], job.builders, nn.Identity(), precision=precision)
        for precision in ("float32", "bfloat16")
    )
    try:
        logits, found = (member._passed(noise.requires_grad_(), None) for member in (exact, coarse))
        gradient = torch.autograd.grad(found.sum(), noise)[0]
    except MODEL_ERRORS:  # it stays in float32, and what it raises there is its user's to read
        return False
    return bool((found - logits).norm() <= COARSE * logits.norm()) and bool(gradient.isfinite().all())


def _by_batch(combiner: nn.Module) -> bool:
    return bool(getattr(combiner, "batch_statistics", False))
