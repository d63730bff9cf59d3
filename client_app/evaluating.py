"""A client's own test examples and models, for the evaluation of a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from client_app.fens import FensClient
from client_app.node import refuse
from fl_app.node_config import client_name
from fl_app.project import own_scores, scores_in
from strategies.client.evaluation import LocalEvaluation, OwnExamples, Scoring
from strategies.client.holdout import HoldoutRequest
from strategies.core import refusals
from strategies.core.clients import read_float, read_int, read_test_share
from strategies.core.errors import UploadError
from strategies.core.facts import CLASSIFIER, EXPECTED, in_percent, kind_of, read_agreement
from strategies.core.scan import LOG

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class EvaluatingClient(FensClient):
    """One client of this app, as :mod:`strategies.client.evaluation` sees it."""

    def side(self) -> LocalEvaluation:
        """Return its side of an evaluation."""
        asked: list[HoldoutRequest] = []

        def examples(facts: Mapping[str, Any]) -> OwnExamples:
            asked.append(holdout_of(facts))
            return self._test_examples(asked[-1])

        def scorer(facts: Mapping[str, Any]) -> Scoring:
            asked.append(holdout_of(facts))
            return self._scorer(asked[-1])

        return LocalEvaluation(
            client=client_name(self.facts),
            examples=examples,
            build=lambda architecture: self._build(architecture, asked[-1]),
            own=lambda facts: self._own(holdout_of(facts)),
            state_dir=self._state_dir(),
            max_mib=self._limit_mib(),
            min_examples=self.policy.min_test_examples,
            share=self.policy.share,
            refusal=self._refused(),
            scorer=scorer if self._config().model.evaluate else None,
        )

    def _refused(self) -> str:
        if not self.policy.may_evaluate:
            return str(refusals.evaluation_not_permitted())
        try:  # the sums carry no noise, so a privacy budget excludes them
            self.policy.check_private(0.0)
            refuse(self._config().privacy, "scores on test examples")
        except UploadError as error:
            return str(error)
        return ""

    def _test_examples(self, holdout: HoldoutRequest) -> OwnExamples:
        from fl_app.data import normalize

        node, own = self._load_examples(holdout)
        if not node.has_data or not len(own.test):
            raise refusals.too_few_test_examples(self.policy.min_test_examples)
        self._check_unchanged(holdout, own)
        data, groups = own.tested.take(own.test), own.tested.groups
        return OwnExamples(
            normalize(data.images, *own.split.normalization),
            data.labels,
            own.split.num_classes,
            own.split.classes,
            None if groups is None else groups[own.test].numpy(),
        )

    def _scorer(self, holdout: HoldoutRequest) -> Scoring:
        """Return the number of test examples, and the user's own function on them."""
        node, own = self._load_examples(holdout)
        self._check_unchanged(holdout, own)
        name = self._config().model.evaluate
        self.policy.check_code("model.evaluate", name)
        with self.policy.reading(f"model.evaluate {name!r}"):
            function, data = own_scores(name), own.tested.pairs(own.test)

        def score(model: torch.nn.Module) -> Mapping[str, float]:
            with self.policy.reading(f"model.evaluate {name!r}"):
                found = scores_in(function(model, data), f"model.evaluate {name!r}", LOG.warning)
            return {key: value / 100 if in_percent(key) else value for key, value in found.items()}

        return len(data) if node.has_data else 0, score

    def _own(self, holdout: HoldoutRequest) -> torch.nn.Module | None:
        own = self._load_own_model(holdout)
        if own is None or kind_of(own.architecture) != CLASSIFIER:
            return None  # sums of features, say, predict nothing by themselves
        model = self._build(own.architecture, holdout)
        model.load_state_dict(dict(own.state))
        return model


def holdout_of(facts: Mapping[str, Any]) -> HoldoutRequest:
    """Return which examples a question is about."""
    return HoldoutRequest(
        run_id=str(facts.get("run-id", "")),
        seed=read_int(facts, "seed", 0),
        share=read_float(facts, "holdout", 0.0),
        per_class=bool(facts.get("per-class", False)),
        num_classes=read_int(facts, "num-classes", 0),
        test_share=read_test_share(facts),
        expected=read_agreement(facts, EXPECTED),
    )
