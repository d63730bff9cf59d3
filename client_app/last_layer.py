"""A client's sums of the inputs of a model's last linear layer, of which the server solves that layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from client_app.attacking import poison
from client_app.evaluating import holdout_of
from client_app.fens import FensClient
from client_app.node import check_shares_counts, refuse
from client_app.training.features import check_enough
from fl_app.data import normalize
from strategies.client.measures import sum_inputs
from strategies.core import refusals
from strategies.core.durable import MIB
from strategies.core.processor import flush_subnormals

if TYPE_CHECKING:
    from client_app.work import State

BATCH = 128


@dataclass(frozen=True)
class SummingClient(FensClient):
    """One client of this app, as it sums features."""

    @flush_subnormals()
    def sums(self, said: Mapping[str, Any], sent: State) -> State:
        """Return the sums over the examples that this client trains on.

        Args:
            said: The question: "architecture", "num-classes", "run-id", "seed", "test-share".

        Raises:
            OneShotError: The node does not permit it, has too few examples, or the model does not fit.
        """
        config, holdout = self._config(), holdout_of(said)
        refuse(config.privacy, "sums of a last layer's inputs")
        self.policy.check_private(0.0)
        check_shares_counts(
            config.client, self.policy, what="sums of features, which start=ridge and finish=ridge need"
        )
        if 0 < (limit := self._limit_mib()) < (size := sum(value.nbytes for value in sent.values()) / MIB):
            raise refusals.beyond_limit("the model is", size, limit)
        architecture = str(said.get("architecture", ""))
        model = self._build(architecture, holdout)
        try:
            model.load_state_dict(sent)
        except RuntimeError as error:
            raise refusals.misfit_weights("the server's model", architecture, error) from error
        node, own = self._load_examples(holdout)
        if not node.has_data:
            raise refusals.no_part("the client has no examples")
        check_enough(len(own.train), config.features.min_examples, node.client)
        classes = own.split.num_classes
        data = poison(
            own.split.take(own.train), config.attack, client=node.client, num_classes=classes, seed=holdout.seed
        )
        places = torch.split(torch.arange(len(data.labels)), BATCH)
        batches = ((normalize(data.images[part], *own.split.normalization), data.labels[part]) for part in places)
        return sum_inputs(model, batches, classes)
