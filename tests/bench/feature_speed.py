"""Extraction of features against the plain package: milliseconds of one core per image, and the seconds of a solve."""

from __future__ import annotations

import torch
from measure import interleaved, say
from torch import nn

from fl_app.models.backbones import backbone_of
from fl_app.models.features import BATCH, FeatureFunction
from fl_app.models.features_config import PACKAGED, FeaturesConfig
from strategies.core.errors import OptionError
from strategies.statistics.heads import Ridge
from strategies.statistics.sums import Statistics

SIDE, IMAGES = 128, 32


def ratio(repetitions: int = 3) -> dict[str, dict[str, float]]:
    """Print the milliseconds per image, and return how many times less CPU time the extraction takes.

    Both take batches of 16 images. The plain package gets images of 128 pixels, the extraction resizes those of 32.
    """
    try:
        plain = backbone_of(PACKAGED).build()
    except OptionError as error:
        say(f"features: not measured: {error}")
        return {}
    shipped = FeatureFunction(FeaturesConfig(side=SIDE), 0).module
    small, large = torch.rand(IMAGES, 3, 32, 32), torch.rand(IMAGES, 3, SIDE, SIDE)
    found = interleaved(
        {"plain": lambda: passed(plain, large), "shipped": lambda: shipped(small), "solve": solve}, repetitions
    )
    each = {name: 1000 * found[name] / IMAGES for name in ("plain", "shipped")}
    say(
        f"{PACKAGED} at {SIDE} pixels, CPU ms per image: plain {each['plain']:.1f}, extraction {each['shipped']:.1f}; "
        f"ridge of 1,280 features {found['solve']:.2f} CPU s"
    )
    return {"features": {PACKAGED: round(each["plain"] / each["shipped"], 2)}}


@torch.no_grad()
def passed(net: nn.Module, images: torch.Tensor) -> None:
    """Pass images through a net in the batches that the extraction takes."""
    for batch in images.split(BATCH):  # type: ignore[no-untyped-call]
        net(batch)


def solve() -> None:
    """Solve a ridge head of 1,280 features and 10 classes."""
    rows = torch.nn.functional.normalize(torch.rand(2000, 1280, generator=torch.Generator().manual_seed(0)))
    Ridge(Statistics.of([(rows, torch.arange(2000) % 10)], 10, 1280)).head(0.1)
