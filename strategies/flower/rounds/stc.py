"""FedAvg with sparse ternary compression as a Flower strategy: both ways, updates travel as a few entries.

A client that was in the round before gets the last update, others get the whole model. The rest that compression leaves
out of an update is added to the next one, on either side. The clients' half is
:class:`strategies.client.corrections.SparseUpdate`; the code is :mod:`strategies.uploads.ternary`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ...core import refusals
from ...uploads.ternary import Compression, flatten_arrays, unflatten_arrays
from ..decoding import decode_array
from .answers import to_numpy, to_record


class Stc(FedAvg):
    """Sparse ternary compression around FedAvg.

    Args:
        density: p, the share of entries that is sent, in (0, 1].
        values: "ternary", their signs and one magnitude, or "float16", each in 16 bits.
        **settings: Those of Flower's FedAvg.

    Attributes:
        left: The rest of the server's updates so far, float32 [n]; None before the first.
        clients_remember: The clients keep the rest of their updates from round to round.
    """

    clients_remember = True

    def __init__(self, *, density: float, values: str = "ternary", **settings: Any) -> None:
        super().__init__(**settings)
        self.left: np.ndarray[Any, Any] | None = None
        self._compression = Compression(density, values)
        self._start: dict[str, np.ndarray[Any, Any]] = {}
        self._update = ArrayRecord()
        self._holders: set[int] = set()
        self._made: dict[str, np.ndarray[Any, Any]] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask as FedAvg does; who holds the model of the round before gets the update to it alone.

        The update leads to the model that was returned last. Handed another one, a refined one say, it is of no use.
        """
        self._start = to_numpy(arrays)
        if not _equal(self._start, self._made):
            self._holders = set()
        config["stc-density"] = self._compression.density
        if self._compression.values != "ternary":  # a client's default
            config["stc-values"] = self._compression.values
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            if message.metadata.dst_node_id in self._holders:
                message.content = RecordDict(
                    {**message.content, self.arrayrecord_key: ArrayRecord(), "ternary": self._update}
                )
        self._holders = set()  # if this round fails, the holders are unknown
        return messages

    def check_answer(self, content: RecordDict) -> RecordDict:
        """Put the client's model together from its start and its update.

        Raises:
            UploadError: The update is no code for this model.
        """
        record = content.array_records.get("ternary")
        if record is None:
            raise refusals.missing_record("ternary")
        code = {}
        for name, array in list(record.items())[:3]:
            dtype = {"bits": "uint8", "values": "float16"}.get(name, "float32")
            if len(array.shape) != 1 or not 0 < array.shape[0] <= len(array.data):
                raise refusals.broken_rule(f"ternary[{name[:80]!r}] has shape {list(array.shape[:9])}", "one row")
            code[name] = decode_array(array, tuple(array.shape), dtype, f"ternary[{name[:80]!r}]")
        size = sum(value.size for value in self._start.values())
        update = unflatten_arrays(self._compression.decode(code, size, "ternary").dense(), self._start)
        model = to_record({name: value + update[name] for name, value in self._start.items()})
        sent = content.array_records.get(self.arrayrecord_key, ArrayRecord())
        others = {name: array for name, array in sent.items() if name not in self._start}
        rest = {name: found for name, found in content.items() if name not in (self.arrayrecord_key, "ternary")}
        return RecordDict({**rest, self.arrayrecord_key: ArrayRecord({**others, **model})})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model moved by the compressed mean of the updates; (None, None) without an answer."""
        replies = list(replies)
        mean, metrics = super().aggregate_train(server_round, replies)
        if mean is None:
            return None, None
        left = self.left if self.left is not None else 0.0
        wanted = flatten_arrays(to_numpy(mean)) - flatten_arrays(self._start) + left
        sent = self._compression.compress(wanted)
        self.left = wanted - sent.dense()
        self._update = to_record(self._compression.encode(sent))
        self._holders = {reply.metadata.src_node_id for reply in replies if not reply.has_error()}
        step = unflatten_arrays(sent.dense(), self._start)
        self._made = {name: value + step[name] for name, value in self._start.items()}
        return to_record(self._made), metrics


def _equal(one: Mapping[str, np.ndarray[Any, Any]], other: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
