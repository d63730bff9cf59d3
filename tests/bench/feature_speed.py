"""Extraction of features against the plain package, and the ridge head against scikit-learn's: CPU time of one core."""

from __future__ import annotations

import torch
from measure import interleaved, say
from sklearn.linear_model import RidgeClassifier
from torch import nn

from fl_app.models.backbones import backbone_of
from fl_app.models.features import BATCH, FeatureFunction
from fl_app.models.features_config import PACKAGED, FeaturesConfig
from strategies.core.errors import OptionError
from strategies.statistics.heads import ridge_head
from strategies.statistics.sums import Statistics

SIDE, IMAGES = 128, 32


def ratio(repetitions: int = 3) -> dict[str, dict[str, float]]:
    """Print the times, and return how many times less CPU time the shipped code takes.

    The extraction and the plain package take batches of 16 images, the package of 128 pixels, while the extraction
    resizes those of 32. The head's sums and solution stand beside scikit-learn's fit at one penalty.
    """
    rows = torch.nn.functional.normalize(torch.rand(4000, 1280, generator=torch.Generator().manual_seed(0)))
    labels = torch.arange(4000) % 10
    works = {
        "shipped head": lambda: ridge_head(Statistics.of([(rows, labels)], 10, 1280), 0.1),
        "float32 head": lambda: RidgeClassifier(0.1).fit(rows.numpy(), labels.numpy()),
        "float64 head": lambda: RidgeClassifier(0.1).fit(rows.double().numpy(), labels.numpy()),
    }
    heads = interleaved(works, repetitions)
    say("ridge, 4,000 rows of 1,280 features, CPU s: " + ", ".join(f"{name} {s:.2f}" for name, s in heads.items()))
    ratios = {
        f"ridge, RidgeClassifier in {kind}": heads[f"{kind} head"] / heads["shipped head"]
        for kind in ("float32", "float64")
    }
    try:
        plain = backbone_of(PACKAGED).build()
    except OptionError as error:
        say(f"extraction: not measured: {error}")
        return {"features": ratios}
    shipped = FeatureFunction(FeaturesConfig(side=SIDE), 0).module
    small, large = torch.rand(IMAGES, 3, 32, 32), torch.rand(IMAGES, 3, SIDE, SIDE)
    found = interleaved({"plain": lambda: passed(plain, large), "shipped": lambda: shipped(small)}, repetitions)
    each = {name: 1000 * seconds / IMAGES for name, seconds in found.items()}
    say(f"{PACKAGED} at {SIDE} pixels, CPU ms per image: plain {each['plain']:.1f}, extraction {each['shipped']:.1f}")
    return {"features": {**ratios, PACKAGED: each["plain"] / each["shipped"]}}


@torch.no_grad()
def passed(net: nn.Module, images: torch.Tensor) -> None:
    """Pass images through a net in the batches that the extraction takes."""
    for batch in images.split(BATCH):  # type: ignore[no-untyped-call]
        net(batch)
