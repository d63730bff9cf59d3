"""This app's clients as FENS needs them; only the messages that need torch and the data load them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from client_app.node import Node, TrainRequest, refuse
from fl_app.node_config import client_name
from fl_app.node_policy import FREE, NodePolicy
from strategies.client.fens import LocalFens, OwnModel
from strategies.client.holdout import HoldoutRequest
from strategies.core import refusals
from strategies.core.errors import UploadError

if TYPE_CHECKING:
    import torch

    from client_app.keeping import Trained
    from client_app.work import LocalExamples, State
    from fl_app.config import AppConfig


@dataclass(frozen=True)
class FensClient:
    """One client of this app, as FENS sees it."""

    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    policy: NodePolicy = FREE

    def local(self) -> LocalFens:
        """Return the functions and limits that :mod:`strategies.client.fens` takes."""
        return LocalFens(
            client=client_name(self.facts),
            examples=self._examples,
            build=self._build,
            own=self._load_own_model,
            state_dir=self._state_dir(),
            max_ensemble_mib=self._limit_mib(),
            refusal=self._refusal(),
            tells_counts=self.policy.tells_numbers,
        )

    def _limit_mib(self) -> float:
        """Return the largest model or ensemble that the client accepts, MiB; 0: any."""
        return float(self.facts.get("max-ensemble-mib", self.settings.get("client.max-ensemble-mib", 0.0)))

    def _refusal(self) -> str:
        try:
            self.policy.check_private(0.0)  # no answer of FENS carries noise
        except UploadError as error:
            return str(error)
        return ""

    def _state_dir(self) -> str:
        return self.policy.state_dir(str(self.settings.get("client.state-dir", "")))

    def _examples(self, holdout: HoldoutRequest) -> tuple[torch.Tensor, torch.Tensor]:
        from fl_app.data import normalize

        node, own = self._load_examples(holdout)
        if not node.has_data:
            raise refusals.no_part("the client has no examples")
        self._check_unchanged(holdout, own)
        data = own.split.take(own.held)
        return normalize(data.images, *own.split.normalization), data.labels

    def _build(self, architecture: str, holdout: HoldoutRequest) -> torch.nn.Module:
        from fl_app.models import build
        from fl_app.models.feature_heads import feature_builders
        from fl_app.models.features import FeatureFunction
        from strategies.core.facts import backbone_in, is_head

        self.policy.check_architecture(architecture)
        _, own = self._load_examples(holdout)
        classes = own.split.num_classes
        if holdout.num_classes != (known := 0 if self._config().model.train else classes):
            raise refusals.bad_request("num-classes", holdout.num_classes, str(known))
        if not is_head(architecture):
            return build(architecture, num_classes=classes, input_shape=own.split.input_shape)
        config = self._config()
        self.policy.check_backbone(backbone_in(architecture), config.features.weights)
        function = FeatureFunction(config.features, config.seed, *own.split.normalization)
        return feature_builders([architecture], function, holdout.num_classes)[architecture]()

    def _load_own_model(self, holdout: HoldoutRequest) -> OwnModel | None:
        kept = self._load_kept(holdout)
        return None if kept is None else OwnModel(kept[0].facts.architecture, kept[1], kept[0].facts.ranges)

    def _load_kept(self, holdout: HoldoutRequest) -> tuple[Trained, State] | None:
        from client_app.keeping import KeptModel

        return KeptModel(self._state_dir(), holdout.run_id, client_name(self.facts), 1).load()

    def _check_unchanged(self, holdout: HoldoutRequest, own: LocalExamples) -> None:
        """Refuse examples that came or went since the upload: another draw of them holds out what the model knows."""
        from client_app.attacking import exaggerate_claims

        if (kept := self._load_kept(holdout)) is None:
            return
        facts = kept[0].facts
        now = exaggerate_claims(replace(facts, label_counts=own.label_counts), self._config().attack)
        if now.label_counts != facts.label_counts:
            raise refusals.no_part(
                "the client's examples changed since its upload, so its model may know those that it would hold out"
            )

    def _load_examples(self, holdout: HoldoutRequest) -> tuple[Node, LocalExamples]:
        import torch

        from client_app.work import load_examples

        torch.set_num_threads(1)
        config = self._config()
        refuse(config.privacy, "answers on held-out examples")
        node = Node.of(self.facts, config, self.policy)
        request = TrainRequest(holdout.run_id, 1, holdout.seed, holdout.share, holdout.per_class)
        request = replace(request, test_share=holdout.test_share, expected=holdout.expected)
        return node, load_examples(config, node, request)

    def _config(self) -> AppConfig:
        from fl_app.config import AppConfig

        return AppConfig.from_settings(dict(self.settings))
