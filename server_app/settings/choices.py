"""The choices of the setting ``method``: the server methods, and federated learning in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from strategies.core.errors import OptionError
from strategies.core.facts import CLASSIFIER, STATISTICS
from strategies.core.options import Always, keys_of, meant
from strategies.flower.rounds.config import NAME as ITERATIVE
from strategies.flower.rounds.config import IterativeConfig
from strategies.method import METHODS, Method, Need, Plan

PLAIN = "Clients train as usual and upload once"
COUNTS = "Clients send their label counts"
OTHER_TRAINING = "Clients train another model"
SHARED_BACKBONE = "Clients share a pretrained backbone"
ASKED_AGAIN = "Clients answer more than once"
SERVER_IMAGES = "The server has images"
ASSUMPTIONS = (PLAIN, COUNTS, OTHER_TRAINING, SHARED_BACKBONE, ASKED_AGAIN, SERVER_IMAGES)


@dataclass(frozen=True)
class Choice:
    """A value of the setting ``method``, as settings, lists and tables describe it.

    Attributes:
        title: Its name in the literature.
        kind: The kind of result, as the result table names it.
        uploads: The task of its clients.
        needs: Its requirements under every config.
        plan: Given a config, what a run involves.
        method: The server method; None for federated learning in rounds, where a strategy of Flower's form combines
            the clients' models.
    """

    name: str
    title: str
    source: str
    config: type
    kind: str
    uploads: str
    needs: frozenset[Need]
    plan: Callable[[Any], Plan]
    method: Method | None

    @classmethod
    def of(cls, method: Method) -> Choice:
        """Return a server method as a choice."""
        shared = {field.name: getattr(method, field.name) for field in fields(cls) if field.name != "method"}
        return cls(**shared, method=method)

    @property
    def asks_again(self) -> bool:
        """Whether its clients have work beside their uploads, of which it may take several rounds."""
        method = self.method
        return method is None or method.client_phase is not None or method.in_rounds.shares_generator is not None

    @property
    def assumption(self) -> str:
        """Its assumption on clients and server, one of :data:`ASSUMPTIONS`."""
        if Need.PROXY_IMAGES in self.needs:
            return SERVER_IMAGES
        if self.asks_again:
            return ASKED_AGAIN
        if self.uploads != CLASSIFIER:
            return SHARED_BACKBONE if self.uploads == STATISTICS else OTHER_TRAINING
        return COUNTS if Need.LABEL_COUNTS in self.needs else PLAIN

    @property
    def keys(self) -> set[str]:
        """The keys of its options, in shared tables too, and their former ones."""
        return keys_of(self.config, self.name)

    def titled(self, config: Any) -> str:
        """Return the title of the result in tables."""
        return config.title if self.method is None else self.method.titled(config)


IN_ROUNDS = Choice(
    name=ITERATIVE,
    title="Federated learning in rounds",
    source="McMahan et al., AISTATS 2017",
    config=IterativeConfig,
    kind="baseline",
    uploads=CLASSIFIER,
    needs=frozenset({Need.SAME_ARCHITECTURE}),
    plan=Always(Plan()),
    method=None,
)


class _Choices(Mapping[str, Choice]):
    """The server methods, each imported when it is first asked for, and federated learning in rounds."""

    def __getitem__(self, name: str) -> Choice:
        if name not in self:
            known = sorted(self)
            raise OptionError(f"unknown method {name!r}: known are {', '.join(known)}{meant(name, known)}")
        return IN_ROUNDS if name == ITERATIVE else Choice.of(METHODS[name])

    def __iter__(self) -> Iterator[str]:
        return iter((*METHODS, ITERATIVE))

    def __len__(self) -> int:
        return len(METHODS) + 1

    def __contains__(self, name: object) -> bool:
        return name in METHODS or name == ITERATIVE


CHOICES: Mapping[str, Choice] = _Choices()


def options_of(methods: Iterable[str]) -> set[str]:
    """Return the keys of all options that these methods have."""
    return {key for method in methods for key in CHOICES[method].keys}
