"""The corrections of local training that strategies in rounds request, for any ClientApp.

In a few lines::

    from oneshot_fl.client.corrections import LocalUpdate, read_round

    update = LocalUpdate(model, *read_round(msg), momentum=0.9, memory=RoundState.of("", run_id, "hospital-a"))
    for images, labels in batches:
        optimizer.zero_grad()
        logits = model(images)
        (criterion(logits, labels) + update.penalty(model, logits, labels)).backward()
        optimizer.step()
        update.step(lr)
    records, metrics = update.finish(model)

``records`` and ``metrics`` belong into the answer, beside the number of examples. ``update`` reads the request: FedProx
sends ``proximal-mu``, FedDyn ``feddyn-alpha``, SCAFFOLD its control variate, STC its compression, FedGen its generator.
Without any of them the penalty is 0; several of them add up. Each part also works alone:

* :class:`.regularizers.Proximal`, :class:`.regularizers.DynamicRegularizer`;
* :class:`.control.ControlVariates`, :class:`.control.Travel`, which FedNova asks for;
* :class:`.sparse_update.SparseUpdate`;
* :class:`.generated.GeneratedExamples`.

These modules name their papers and deviations. :mod:`.round_state` keeps the state that outlives a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from ..core.asks import real_of, whole_of
from ..core.places import check_round
from . import read_arrays
from .control import ControlVariates as ControlVariates
from .control import Travel as Travel
from .generated import GeneratedExamples
from .parameters import State, part_of
from .parameters import parameters_of as parameters_of
from .regularizers import DynamicRegularizer as DynamicRegularizer
from .regularizers import Proximal as Proximal
from .round_state import RoundState
from .sparse_update import SparseUpdate as SparseUpdate
from .sparse_update import compression_of
from .sparse_update import load_start as load_start


class OnWeights(Protocol):
    """A correction that depends on the weights alone."""

    def penalty(self, model: nn.Module) -> torch.Tensor:
        """Return the term added to the loss of a batch, a scalar."""


class OnBatches(Protocol):
    """A correction that depends on the model's outputs for a batch."""

    def penalty(self, model: nn.Module, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the term added to the loss of a batch, a scalar.

        Args:
            model: The model in training.
            logits: [B, C], with their graph.
            labels: [B].
        """

    def step(self) -> None:
        """Count the batch as trained on."""


class LocalUpdate:
    """One client's part of one round, for every strategy; see the module.

    Args:
        model: Receives the weights that local training starts from.
        said: The request's config.
        sent: The request's arrays by name of record.
        momentum: Momentum of the client's SGD; 0 for none.
        memory: The client's state of earlier rounds; None: every round starts without one.
        label_counts: The client's examples per class [C], which end a generator's epochs; None: it takes part in all.

    Raises:
        UploadError: The request does not fit the model, or builds on a state that the client has lost.
    """

    def __init__(
        self,
        model: nn.Module,
        said: Mapping[str, Any],
        sent: Mapping[str, State],
        *,
        momentum: float = 0.0,
        memory: RoundState | None = None,
        label_counts: Sequence[int] | None = None,
    ) -> None:
        self._round = whole_of(said, "server-round", 1)
        check_round(self._round)
        self._last, self._safe = (whole_of(said, key) if key in said else None for key in ("last-round", "safe-round"))
        self._memory = memory or RoundState(None, str(said.get("client", "client")))
        self._travel = Travel(momentum)
        mu, alpha = (real_of(said, key, 0.0) for key in ("proximal-mu", "feddyn-alpha"))
        sparse, self._recalled = compression_of(real_of(said, "stc-density", 0.0), said), None
        if sparse or alpha or "control" in sent:
            self._recalled = self._memory.recall(self._round, self._last)
        kept = self._recalled.state if self._recalled else {}
        load_start(model, sent, sparse, kept if self._recalled and self._recalled.round == self._round - 1 else {})
        self._control = ControlVariates(model, sent["control"], part_of(kept, "own.")) if "control" in sent else None
        self._dynamic = DynamicRegularizer(model, alpha, part_of(kept, "drift.")) if alpha else None
        self._sparse = SparseUpdate(model, sparse, kept.get("left")) if sparse else None
        self._start = parameters_of(model) if sparse else {}
        proximal = Proximal(model, mu) if mu else None
        self._on_weights: list[OnWeights] = [part for part in (proximal, self._control, self._dynamic) if part]
        self._on_batches: list[OnBatches] = []
        if "generator" in sent:
            self._on_batches.append(
                GeneratedExamples(
                    model, said, sent["generator"],
                    client=self._memory.client, server_round=self._round, label_counts=label_counts,
                )
            )  # fmt: skip

    def penalty(
        self, model: nn.Module, logits: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the term added to the loss of a batch, a scalar; 0 if the strategy adds none.

        Args:
            model: The model in training.
            logits: Its outputs for the batch [B, C]; without them, corrections that depend on the batch add nothing.
            labels: [B].
        """
        terms = [part.penalty(model) for part in self._on_weights]
        if logits is not None and labels is not None:
            terms += [part.penalty(model, logits, labels) for part in self._on_batches]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def step(self, lr: float, *, at_rest: bool = False) -> None:
        """Count a step taken with the learning rate ``lr``; at rest its optimiser had no momentum before it."""
        self._travel.step(lr, at_rest=at_rest)
        for part in self._on_batches:
            part.step()

    def finish(self, model: nn.Module) -> tuple[dict[str, State], dict[str, float]]:
        """Return the array records and the metrics of the answer, and save the state for the next round.

        Metrics: ``travel``, the length of the steps. Strategies with a state add ``restarted``: 1 if the server counts
        on a state that the client has lost, else 0.

        Raises:
            UploadError: SCAFFOLD needs a counted step, and none was counted.
        """
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        records: dict[str, State] = {"arrays": state}
        kept: State = {}
        if self._control is not None:
            own, records["control"] = self._control.finish(model, self._travel.length)
            kept |= {f"own.{name}": value for name, value in own.items()}
        if self._dynamic is not None:
            kept |= {f"drift.{name}": value for name, value in self._dynamic.finish(model).items()}
        if self._sparse is not None:
            records["ternary"], kept["left"] = self._sparse.finish(model)
            records["arrays"] = {name: value for name, value in state.items() if name not in self._start}
            kept |= {f"start.{name}": value for name, value in self._start.items()}
        metrics = {"travel": self._travel.length}
        if self._recalled is not None:
            self._memory.save(self._round, kept, self._safe, last_round=self._last)
            metrics["restarted"] = float(self._recalled.restarted)
        return records, metrics


def read_round(msg: Message) -> tuple[dict[str, Any], dict[str, State]]:
    """Return a request's config and its arrays by name of record.

    Raises:
        UploadError: Names an array that cannot be read.
    """
    records = msg.content.array_records
    config = msg.content.config_records.get("config", ConfigRecord())
    return dict(config), {name: read_arrays(record, torch.from_numpy) for name, record in records.items()}
