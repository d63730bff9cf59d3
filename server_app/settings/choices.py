"""The choices of the setting ``method``: the server methods, and federated learning in rounds."""

from __future__ import annotations

from strategies.core.facts import STATISTICS
from strategies.core.registry import Registry
from strategies.method import METHODS, Method, Need
from strategies.rounds.config import FederatedRounds

Choice = Method | FederatedRounds
CHOICES: Registry[Choice] = Registry("method", {**METHODS.homes, "iterative": "rounds.config:FEDERATED"})
PLAIN = "Clients train and upload as ever"
COUNTS = "Clients send their label counts"
OTHER_TRAINING = "Clients train something else"
SHARED_BACKBONE = "Clients share a pretrained backbone"
ASKED_AGAIN = "Clients are asked again"
SERVER_IMAGES = "The server has images"
ASSUMPTIONS = (PLAIN, COUNTS, OTHER_TRAINING, SHARED_BACKBONE, ASKED_AGAIN, SERVER_IMAGES)


def asks_again(method: Choice) -> bool:
    """Return whether a method has work for its clients beside their uploads, of which it may take several rounds."""
    return isinstance(method, FederatedRounds) or method.fit_with is not None or method.lends is not None


def assumption_of(method: Choice) -> str:
    """Return the assumption of a method on clients and server, one of :data:`ASSUMPTIONS`."""
    if isinstance(method, FederatedRounds):
        return ASKED_AGAIN
    if Need.PROXY_IMAGES in method.needs:
        return SERVER_IMAGES
    if asks_again(method):
        return ASKED_AGAIN
    if method.uploads != "classifier":
        return SHARED_BACKBONE if method.uploads == STATISTICS else OTHER_TRAINING
    return COUNTS if Need.LABEL_COUNTS in method.needs else PLAIN
