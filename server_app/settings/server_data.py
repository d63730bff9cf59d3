"""The server's own images: the test images, and those that a method may use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_app.data import Split, images_in, images_of, open_data, server_share
from fl_app.models.features import as_read
from strategies.core.errors import OptionError
from strategies.method import Need

if TYPE_CHECKING:
    import torch

    from server_app.settings.read import Settings


def open_half(settings: Settings, half: str) -> Split:
    """Open the training or the test half of the configured data set.

    Raises:
        DataError: The data set is missing; the error names the remedy.
        OptionError: The backbone of texts is unknown or not installed.
    """
    return as_read(open_data(settings.app.data, half), settings.app.features)


def proxy_images(settings: Settings, input_shape: tuple[int, int, int], seed: int) -> torch.Tensor | None:
    """Return the server's images without labels [N, ch, H, W]; None for a method that does not use them.

    Raises:
        DataError: The file of the images is missing or damaged.
        OptionError: The method needs images, and no setting names any.
    """
    data, method = settings.app.data, settings.learner
    if Need.PROXY_IMAGES not in method.needs:
        return None
    if data.proxy_file:
        return images_in(data.proxy_file, input_shape)
    if data.proxy_name:
        return images_of(data.proxy_name, input_shape, root=data.root, limit=data.proxy_limit, seed=seed)
    if data.proxy:
        train = open_half(settings, "train")
        return train.take(server_share(train, seed=seed, proxy=data.proxy)).images
    raise OptionError(
        f"method {method.name!r} needs that {Need.PROXY_IMAGES.value}: set 'data.proxy', a share of the "
        "training images that no client gets (0.2, for example), 'data.proxy-name', another data set, or "
        "'data.proxy-file', a file with images"
    )


def labelled_images(settings: Settings, seed: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the server's share of the training images with their labels; None for a method without labels.

    Raises:
        OptionError: The method trains on labelled images, and the server has none.
    """
    has_to, data = settings.method.labelled, settings.app.data
    if has_to is None:
        return None
    if not data.proxy:
        if has_to(settings.method_config):
            raise OptionError(
                f"setting '{settings.method.name}.train-on' is 'server' and 'data.proxy' 0: needs a larger "
                "'data.proxy', such as 0.05, the share of the training images that only the server has, with labels"
            )
        return None
    train = open_half(settings, "train")
    share = train.take(server_share(train, seed=seed, proxy=data.proxy))
    return share.images, share.labels
