"""The settings of a frozen backbone."""

from __future__ import annotations

from fl_app.node_policy import CACHE_MIB
from strategies.core.facts import GRAM, SQUARES
from strategies.core.options import config_class, option

PACKAGED = "efficientnet-lite0"
TEXTUAL = "wordllama"


@config_class("features")
class FeaturesConfig:
    """The frozen backbone of the methods that learn from sums of features."""

    backbone: str = option(
        PACKAGED,
        "efficientnet-lite0, wordllama or minilm for texts, torchvision:<architecture>, hf:<folder> of Hugging Face, "
        "or a project's module:attribute",
    )
    weights: str = option("", "file of the weights of a torchvision backbone", path=True)
    weights_sha256: str = option("", "sha256 of features.weights")
    side: int = option(0, "height and width of the backbone's input, pixels; 0 = the backbone's own", low=0, high=1024)
    dim: int = option(0, "features after a seeded orthonormal projection; 0 = all", low=0)
    precision: str = option("float32", "type of the backbone's computation", choices=("float32", "bfloat16"))
    min_examples: int = option(
        0, "a client with fewer examples sends no sums; 0 = every client sends", low=0,
        private=(0, "one example more or less would decide whether an upload comes, which no noise hides"),
    )  # fmt: skip
    moments: bool = option(
        False,
        "send the sums of squares per class beside the Gram matrix, so that ridge, lda and fedpft take one upload",
        private=(False, "the sums of squares carry no noise"),
    )
    cache_mib: float = option(CACHE_MIB, "features that a client keeps on its own disk, MiB; 0 = none", low=0.0)

    def second(self, method: str) -> tuple[str, ...]:
        """Return the second moments in the upload of a run of a method: ``gram``, ``squares``, or both."""
        if self.moments:
            return GRAM, SQUARES
        return (SQUARES,) if method == "fedpft" else (GRAM,)
