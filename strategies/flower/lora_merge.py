"""LoRA adapters of Flower's clients as one: a FedAvg that averages the updates B A, or merges them by another rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import signature
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from ..core.errors import OptionError, QuorumError, UploadError, one_line
from ..core.facts import ADAPTER, UNKNOWN_SHAPE, Upload, UploadFacts, default_normalization
from ..core.names import is_adapter_state, match_names
from ..core.seeds import derive_seed
from ..merging.adapters import describe_merge
from ..method import METHODS, Job, Silent
from ..uploads.builders import choose_config
from ..uploads.checks import check_arrays
from ..weights.adapters import Adapter, clean_names, cut_adapter, plain_config
from .arguments import refuse_argument
from .evaluation import mean_of_scores
from .messages import array_form
from .nodes import cause_of_failure

_AVERAGE = {"average": "fedavg"}


class LoRAMerge(FedAvg):
    """FedAvg for clients that fine-tune LoRA adapters; Flower's own averages A and B, whose product is another matrix.

    The clients' replies hold what PEFT's ``get_peft_model_state_dict`` returns, and the server's ``initial_arrays`` the
    same of its own model. The result of a round is the exact merge of the updates, cut to the rank of the clients'
    adapters, because their models take no other. The metric ``lost-share`` is what the cut loses: the norm of the lost
    update as a share of the update's norm. The exact merge is written to ``folder``. Clients whose arrays are not those
    that the server sent, or not finite, are left out, with a line in the log.

    Args:
        rule: ``"average"``, or a method that merges the weights of any model, such as ``"ties"``.
        config: The method's config; None for its defaults.
        folder: Where PEFT's folder of the exact merge, with the sum of the clients' ranks, is written after each round;
            None for nowhere.
        peft_config: The ``LoraConfig`` of the clients, or its dict; needed by ``folder``.
        seed: Of draws, which DARE makes.
        fedavg: Arguments of Flower's FedAvg, such as ``fraction_train``.

    Raises:
        OptionError: There is no such rule or argument, or ``folder`` lacks the config.
    """

    def __init__(
        self,
        rule: str = "average",
        *,
        config: Any = None,
        folder: str | Path | None = None,
        peft_config: Any = None,
        seed: int = 0,
        **fedavg: Any,
    ) -> None:
        method = METHODS[_AVERAGE.get(rule, rule)]
        if not method.merges_weights_alone:
            known = [
                *_AVERAGE,
                *(name for name, each in METHODS.items() if each.merges_weights_alone and name != "fedavg"),
            ]
            raise OptionError(f"rule is {rule!r}: must be one of {', '.join(known)}")
        if folder is not None and peft_config is None:
            raise OptionError("folder needs peft_config, the LoraConfig of the clients")
        for name in fedavg.keys() - signature(FedAvg).parameters.keys():
            refuse_argument(type(self).__name__, name)
        super().__init__(
            **{"train_metrics_aggr_fn": mean_of_scores, "evaluate_metrics_aggr_fn": mean_of_scores, **fedavg}
        )
        self.method, self.config, self.seed = method, choose_config(config, method), seed
        self.folder = None if folder is None else Path(folder).absolute()
        self.peft_config = None if peft_config is None else plain_config(peft_config)
        self._sent, self._merged = ArrayRecord(), False

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the clients as FedAvg does, and keep what they are sent.

        Raises:
            OptionError: These are no LoRA factors.
        """
        if not is_adapter_state(arrays):
            raise OptionError(
                "initial_arrays hold no lora_A and lora_B: must be ArrayRecord(get_peft_model_state_dict(model))"
            )
        self._sent = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the clients' adapters; without a usable one there are no arrays.

        Raises:
            QuorumError: No round has had a usable answer, so that the run would end without arrays.
        """
        valid, failed = self._check_and_log_replies(map(self._by_own_names, replies), is_train=True)
        sent = self._sent.to_torch_state_dict()
        uploads, taken, causes = [], [], [cause_of_failure(each) for each in failed]
        for message in sorted(valid, key=lambda each: each.metadata.src_node_id):
            try:
                uploads.append(self._upload(message))
                taken.append(message.content)
            except UploadError as error:
                log(WARNING, "left out: %s", error)
                causes.append(str(error))
        if not uploads and not self._merged:
            why = "; ".join(sorted(set(causes))[:2]) or "none answered"
            raise QuorumError(f"no client sent an adapter: {why}")
        if not uploads:
            return None, None
        self._merged = True
        start = Adapter("the start", clean_names(sent), self.peft_config)
        job = Job(
            tuple(uploads), {}, ADAPTER, 0, UNKNOWN_SHAPE, default_normalization(UNKNOWN_SHAPE), self.config,
            seed=derive_seed(self.seed, "round", server_round), start=start.to_state(), clients_seed=self.seed,
        )  # fmt: skip
        notes = _Notes()
        outcome = self.method.fit(job, notes)
        merged = Adapter.of_state("the merged adapter", outcome.student or {})
        if self.folder is not None and (described := describe_merge(self.method.name, job, outcome)) is not None:
            described.save(self.folder)
        if self.peft_config is not None:
            merged = cut_adapter(merged, like=start)
            notes.lost_share = merged.lost_share
        metrics = self.train_metrics_aggr_fn(taken, self.weighted_by_key)
        metrics["lost-share"] = notes.lost_share
        log(INFO, "merged %d adapters; the cut of the rank loses %.2f %%", len(uploads), 100 * notes.lost_share)
        names = zip(sent, start.tensors, strict=True)
        return ArrayRecord({key: merged.tensors[own].to(sent[key].dtype) for key, own in names}), metrics

    def _by_own_names(self, message: Message) -> Message:
        """Return a reply with its arrays under the names that were sent, which what wraps a model may have changed."""
        if message.has_error() or len(message.content.array_records) != 1:
            return message
        key, record = next(iter(message.content.array_records.items()))
        try:
            names = match_names(record, self._sent)
        except UploadError:  # the check of the arrays says more
            return message
        if names.notes and not (names.missing or names.extra or names.counters):
            message.content[key] = ArrayRecord({own: record[found] for own, found in names.sources.items()})
            for note in names.notes:
                log(INFO, "adapter of node-%d: %s", message.metadata.src_node_id, one_line(note))
        return message

    def _upload(self, message: Message) -> Upload:
        """Return a reply as an upload."""
        client = f"node-{message.metadata.src_node_id}"
        record = next(iter(message.content.array_records.values()))
        signature = {key: (tuple(array.shape), array.dtype) for key, array in self._sent.items()}
        try:
            arrays = check_arrays(record, ADAPTER, signature, array_form(self.arrayrecord_key))
        except UploadError as error:
            raise error.of(client) from error
        tensors = clean_names({key: torch.from_numpy(value) for key, value in arrays.items()})
        metrics: Mapping[str, Any] = next(iter(message.content.metric_records.values()))
        state = Adapter(client, tensors, self.peft_config).to_state()
        facts = UploadFacts(client, ADAPTER, metrics[self.weighted_by_key])
        return Upload(facts, lambda: dict(state))


class _Notes(Silent):
    """Keeps what the cut of the rank loses."""

    lost_share = 0.0

    def record(self, row: Mapping[str, Any]) -> None:
        """Take the share from a row of metrics."""
        self.lost_share = float(row.get("lost_share", self.lost_share))
