"""Refinement: a server method that runs in every round on the round's models and starts from their combination.

Any method that ends with one model of the clients' architecture can thus fine-tune the global model of federated
learning, as FLBoost does (Zhang, Shen, Ding, Tao, Duan, CVPR 2022). Any strategy may combine the round's models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...compute import choose
from ...core.errors import OptionError
from ...core.seeds import derive_seed
from ...method import METHODS, Job, Method, Outcome, Silent, Upload
from ...uploads.needs import check_needs

if TYPE_CHECKING:
    import torch

    from ...compute import ServerCompute
    from ...method import State


@dataclass(frozen=True)
class Refiner:
    """A method as the server stage of every round.

    Attributes:
        method: The method; it ends with one model, works on classifiers and needs no clients.

    Raises:
        OptionError: The method cannot refine, or the config is another method's.
    """

    method: Method
    config: Any

    def __post_init__(self) -> None:
        """Check both."""
        if not refines(self.method):
            allowed = ", ".join(name for name in METHODS if refines(METHODS[name]))
            raise OptionError(f"refiner is {self.method.name!r}: must be one of {allowed}")
        if not isinstance(self.config, self.method.config):
            raise OptionError(
                f"the refiner's config is a {type(self.config).__name__}: with {self.method.name!r} it must be a "
                f"{self.method.config.__name__}"
            )

    def check(self, job: Job) -> None:
        """Refuse a job of rounds that the method could not work on.

        Raises:
            OptionError: The job lacks something that the method needs; the message names it.
        """
        # The round supplies the method's start, so that the needs of the config's own start do not apply.
        check_needs(self.method, replace(job, config=self.config, start={}, clients_seed=None))

    @classmethod
    def of(cls, name: str, **changes: Any) -> Refiner:
        """Return a method of the library by name, with changes to its default config.

        Raises:
            OptionError: There is no such method, it cannot refine, or a change is out of range.
        """
        return cls(METHODS[name], METHODS[name].config(**changes))


def refines(method: Method) -> bool:
    """Return whether a method can fine-tune a global model: it turns classifiers into one model without clients."""
    return method.client_phase is None and method.kind == "student" and method.uploads == "classifier"


class Refinement:
    """Runs a refiner round after round, and passes its memory from each round to the next.

    Args:
        job: The job of every round, without uploads.
        compute: Where the method runs, see :func:`strategies.compute.choose`.
        say: Receives a line for the user; a method's note is passed once, not in every round.

    Attributes:
        memory: The method's memory after the last round; empty before the first.
        images: A sample of the last round's synthetic images [N, ch, H, W] in uint8; None without any.

    Raises:
        OptionError: The method could not work on such a job.
    """

    def __init__(
        self,
        refiner: Refiner,
        job: Job,
        compute: str | ServerCompute | None,
        *,
        say: Callable[[str], None],
    ) -> None:
        refiner.check(job)
        self.memory: State = {}
        self.images: torch.Tensor | None = None
        self._method = refiner.method
        # Each round's model is tested; scores of the method's epochs between rounds are not wanted.
        self._job = replace(job, config=refiner.config, observer=None)
        self._compute, self._say = compute, say
        self._tick: Callable[[], None] | None = None
        self._said: set[str] = set()

    @contextmanager
    def held_open(self, tick: Callable[[], None], *, owns_ray: bool) -> Iterator[None]:
        """Keep the place of all rounds, a Ray actor say, during a block; without it each round has one of its own.

        Args:
            owns_ray: Whether no other part of the process, as a simulation, starts Ray.
        """
        with choose(self._compute, owns_ray=owns_ray).kept() as self._compute:
            self._tick = tick
            yield

    def describe_generator(self, server_round: int) -> Mapping[str, str | int | float] | None:
        """Return the description of the generator that the method shares with the clients; None while it has none."""
        describe = self._method.in_rounds.shares_generator
        return describe(replace(self._job, server_round=server_round)) if describe and self.memory else None

    def run(self, server_round: int, uploads: Sequence[Upload], start: State) -> tuple[State, dict[str, float]]:
        """Fine-tune a round's model.

        Args:
            server_round: From 1.
            uploads: The round's models, in the order of client names.
            start: Their combination; not changed.

        Returns:
            The fine-tuned weights, and the losses of the method's last epoch by name. If the method's result is not
            finite, the weights are ``start``.

        Raises:
            OneShotError: The method refuses the job, or failed.
        """
        job = replace(
            self._job,
            uploads=tuple(uploads),
            start=start,
            seed=self._seed(server_round),
            clients_seed=None,  # they started from the model of the round before, not from ``start``
            server_round=server_round,
            memory=self.memory or None,
        )
        clients = {upload.client for upload in uploads}
        passer = _NotePasser(lambda line: self._pass_note(line, clients), self._tick)
        began = time.monotonic()
        outcome = choose(self._compute).run(self._method, job, passer)
        took = {"refinement_s": time.monotonic() - began, "arithmetic_s": sum(outcome.timings.values())}
        if not _finite(outcome):
            self._say(
                f"round {server_round}: the model of {self._method.title} holds NaN or Inf, so the clients' combined "
                f"model is kept; lower its learning rate ({self._method.name}.{self._method.in_rounds.learning_rate})"
            )
            self.memory = {}
            return start, {**passer.values, **took}
        self.memory, self.images = dict(outcome.memory), outcome.images
        return dict(outcome.student or start), {**passer.values, **took}

    def _seed(self, server_round: int) -> int:
        """Return a round's seed: a method that ignores the round would draw the same numbers in every round."""
        alike = self._method.in_rounds.draws_by_round or server_round == 1
        return self._job.seed if alike else derive_seed(self._job.seed, "refinement", server_round)

    def _pass_note(self, line: str, clients: Collection[str]) -> None:
        # The clients that a note names change from round to round; its other words stay the same.
        note = " ".join(word for word in line.split() if word.rstrip(",:") not in clients)
        if note not in self._said:
            self._said.add(note)
            self._say(line)


class _NotePasser(Silent):
    """A Progress that keeps the last epoch's numbers and passes notes on."""

    def __init__(self, pass_note: Callable[[str], None], tick: Callable[[], None] | None) -> None:
        self.values: dict[str, float] = {}
        # No checkpoints within a round: an interrupted round is repeated.
        self.interval_s = float("inf")
        self._pass_note, self._tick = pass_note, tick

    def record(self, row: Mapping[str, Any]) -> None:
        if "note" in row:
            self._pass_note(str(row["note"]))
        else:
            numbers = {key: value for key, value in row.items() if key != "epoch"}
            self.values = {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)}

    def tick(self) -> None:
        if self._tick is not None:
            self._tick()


def _finite(outcome: Outcome) -> bool:
    tensors = [*(outcome.student or {}).values(), *outcome.memory.values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
