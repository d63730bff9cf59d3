"""A frozen backbone as one feature function: from pixels or tokens to features of norm 1, with its fingerprint."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fl_app.data import Split
from fl_app.models.backbones import TORCHVISION, Backbone, Texts, backbone_of
from fl_app.models.features_config import PACKAGED, FeaturesConfig
from fl_app.models.huggingface import is_folder
from strategies.core.errors import OptionError
from strategies.core.facts import GRAM, SQUARES, backbone_in, holds_images, is_head
from strategies.core.fingerprint import PROBE, encode_fingerprint
from strategies.core.seeds import derive_seed, seeded_torch
from strategies.statistics.privacy import normalize_features
from strategies.statistics.sums import projection
from strategies.statistics.uploaded import FeatureSums

NOISE_SIDE = 32  # pixels of the probe's image, a side
TEXT = "Zwölf Boxkämpfer jagen Viktor: 42 quick brown foxes (0.5 %) jump over the lazy dog's bed -- don't they?"


@functools.lru_cache(maxsize=4)
def weights_digest(backbone: Backbone) -> str:
    """Return the sha256 of a backbone's weights as they are read, before any of them is folded."""
    with seeded_torch(0, "backbone"):
        state = backbone.build().state_dict()
    digest = hashlib.sha256()
    for key in sorted(key for key in state if not key.endswith("num_batches_tracked")):
        value = state[key].detach().contiguous()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode() + value.numpy().tobytes())
    return digest.hexdigest()


