"""The refinement of an iterative run's rounds: its place, its job, and the generator shared with the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp import Grid

from ...compute import ServerCompute, choose
from ...method import Job, State, Upload
from ..nodes import has_engine
from ..run import log_info
from .answers import CheckedAnswer
from .refinement import Refinement, Refiner

GENERATOR = "generator"


class RefinedRounds:
    """Fine-tunes the model of every round.

    Args:
        compute: Where the method runs; None for a Ray actor.

    Raises:
        OptionError: The method could not work on such a job.
    """

    def __init__(self, refiner: Refiner, job: Job, compute: str | ServerCompute | None) -> None:
        refiner.check(job)
        self._refiner, self._job = refiner, job
        self._compute: str | ServerCompute = "auto" if compute is None else compute
        self._refinement: Refinement | None = None

    @property
    def memory(self) -> State:
        """The method's memory of the rounds so far."""
        return self._begun().memory

    def go_on_from(self, memory: State) -> None:
        """Restore the memory from a checkpoint."""
        self._begun().memory = dict(memory)

    @property
    def images(self) -> torch.Tensor | None:
        """A sample of the last round's synthetic images; None without any."""
        return self._begun().images

    @contextmanager
    def held_open(self, grid: Grid, tick: Callable[[], None]) -> Iterator[None]:
        """Keep the place of all rounds, a Ray actor say, during a block.

        Args:
            grid: Flower's grid; a simulation's has a Ray of its own.
        """
        place = self._place(owns_ray=not has_engine(grid))
        with place.kept() as kept:
            self._refinement = Refinement(self._refiner, self._job, kept, say=log_info, tick=tick)
            yield

    def run(self, server_round: int, answers: Sequence[CheckedAnswer], start: State) -> tuple[State, dict[str, float]]:
        """Fine-tune the combination of a round's models; see :meth:`Refinement.run`.

        Args:
            server_round: From 1.
            answers: The round's, in the order of client names.
        """
        uploads = [_upload(answer, self._job.student) for answer in answers]
        return self._begun().run(server_round, uploads, start)

    def share_generator(self, server_round: int, contents: Mapping[int, RecordDict], key: str) -> dict[int, RecordDict]:
        """Return requests with the generator that the method shares with the clients, once it has one.

        Args:
            server_round: From 1.
            contents: Node -> request; they are not changed.
        """
        describe, memory = self._refiner.method.in_rounds.shares_generator, self._begun().memory
        if describe is None or not memory:
            return dict(contents)
        described = describe(replace(self._job, config=self._refiner.config, server_round=server_round))
        record = ArrayRecord(memory)
        made: dict[int, RecordDict] = {}
        for content in contents.values():  # most strategies ask all nodes by one and the same content
            if id(content) not in made:
                config = ConfigRecord({**content.config_records.get(key, ConfigRecord()), **described})
                made[id(content)] = RecordDict({**content, key: config, GENERATOR: record})
        return {node: made[id(content)] for node, content in contents.items()}

    def _begun(self) -> Refinement:
        """Return the refinement of all rounds; a caller that owns the loop runs each of them in a place of its own."""
        if self._refinement is None:
            self._refinement = Refinement(self._refiner, self._job, self._place(), say=log_info)
        return self._refinement

    def _place(self, *, owns_ray: bool | None = None) -> ServerCompute:
        return choose(self._compute, owns_ray=owns_ray) if isinstance(self._compute, str) else self._compute


def _upload(answer: CheckedAnswer, architecture: str) -> Upload:
    reply = answer.reply
    return Upload(replace(reply.facts, client=answer.client, architecture=architecture), lambda: dict(reply.state))
