"""The choices of the setting ``method``: the server methods, and federated learning in rounds."""

from __future__ import annotations

from strategies.core.registry import Registry
from strategies.method import METHODS, Method
from strategies.rounds.config import FederatedRounds

Choice = Method | FederatedRounds
CHOICES: Registry[Choice] = Registry("method", {**METHODS.homes, "iterative": "rounds.config:FEDERATED"})
