"""The surroundings of a strategy during a call: some nodes, seeded random states, a quiet log."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging import WARNING

import numpy as np
from flwr.common.logger import FLOWER_LOGGER
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from ..core.errors import OptionError, QuorumError
from ..core.seeds import derive_seed, seeded_torch

# Flower's strategies look twice when they choose; one that looks this often waits for nodes that are missing.
LOOKS_MOST = 10
# They add noise to what the strategy inside returns.
NOISY = (
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)


class ShownNodes:
    """Flower's grid, as far as a strategy reads it to choose clients.

    Args:
        nodes: The nodes, in the order of their clients' names.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes, self._looks = list(nodes), 0

    def get_node_ids(self) -> list[int]:
        """Return the nodes.

        Raises:
            QuorumError: The strategy waits for more nodes; it would wait forever.
        """
        self._looks += 1
        if self._looks > LOOKS_MOST:
            raise QuorumError(
                f"the strategy waits for more clients than the {len(self._nodes)} that are connected: must be to "
                "ask for fewer. The run can be resumed"
            )
        return list(self._nodes)

    def get_nodes(self) -> list[NodeInfo]:
        """Return the nodes in Flower's form, with their ids alone."""
        return [NodeInfo(node_id=node) for node in self.get_node_ids()]


@contextmanager
def seeded_strategy(seed: int, *path: str | int) -> Iterator[None]:
    """Seed the global random states of Python, numpy and torch for a block, and silence Flower's lines of every round.

    Flower draws its clients from Python's state, other strategies noise from numpy's or torch's. All are restored.
    """
    before, numbers, level = random.getstate(), np.random.get_state(), FLOWER_LOGGER.level
    drawn = derive_seed(seed, *path)
    random.seed(drawn)
    np.random.seed(drawn % 2**32)
    FLOWER_LOGGER.setLevel(WARNING)
    try:
        with seeded_torch(seed, *path):
            yield
    finally:
        FLOWER_LOGGER.setLevel(level)
        random.setstate(before)
        np.random.set_state(numbers)


def within(strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield a strategy and, at any depth, the strategies inside it, each with its attribute path and a dot."""
    seen, waiting = {id(strategy)}, [("", strategy)]
    while waiting:
        path, holder = waiting.pop(0)
        yield path, holder
        for name, value in vars(holder).items():
            if isinstance(value, Strategy) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((f"{path}{name}.", value))


def refuse_noise_around(strategy: Strategy) -> None:
    """Refuse to work for one of Flower's wrappers for privacy: a run folder would keep what has no noise.

    A strategy does not know what is around it, but its callers are on the stack.

    Raises:
        OptionError: One of the callers is such a wrapper.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(caller := frame.f_locals.get("self"), NOISY):
            raise OptionError(
                f"{type(caller).__name__} around {type(strategy).__name__} adds its noise to result.arrays alone: the "
                "run folder keeps the uploads and the result without it. Must be noise on the clients "
                "(flwr.clientapp.mod.LocalDpMod), or the wrapper around Flower's FedAvg"
            )
        frame = frame.f_back