def noise_image(mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return one seeded image of noise, normalised as a data set says [1, ch, 32, 32]."""
    draws = np.random.Generator(np.random.PCG64(derive_seed(0, "features", "probe")))
    pixels = torch.from_numpy(draws.random((1, len(mean), NOISE_SIDE, NOISE_SIDE), dtype=np.float32))
    shift, scale = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (mean, std))
    return (pixels - shift) / scale


def probed(function: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor) -> torch.Tensor:
    """Return 16 numbers of the features of one example, float32 [16].

    They are the features' coordinates in 16 fixed orthonormal directions, so that every feature counts. A function of
    fewer than 16 features has zeros at the end.
    """
    features = function(example)
    numbers = features @ projection(features.shape[1], min(PROBE, features.shape[1]), 0)
    found = torch.zeros(PROBE)
    found[: numbers.shape[1]] = numbers[0].float()
    return found


# A frozen net in a faster form with the same features, to rounding of 1e-6.
#
# Three changes take half of the CPU time of a mobile net off. Normalisations are folded into their convolutions.
# Padding, for which a net copies each map, becomes the convolution's own. Activations are computed in place.


# The names under which the packaged net's blocks have a convolution and its normalisation.
PAIRS = (
    ("_conv_stem", "_bn0"), ("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"),
    ("_conv_head", "_bn1"),
)  # fmt: skip
ACTIVATION, PADDING = "_swish", "static_padding"


def fused(net: nn.Module) -> nn.Module:
    """Return a frozen net with the changes of this module, made in place; other nets stay as they are.

    Args:
        net: In eval mode.
    """
    for module in list(net.modules()):
        for conv, norm in PAIRS:
            if isinstance(getattr(module, norm, None), nn.BatchNorm2d) and hasattr(module, conv):
                folded = torch.nn.utils.fusion.fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm))
                setattr(module, conv, folded)
                setattr(module, norm, nn.Identity())
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv2d) and hasattr(child, PADDING):
                setattr(module, name, padded(child))
        if isinstance(getattr(module, ACTIVATION, None), nn.ReLU6):
            setattr(module, ACTIVATION, nn.ReLU6(inplace=True))
    return net


def padded(conv: nn.Conv2d) -> nn.Conv2d:
    """Return a convolution that pads its input itself.

    A padding that is one larger on the right and below becomes an even one. The kernel then grows by a row and a column
    of zeros on the left and above. With stride 2 and maps of an even side the places of the answer stay the same.

    Args:
        conv: With a submodule ``static_padding``: the identity, or zeros around its input.

    Raises:
        ValueError: The padding is neither even nor one larger on the right and below.
    """
    around = getattr(conv, PADDING)
    left, right, top, bottom = around.padding if isinstance(around, nn.ZeroPad2d) else (0, 0, 0, 0)
    grown = (right - left, bottom - top)
    if grown not in {(0, 0), (1, 1)}:
        raise ValueError(f"padding is {around.padding}: must be even, or one larger on the right and below")
    more = grown[0]
    weight = F.pad(conv.weight.detach(), (more, 0, more, 0))
    found = nn.Conv2d(
        conv.in_channels, conv.out_channels, (weight.shape[2], weight.shape[3]),
        stride=(conv.stride[0], conv.stride[1]), padding=(top + more, left + more), groups=conv.groups,
        bias=conv.bias is not None,
    )  # fmt: skip
    found.load_state_dict({**conv.state_dict(), "weight": weight})
    return found.requires_grad_(False).eval()


# More images a pass are up to twice as slow on a CPU above 64 pixels a side, because the maps leave its cache.
BATCH = 16


@dataclass(frozen=True)
class FeatureFunction:
    """The feature function of a run, a value: its module is built once per process.

    Attributes:
        seed: Of the run; draws the projection.
    """

    config: FeaturesConfig = field(default_factory=FeaturesConfig)
    seed: int = 0
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    @property
    def backbone(self) -> Backbone:
        """The backbone by its name.

        Raises:
            OptionError: It is unknown or not installed, or a setting does not fit it.
        """
        found = backbone_of(self.config.backbone, self.config.weights, self.config.weights_sha256)
        if (self.config.side or found.side) % found.multiple:
            raise OptionError(
                f"setting 'features.side' is {self.config.side}: must be a multiple of {found.multiple} for "
                f"{self.config.backbone!r}"
            )
        if self.config.dim > found.features:
            raise OptionError(f"setting 'features.dim' is {self.config.dim}: must be at most {found.features}")
        return found

    @property
    def side(self) -> int:
        """Height and width of the backbone's input."""
        return self.config.side or self.backbone.side

    @property
    def features(self) -> int:
        """The number of features after projection, d."""
        return self.config.dim or self.backbone.features

    @property
    def whole(self) -> FeatureFunction:
        """The function without projection, whose features a cache holds for all of them."""
        return replace(self, config=replace(self.config, dim=0), seed=0)

    @property
    def module(self) -> Extractor:
        """The frozen module, in eval mode."""
        return _extractor(self)

    @property
    def fields(self) -> dict[str, Any]:
        """The names and values of which the fingerprint consists."""
        config = self.config
        kept = {"dim": config.dim, **({"dim-seed": self.seed} if config.dim else {})}
        return {**_raw(self), **kept, "norm": 1}

    @property
    def raw(self) -> str:
        """The fields before projection and normalisation, and a probe: they name the own features in a cache."""
        return json.dumps({**_raw(self), "probe": _raw_probe(self)})

    @property
    def fingerprint(self) -> torch.Tensor:
        """The fields as they travel, uint8 [1024]."""
        return encode_fingerprint(self.fields)

    @property
    def probe(self) -> torch.Tensor:
        """Features of one fixed input, float32 [16]."""
        return _probe(self)

    @property
    def non_negative(self) -> bool:
        """Whether no feature is negative."""
        return self.backbone.non_negative and not self.config.dim

    def check(self, split: Split, name: str) -> None:
        """Refuse a data set whose examples the backbone does not take.

        Raises:
            OptionError: The backbone takes images, texts or rows, and the examples are of another kind. Or images
                have other channels than one or three, or rows another number of columns.
            DataError: Images are floats outside [0, 1].
        """
        kind = "images" if holds_images(split.input_shape) else "rows" if split.input_shape[2] == 1 else "texts"
        wanted = self.backbone.kind
        if kind != wanted:
            raise OptionError(
                f"setting 'features.backbone' is {self.config.backbone!r}, which takes {wanted}, and 'data.name' is "
                f"{name!r}, which has {kind}: must be a backbone and a data set of one kind, such as "
                "'efficientnet-lite0' for images, 'wordllama' for texts, and a project's module:attribute for rows"
            )
        channels = split.input_shape[0]
        if kind == "rows" and channels != self.backbone.columns:
            raise OptionError(
                f"setting 'features.backbone' is {self.config.backbone!r}, which takes rows of {self.backbone.columns} "
                f"columns, and 'data.name' is {name!r}, whose rows have {channels}: must be equal"
            )
        if kind == "images" and channels not in (1, 3):
            raise OptionError(
                f"'data.name' is {name!r}, whose images have {channels} channels: must be 1 or 3 for "
                f"'features.backbone' {self.config.backbone!r}"
            )
        if kind == "images":
            split.check_pixels(name)

    def check_size(self, num_classes: int, method: str, most_mib: float) -> None:
        """Refuse features whose sums no server would accept, before any client computes them.

        Raises:
            OptionError: Names the size of an upload.
        """
        numbers = {GRAM: self.features * (self.features + 1) // 2, SQUARES: num_classes * self.features}
        second = self.config.second(method)
        size = 4 * (num_classes * self.features + sum(numbers[name] for name in second)) / 2**20
        if size > most_mib:
            raise OptionError(
                f"setting 'features.dim' is {self.features}: an upload would have {size:.3g} MiB, must be at most "
                f"{most_mib:g} ('max-upload-mib')"
            )

    def sums(self, num_classes: int, noise: float = 0.0, method: str = "ridge") -> FeatureSums:
        """Return an empty upload of this function's sums."""
        return FeatureSums(
            num_classes,
            self.features,
            self.fingerprint,
            self.probe,
            non_negative=self.non_negative,
            noise=noise,
            second=self.config.second(method),
        )


def readers_of(config: FeaturesConfig, models: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of what reads a run's texts: its models of Hugging Face, else the settings' backbone."""
    folders = [name for name in models if is_folder(name)]
    on_features = [backbone_in(name) or config.backbone for name in models if is_head(name)]
    return tuple(dict.fromkeys([*folders, *on_features])) if folders else (config.backbone,)


def as_read(split: Split, config: FeaturesConfig, models: Iterable[str] = ()) -> Split:
    """Return a split of texts with the tokens of :func:`readers_of`; any other split, or reader, unchanged.

    Raises:
        OptionError: A reader is unknown or not installed, or two of them read texts by different tokens.
    """
    if split.texts is None:
        return split
    known = dict[str, Texts]()
    for name in readers_of(config, models):
        if name == PACKAGED or name.startswith(TORCHVISION):
            continue
        if (texts := backbone_of(name, config.weights, config.weights_sha256).texts) is not None:
            known[name] = texts
    forms = {(texts.tokenizer, texts.length) for texts in known.values()}
    if len(forms) > 1:
        raise OptionError(f"{' and '.join(map(repr, known))} read texts by different tokens: must share one tokenizer")
    read = next(iter(known.values()), None)
    return split if read is None else split.tokenized(read.tokens, read.length)


class Extractor(nn.Module):
    """From a model's input, normalised as the data set says, to features of norm 1 in float64.

    Grey images are repeated to three channels. Images are resized bilinearly without antialiasing, in float32. Tokens
    of texts and rows go to the backbone as they are. An example without features, such as an empty text, has zeros.
    """

    def __init__(self, function: FeatureFunction, net: nn.Module) -> None:
        super().__init__()
        backbone = function.backbone
        self._side, self.net = function.side, net.requires_grad_(False)
        shift, scale, mean, std = (
            torch.tensor(numbers).view(1, -1, 1, 1)
            for numbers in (function.mean, function.std, backbone.mean, backbone.std)
        )
        self._constants, self._kind = (shift, scale, mean, std), backbone.kind
        kept = function.config.dim
        self._projection = projection(backbone.features, kept, function.seed) if kept else None
        self._half = function.config.precision == "bfloat16"
        self.eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [B, 1 or 3, H, W], tokens [B, 1, 1, L], or rows [B, F, 1, 1] to features [B, d]."""
        return self.finished(self.pooled(images))

    @torch.no_grad()
    def pooled(self, images: torch.Tensor) -> torch.Tensor:
        """Map images [B, 1 or 3, H, W], tokens [B, 1, 1, L], or rows [B, F, 1, 1] to its features, float32."""
        if self._kind == "texts":  # those of a batch have alike lengths, because a transformer pads to the longest
            order = (images != 0).flatten(1).sum(1).argsort(stable=True)
            images = images[order]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            found = torch.cat([self._batch(batch).float() for batch in torch.split(images, BATCH)])
        return found[order.argsort()] if self._kind == "texts" else found

    def at_once(self, images: torch.Tensor) -> torch.Tensor:
        """Map images, tokens or rows [B, ...] to features [B, d] in one pass, which a program of any B can hold."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self._half):
            pooled = self._batch(images).float()
        return self.finished(pooled)

    def finished(self, pooled: torch.Tensor) -> torch.Tensor:
        """Map the backbone's features to those of the function: projected, of norm 1, in float64."""
        precise = pooled.double()
        return normalize_features(precise if self._projection is None else precise @ self._projection)

    def _batch(self, images: torch.Tensor) -> torch.Tensor:
        if self._kind != "images":
            taken: torch.Tensor = self.net(images.long() if self._kind == "texts" else images)
            return taken
        shift, scale, mean, std = self._constants
        pixels = (images * scale + shift).clamp(0, 1).expand(-1, 3, -1, -1)
        if pixels.shape[-2:] != (self._side, self._side):
            pixels = F.interpolate(pixels, size=(self._side, self._side), mode="bilinear", antialias=False)
        prepared = ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)
        found: torch.Tensor = self.net(prepared)
        return found


@functools.lru_cache(maxsize=4)
def _extractor(function: FeatureFunction) -> Extractor:
    with seeded_torch(0, "backbone"):
        net = function.backbone.build()
    return Extractor(function, fused(net.eval()).to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def _raw(function: FeatureFunction) -> dict[str, Any]:
    backbone = function.backbone
    return {
        "format": 1,
        "backbone": backbone.name,
        "weights": weights_digest(backbone),
        **_preprocessing(function),
        "precision": function.config.precision,
    }


def _preprocessing(function: FeatureFunction) -> dict[str, Any]:
    backbone, texts = function.backbone, function.backbone.texts
    if texts is not None:
        return {"tokenizer": texts.tokenizer, "special-tokens": texts.special, "truncation": texts.length}
    if backbone.columns:
        return {"columns": backbone.columns}
    return {
        "side": function.side,
        "resize": "bilinear, no antialias",
        "channels": "grey repeated",
        "mean": list(backbone.mean),
        "std": list(backbone.std),
    }


@functools.lru_cache(maxsize=4)
def _probe(function: FeatureFunction) -> torch.Tensor:
    return probed(function.module, _example(function))


@functools.lru_cache(maxsize=4)
def _raw_probe(function: FeatureFunction) -> list[str]:
    """Return three digits of a probe of the backbone's own features: a project's code may change, not its weights."""
    numbers = probed(lambda example: function.module.pooled(example).double(), _example(function))
    return [f"{number:.2e}" for number in numbers.tolist()]


def _example(function: FeatureFunction) -> torch.Tensor:
    texts, columns = function.backbone.texts, function.backbone.columns
    if columns:
        return torch.linspace(-1.0, 1.0, columns).view(1, -1, 1, 1)
    return noise_image(function.mean, function.std) if texts is None else texts.tokens([TEXT])
