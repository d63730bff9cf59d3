"""The tasks that a server can give a client: which model it trains, and which part it uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from client_app.training import fafi, features, fedcvae_ens, fedov, local, private
from fl_app.data import Normalization
from fl_app.feature_cache import FeatureCache
from fl_app.models.client_nets import Cvae, cut
from fl_app.models.feature_heads import of_backbone
from fl_app.models.features import FeatureFunction
from fl_app.models.uploaded import build_for
from strategies.core import refusals
from strategies.core.facts import STATISTICS, backbone_in, is_head, kind_of

if TYPE_CHECKING:
    from client_app.training.local import Epoch, Training
    from fl_app.config import AppConfig
    from fl_app.privacy import PrivacyConfig

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Wanted:
    """The model that a client trains.

    Attributes:
        input_shape: (channels, height, width) of one image.
    """

    name: str
    num_classes: int
    input_shape: Shape
    normalization: Normalization
    config: AppConfig
    cache: FeatureCache | None = None


@dataclass(frozen=True)
class Task:
    """One kind of upload.

    Attributes:
        build: From the wanted model to the untrained one; its weights are drawn from torch's global generator.
        train_privately: Trains it within a privacy budget, and returns the epsilon that was spent.
        sent: The beginning of the names of the weights that are uploaded, without it; the client keeps all of them.
        calibrates: Whether the ranges of its layers' outputs can be measured on images.
    """

    build: Callable[[Wanted], nn.Module]
    train: Callable[[Any, Training], Epoch]
    train_privately: Callable[[Any, Training, PrivacyConfig], float] = private.train
    sent: str = ""
    calibrates: bool = True


def task_of(name: str, architecture: str = "") -> Task:
    """Return the task of this name; where classifiers are asked for, a client's architecture may be a head, or sums.

    Raises:
        UploadError: The client does not know the task.
    """
    if name not in TASKS:
        raise refusals.bad_request("task", name, f"one of {', '.join(TASKS)}")
    if name == "classifier" and is_head(architecture):
        return HEADS
    return TASKS[STATISTICS if name == "classifier" and kind_of(architecture) == STATISTICS else name]


def _classifier(wanted: Wanted, task: str = "classifier") -> nn.Module:
    return build_for(task, wanted.name, wanted.num_classes, wanted.input_shape, wanted.normalization)


def _blocks(wanted: Wanted) -> nn.Module:
    return cut(wanted.name, _classifier(wanted), wanted.config.client.blocks)


def _cvae(wanted: Wanted) -> nn.Module:
    return Cvae(wanted.num_classes, wanted.input_shape, latent=wanted.config.client.latent)


def _sums(wanted: Wanted) -> nn.Module:
    second = wanted.config.features.second(wanted.config.method)
    return features.ClientSums(_function(wanted), wanted.num_classes, wanted.cache, second)


def _head(wanted: Wanted) -> nn.Module:
    return features.ClientHead(_function(wanted), wanted.num_classes, wanted.cache)


def _function(wanted: Wanted) -> FeatureFunction:
    function = FeatureFunction(wanted.config.features, wanted.config.seed, *wanted.normalization)
    return of_backbone(function, backbone_in(wanted.name))


TASKS: Mapping[str, Task] = {
    "classifier": Task(_classifier, local.train),
    "open-set": Task(partial(_classifier, task="open-set"), fedov.train),
    "prototypes": Task(partial(_classifier, task="prototypes"), fafi.train),
    "block": Task(_blocks, local.train, sent="0.", calibrates=False),
    "cvae": Task(_cvae, fedcvae_ens.train, sent="decoder."),
    "statistics": Task(_sums, features.add_up, features.add_up_privately, calibrates=False),
}
HEADS = Task(_head, features.train_head, features.train_head_privately, calibrates=False)
