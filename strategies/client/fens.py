"""The client half of FENS, for any ClientApp.

Two lines give the server's ``Fens`` strategy everything it needs::

    from oneshot_fl.client import fens
    fens.serve(app, model=Net, examples=held_examples, client=name_of)

``held_examples(context)`` returns the examples that the client did not train on, as normalised inputs [n, ...] and
labels [n]; :func:`.holdout.held_out` selects them. The server sends four kinds of questions. ``offer`` asks whether the
client has the ensemble's logits, ``ensemble`` has it compute them, ``round`` requests steps of the aggregator, and
``votes`` the members' votes.

Only ``ensemble`` needs torch, and ``round`` if the aggregator reads the inputs. In deployment every message starts a
new process, which would otherwise spend most of its time on that import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from ..core.errors import OptionError, UploadError
from . import answered, read_arrays
from .fens_answers import Local as Local
from .fens_answers import Own as Own
from .fens_answers import respond as respond
from .holdout import Told as Told

if TYPE_CHECKING:
    import torch

    from ..method import ModelBuilder


def serve(
    app: ClientApp,
    *,
    model: ModelBuilder | Mapping[str, ModelBuilder],
    examples: Callable[[Context], tuple[Any, Any]],
    client: str | Callable[[Context], str],
    state_dir: str = "",
    max_ensemble_mib: float = 0.0,
) -> None:
    """Let a ClientApp answer the server's ``Fens`` strategy.

    Args:
        app: The ClientApp.
        model: A callable that returns an ``nn.Module``, or a dict of architecture name -> callable, as for the
            strategy. A client must be able to build every architecture of the ensemble.
        examples: Context -> the examples that this client did not train on: normalised inputs [n, ...], labels [n];
            tensors, or numpy arrays.
        client: The client's stable name, or context -> name; its upload bears the same name.
        state_dir: Folder of the logits; empty: ``$ONESHOT_CLIENT_STATE``, else the user's cache folder.
        max_ensemble_mib: The largest ensemble that the client accepts, in MiB; 0: any. Its logits, its votes, and
            the hidden units of an aggregator's step each take at most that too, and at most 1024 MiB if it is 0.
    """
    builders = dict(model) if isinstance(model, Mapping) else {}

    def build(architecture: str, told: Told) -> torch.nn.Module:  # noqa: ARG001  a foreign model knows its classes
        if builders and architecture not in builders:
            raise OptionError(f"architecture is {architecture!r}: must be one of {', '.join(builders)}")
        chosen = builders[architecture] if builders else model
        return chosen()  # type: ignore[operator]

    @app.train("fens")
    def fens(msg: Message, context: Context) -> Message:
        name = client if isinstance(client, str) else client(context)
        return answer(
            msg,
            Local(
                client=name,
                examples=lambda told: examples(context),  # noqa: ARG005  the client selects its held examples itself
                build=build,
                state_dir=state_dir,
                max_ensemble_mib=max_ensemble_mib,
            ),
        )


def answer(msg: Message, local: Local) -> Message:
    """Answer one message of FENS."""
    facts = dict(msg.content.config_records.get("config", ConfigRecord()))
    arrays = msg.content.array_records.get("arrays", ArrayRecord())
    try:
        said, made = respond(facts, read_arrays(arrays, np.asarray), local)
    except UploadError as error:
        said, made = {"error": str(error)}, {}
    record = ArrayRecord({key: Array(value) for key, value in made.items()})
    return answered(msg, {"client": local.client, **said}, record)
