"""Which training images the clients may hold, and which real images the server holds, without labels.

FedDF (Lin et al., NeurIPS 2020, arXiv:2006.07242) distils on unlabelled images that the server has. In Co-Boosting's
comparison (Dai et al., ICLR 2024) they are a fifth of the training set, drawn in a way that the paper leaves open.

Here the seed fixes one order of the training set. The clients' images are its beginning, the server's its end. A run
with a limit leaves images between them unused, which a later replay may give to the server. The server's images may
also be another data set's, or those of a file, which need not be real.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from strategies.core.errors import DataError, OptionError
from strategies.core.places import expand_user
from strategies.core.seeds import generator

from .sources import open_split
from .split import Split


def clients_share(split: Split, *, seed: int, limit: int = 0, proxy: float = 0.0) -> torch.Tensor:
    """Return the positions that all clients together hold, ascending.

    Args:
        split: The training half [N].
        limit: Largest number of positions, of each domain where the set has domains; 0 for all.
        proxy: The share that no client gets, in [0, 1).
    """
    order = _order(split, seed)
    order = order[: len(order) - int(proxy * len(order))]
    if not limit:
        return order.sort().values
    if split.domains is None:
        return order[:limit].sort().values
    of = split.domains[order]
    return torch.cat([order[of == domain][:limit] for domain in range(int(of.max()) + 1)]).sort().values


def server_share(split: Split, *, seed: int, proxy: float) -> torch.Tensor:
    """Return the positions that the server holds: the last ``int(proxy * N)`` of the order, ascending."""
    order = _order(split, seed)
    return order[len(order) - int(proxy * len(order)) :].sort().values


def nobodys(split: Split, *, seed: int, limit: int, proxy: float) -> int:
    """Return how many images at the end of the order no client holds; the arguments are :func:`clients_share`'s."""
    held = torch.isin(_order(split, seed), clients_share(split, seed=seed, limit=limit, proxy=proxy))
    return len(held) - 1 - int(held.nonzero().max()) if held.any() else len(held)


def images_of(name: str, input_shape: tuple[int, int, int], *, root: str, limit: int, seed: int) -> torch.Tensor:
    """Return training images of another data set.

    Args:
        name: The data set, one without domains.
        input_shape: (ch, H, W) of the returned images.
        root: Its folder, see :func:`~fl_app.data.sources.open_split`.
        limit: Largest number of images, drawn by the seed; 0 for all.

    Returns:
        uint8 [N, ch, H, W].

    Raises:
        OptionError: The data set has another number of channels.
        DataError: The data set is missing or damaged.
    """
    split = open_split(name, "train", root=root, image_size=input_shape[1])
    if split.input_shape != input_shape:
        raise OptionError(
            f"setting 'data.proxy-name' is {name!r}, whose images have {split.input_shape[0]} channels: must be a data "
            f"set with {input_shape[0]}, as 'data.name' has"
        )
    order = torch.randperm(len(split.labels), generator=generator(seed, "proxy"))
    return split.take(order[: limit or len(order)].sort().values).images


def images_in(file: str, input_shape: tuple[int, int, int]) -> torch.Tensor:
    """Return the images of a file, such as ``images.safetensors`` of a run folder.

    Args:
        file: A safetensors file whose tensor ``images`` is [N, ch, H, W], uint8 or float32.
        input_shape: (ch, H, W) of the images.

    Raises:
        DataError: The file is missing or damaged, or holds no such tensor.
    """
    where = f"setting 'data.proxy-file' is {file!r}"
    try:
        found = load_file(expand_user(file))
    except FileNotFoundError as error:
        raise DataError(f"{where}: no such file; must be a safetensors file with a tensor 'images'") from error
    except (OSError, SafetensorError) as error:
        raise DataError(f"{where}: not a readable safetensors file ({error})") from error
    if "images" not in found:
        raise DataError(f"{where}, with tensors {', '.join(sorted(found)[:3])}: must have one of the name 'images'")
    images = found["images"]
    if images.shape[1:] != input_shape:
        wanted = ", ".join(map(str, input_shape))
        raise DataError(f"{where}, whose images have the shape {tuple(images.shape)}: must be (N, {wanted})")
    return images


def _order(split: Split, seed: int) -> torch.Tensor:
    return torch.randperm(len(split.labels), generator=generator(seed, "limit"))
