"""The bounds on one client's influence in a round, for every strategy and refiner: parameters, statistics, records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.common.logger import log
from torch import nn

from ...core.bounds import Bound
from ..messages import metrics_of
from .answers import Answered
from .round_records import to_numpy, to_record

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from ...method import State


class RoundBounds:
    """Shortens and logs changes far longer than those of the others; see :mod:`strategies.core.bounds`.

    Trainable parameters and running statistics have bounds of their own, and so has every record of changes that the
    strategy adds. Counters of batches stay as they are.

    Args:
        module: The model, whose trainable parameters have a bound apart from its running statistics.
        records: The strategy's records that hold a change, such as SCAFFOLD's ``control``.
        divisor: The positive metric by which the strategy divides each client's change, such as FedNova's ``travel``;
            empty for none. The divided changes are bounded too.
    """

    def __init__(self, module: nn.Module, records: Sequence[str] = (), divisor: str = "") -> None:
        # A tied weight is no running statistic, under none of its names.
        self._parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        self._records = tuple(records)
        self._divisor = divisor
        whole = ("change", "change of running statistics")
        each = [f"{what} per {divisor}" for what in whole if divisor]
        self._bounds = {what: Bound(what) for what in (*whole, *each, *self._records)}

    @classmethod
    def of(cls, module: nn.Module, strategy: Strategy) -> RoundBounds:
        """Return the bounds for a model under a strategy, whose class names its own records and divisor."""
        records, divisor = getattr(strategy, "bounded_records", ()), getattr(strategy, "bounded_divisor", "")
        return cls(module, records, divisor)

    def apply(self, number: int, start: State, answers: Sequence[Answered]) -> list[Answered]:
        """Return a round's answers within the bounds; an answer within them is returned as given.

        Args:
            number: The round, from 1.
            start: The model at its start.
            answers: In the order of client names.
        """
        numbers = {name for name, value in start.items() if value.is_floating_point()}
        parts = {"change": numbers & self._parameters, "change of running statistics": numbers - self._parameters}
        for what, names in parts.items():
            begin = {name: start[name] for name in sorted(names)}
            answers = self._models(number, what, begin, answers)
            if self._divisor:
                per = [float(metrics_of(each.content)[self._divisor]) for each in answers]  # type: ignore[arg-type]
                answers = self._models(number, f"{what} per {self._divisor}", begin, answers, per)
        for record in self._records:
            answers = self._changes(number, record, answers)
        for bound in self._bounds.values():
            while bound.notes:
                log(WARNING, "%s", bound.notes.pop(0))
        return list(answers)

    def _models(
        self, number: int, what: str, start: State, answers: Sequence[Answered], per: Sequence[float] = ()
    ) -> list[Answered]:
        begin = _as_numpy(start)
        ends = {answer.client: _as_numpy({name: answer.reply.state[name] for name in start}) for answer in answers}
        found = self._bounds[what].apply(number, begin, ends, per)
        return [
            answer if near is end else _with_model(answer, near)
            for answer, near, end in zip(answers, found, ends.values(), strict=True)
        ]

    def _changes(self, number: int, record: str, answers: Sequence[Answered]) -> list[Answered]:
        ends = {answer.client: to_numpy(answer.content[record]) for answer in answers}
        zeros = {name: np.zeros_like(value) for name, value in next(iter(ends.values()), {}).items()}
        found = self._bounds[record].apply(number, zeros, ends)
        return [
            answer if near is end else replace(answer, content=RecordDict({**answer.content, record: to_record(near)}))
            for answer, near, end in zip(answers, found, ends.values(), strict=True)
        ]


def _as_numpy(state: State) -> dict[str, np.ndarray[Any, Any]]:
    return {name: value.detach().cpu().numpy() for name, value in state.items()}


def _with_model(answer: Answered, near: Mapping[str, np.ndarray[Any, Any]]) -> Answered:
    moved = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in near.items()}
    return replace(answer, reply=replace(answer.reply, state={**answer.reply.state, **moved}))
