"""The tasks that a server can give a client: which model it trains, and which part it uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from client_app import cvae, local_training, open_set
from fl_app.models import build
from fl_app.models.cvae import Cvae
from fl_app.models.uploaded import open_set_builder
from strategies.core.errors import UploadError

if TYPE_CHECKING:
    from client_app.local_training import Epoch
    from fl_app.config import ClientConfig

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Task:
    """One kind of upload.

    Attributes:
        build: From the client's architecture, C, the shape of an image and the settings, to the untrained model; its
            weights are drawn from torch's global generator.
        train: Trains it in place; takes the arguments of :func:`client_app.local_training.train`.
        sent: From the trained model to the uploaded state_dict.
    """

    build: Callable[[str, int, Shape, ClientConfig], nn.Module]
    train: Callable[..., Epoch]
    sent: Callable[[nn.Module], dict[str, Tensor]]


def task_of(name: str) -> Task:
    """Return the task of this name.

    Raises:
        UploadError: The client does not know the task.
    """
    if name not in TASKS:
        raise UploadError(f"the server asks for task {name[:80]!r}: must be one of {', '.join(TASKS)}")
    return TASKS[name]


def _classifier(name: str, num_classes: int, input_shape: Shape, config: ClientConfig) -> nn.Module:  # noqa: ARG001
    return build(name, num_classes=num_classes, input_shape=input_shape)


def _open_set(name: str, num_classes: int, input_shape: Shape, config: ClientConfig) -> nn.Module:  # noqa: ARG001
    return open_set_builder(name, num_classes, input_shape)()


def _cvae(name: str, num_classes: int, input_shape: Shape, config: ClientConfig) -> nn.Module:  # noqa: ARG001
    return Cvae(num_classes, input_shape, latent=config.latent)


def _all(model: nn.Module) -> dict[str, Tensor]:
    return model.state_dict()


def _decoder(model: nn.Module) -> dict[str, Tensor]:
    return model.get_submodule("decoder").state_dict()


TASKS: Mapping[str, Task] = {
    "classifier": Task(_classifier, local_training.train, _all),
    "open-set": Task(_open_set, open_set.train, _all),
    "cvae": Task(_cvae, cvae.train, _decoder),
}
