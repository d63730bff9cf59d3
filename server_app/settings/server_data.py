"""The images that the server itself holds: those to test on, and those that it may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_app.data import Split, images_of, open_split, server_share
from strategies.core.errors import OptionError
from strategies.method import Need

if TYPE_CHECKING:
    import torch

    from server_app.settings.read import Settings


def open_half(settings: Settings, half: str) -> Split:
    """Open the training or the test half of the configured data set.

    Raises:
        DataError: It is not there; says how to get it.
    """
    data = settings.app.data
    return open_split(data.name, half, root=data.root, image_size=data.image_size, left_out=data.left_out)


def proxy_images(settings: Settings, input_shape: tuple[int, int, int], seed: int) -> torch.Tensor | None:
    """Return the server's real images, uint8 [N, ch, H, W]; None for a method that has no use for them.

    Raises:
        OptionError: The method needs them, and no setting names any.
    """
    data, method = settings.app.data, settings.learner
    if Need.PROXY_IMAGES not in method.needs:
        return None
    if data.proxy_name:
        return images_of(data.proxy_name, input_shape, root=data.root, limit=data.proxy_limit, seed=seed)
    if data.proxy:
        train = open_half(settings, "train")
        return train.take(server_share(train, seed=seed, proxy=data.proxy)).images
    raise OptionError(
        f"method {method.name!r} needs that {Need.PROXY_IMAGES.value}: must be 'data.proxy', a share of the "
        "training images that no client gets (0.2, say), or 'data.proxy-name', another data set"
    )


def labelled_images(settings: Settings, seed: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the server's share of the training images with their labels; None for a method that asks for no labels.

    Raises:
        OptionError: The method is to be trained on them, and the server has no share.
    """
    has_to, data = settings.method.labelled, settings.app.data
    if has_to is None:
        return None
    if not data.proxy:
        if has_to(settings.method_config):
            raise OptionError(
                f"setting '{settings.method.name}.train-on' is 'server' and 'data.proxy' 0: allowed with it is a share "
                "of the training images that no client gets and the server has with their labels, 0.05 say"
            )
        return None
    train = open_half(settings, "train")
    share = train.take(server_share(train, seed=seed, proxy=data.proxy))
    return share.images, share.labels
