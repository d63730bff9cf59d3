"""The trainers of FENS's aggregator: the clients, round by round, or the server with its own labelled images."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..core import refusals
from ..core.bounds import Bound
from ..core.clients import Question
from ..core.errors import OptionError, QuorumError
from ..core.seeds import derive_seed
from ..uploads.packed import PackedMember, ensemble_digest, pack_member, to_wire
from .aggregator_steps import Sgd
from .aggregators import check_params, choose_aggregator, sum_votes, vote_counts

if TYPE_CHECKING:
    import torch

    from ..core.clients import Answer, Clients
    from ..method import Job
    from .aggregators import Params


# FedAdam in the variant of FENS: the server's step on the clients' parameter changes, in numpy alone.
#
# Reddi et al., *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2, https://arxiv.org/abs/2003.00295, as Allouah
# et al., *Revisiting Ensembling in One-Shot Federated Learning*, NeurIPS 2024, train their aggregators.
#
# ``flwr.serverapp.strategy.FedAdam`` is another variant. Delta, m, v, beta and tau are the same, but its rate is
# bias-corrected: in round t it is ``eta_s sqrt(1 - .99^(t+1)) / (1 - .9^(t+1))``. That is 0.74 eta_s in the first
# round, 0.47 eta_s about the twelfth, and within one per cent of eta_s only after 400, when most aggregators are
# done.
#
# Flower's variant weighs clients by a number that they report, not by the examples that their steps saw. It also
# works on Flower's messages in its own rounds; here the answers are validated arrays, and m and v go into a run's
# checkpoint.


Array = np.ndarray[Any, Any]
ENSEMBLE_PATIENCE = 10  # times the patience of a round: so long the first one waits for the ensemble to arrive


@dataclass(frozen=True)
class FedAdam:
    """The server's optimiser; its state between rounds is passed in and returned.

    Attributes:
        lr: The server's learning rate eta_s.
        beta_1: Decay of the mean m.
        beta_2: Decay of the mean square v.
    """

    lr: float
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3

    def start(self, params: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state before the first round: ``m.<name>`` and ``v.<name>`` of every parameter, all zero."""
        return {f"{moment}.{name}": np.zeros_like(value) for moment in "mv" for name, value in params.items()}

    def step(
        self,
        params: Mapping[str, Array],
        state: Mapping[str, Array],
        updates: Sequence[tuple[Mapping[str, Array], float]],
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the parameters and the state after a round.

        ``Delta = sum_i r_i (lambda_i - lambda)``, ``m <- .9 m + .1 Delta``, ``v <- .99 v + .01 Delta^2``,
        ``lambda <- lambda + eta_s m / (sqrt(v) + 1e-3)``. m and v start at zero and are not bias-corrected.

        Args:
            params: lambda, from which every client started.
            state: The state after the last round, or :meth:`start`; not changed.
            updates: Of every client that answered, its lambda_i and the number of examples that its steps saw
                (:meth:`.aggregator_steps.Sgd.seen`); these numbers, divided by their sum, are r_i.

        Raises:
            ValueError: There are no updates, their weights sum to 0, or one has another form or is not finite.
        """
        for update, _ in updates:
            check_params(params, update)
        total = sum(weight for _, weight in updates)
        if not total > 0:
            raise ValueError(f"the weights of {len(updates)} updates sum to {total}: must be greater than 0")
        moved: dict[str, Array] = {}
        kept: dict[str, Array] = {}
        for name, value in params.items():
            # In double precision, so that the order of clients does not change the result.
            start = value.astype(np.float64)
            delta = sum((weight * (update[name] - start) for update, weight in updates), np.zeros(())) / total
            m = self.beta_1 * state[f"m.{name}"] + (1 - self.beta_1) * delta
            v = self.beta_2 * state[f"v.{name}"] + (1 - self.beta_2) * delta**2
            moved[name] = (start + self.lr * m / (np.sqrt(v) + self.tau)).astype(value.dtype)
            kept |= {f"m.{name}": m.astype(value.dtype), f"v.{name}": v.astype(value.dtype)}
        return moved, kept


# The server's labelled images, where it trains an aggregator itself.


def require_labelled(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the server's labelled images.

    Raises:
        OptionError: It has none.
    """
    if job.labelled is None:
        raise OptionError(
            f"setting 'fens.aggregator' is {job.config.aggregator!r}, which is trained: without clients it needs a "
            "server with labelled images; else set 'average' or 'weighted'"
        )
    return job.labelled


ENSEMBLE_PHASE = "ensemble"
AGGREGATOR_PHASE = "aggregator"
# Inputs per forward pass of the ensemble.
BATCH = 256
# The square of a larger change would be infinite in FedAdam's state, and the parameters would never change again.
LARGEST = 1e9
MOST_EXAMPLES = 2**31  # of one client, where its upload reports no number
RESENDS = 2  # of the ensemble to a client that has lost its logits; one that keeps nothing would ask in every round


class Trainers(Protocol):
    """The holders of the examples that the aggregator is trained on."""

    @property
    def mib_per_client(self) -> float:
        """MiB that a client has sent and received so far, on average."""

    notes: list[str]  # notes on the trainers for the user, each line once

    def round(self, number: int, params: Params) -> list[tuple[Params, int]]:
        """Return each trainer's parameters after its steps, with the number of examples that its steps saw."""

    def votes(self) -> Array:
        """Return merged counts of votes [M, C, C]: member, true class, its vote."""


class Dialogue:
    """The clients as trainers: each receives the ensemble once, stores its logits, and does its steps in every round.

    Args:
        job: The job with its uploads; its config is a ``FensConfig``.

    Raises:
        QuorumError: Too few clients have stored the ensemble's logits.
    """

    def __init__(self, job: Job, clients: Clients) -> None:
        self._job, self._clients, self._config = job, clients, job.config
        # 0.28 of 25 is 7, even if floating point yields slightly more.
        self._quorum = max(1, math.ceil(job.config.quorum * len(job.uploads) - 1e-9))
        self._aggregator = choose_aggregator(job.config.aggregator, job.num_classes)
        self._sent, self._resent = False, Counter[str]()
        self._bound = Bound()
        self.notes = self._bound.notes

    @cached_property
    def _members(self) -> list[PackedMember]:
        # In int8 all members together take a quarter of the uploads' size.
        precision = self._config.precision
        return [
            pack_member(upload.architecture, upload.read(), precision=precision, ranges=upload.ranges)
            for upload in self._job.uploads
        ]

    @cached_property
    def _about(self) -> dict[str, Any]:
        return {
            "members": [member.digest for member in self._members],
            "architectures": [member.architecture for member in self._members],
            "sizes": [member.bytes for member in self._members],
            "precision": self._config.precision,
        }

    @cached_property
    def _ensemble(self) -> str:
        return ensemble_digest(self._about["members"])

    @property
    def mib_per_client(self) -> float:
        """MiB that a client has sent and received so far, on average."""
        return self._clients.mib_per_client

    def send(self, names: Collection[str] | None = None) -> None:
        """Send the ensemble to some clients, None for all; each receives only the members that it lacks.

        Clients that take longer than the patience join later, when they are ready. In a round the patience is that of
        the round, since the others wait.
        """
        offer = self._question("offer", self._about)
        config, quorum = self._config, self._quorum if names is None else 0
        patience = config.patience_s if names is not None else ENSEMBLE_PATIENCE * config.patience_s
        how: dict[str, Any] = {"phase": ENSEMBLE_PHASE, "patience_s": patience, "check": self._check_ensemble}
        self._resent.update(names or ())
        answers = self._clients.ask(
            offer if names is None else dict.fromkeys(sorted(names), offer), quorum=quorum, **how
        )
        lacking = {name: self._parcel(answer) for name, answer in answers.items() if "needs" in answer.facts}
        if lacking:
            self._clients.ask(lacking, quorum=max(0, quorum - (len(answers) - len(lacking))), **how)

    def round(self, number: int, params: Params) -> list[tuple[Params, int]]:
        """Ask every client for its steps of one round; a client without the ensemble receives it and is asked again.

        Args:
            number: The round, from 1.
            params: lambda, from which all clients start.
        """
        config = self._config
        facts = {"round": number, "steps": config.local_steps, "batch-size": config.batch_size, "lr": config.client_lr}
        answers = self._ask("round", facts, params, check=partial(self._check_round, number, params))
        sgd = Sgd(config.local_steps, config.batch_size, config.client_lr)
        ends = self._bound.apply(number, params, {client: answer.arrays for client, answer in answers.items()})
        seen = [sgd.seen(int(answer.facts["examples"])) for answer in answers.values()]
        return list(zip(map(dict, ends), seen, strict=True))

    def votes(self) -> Array:
        """Ask every client for its counts of votes, and return their sum [M, C, C]."""
        answers = self._ask("votes", {}, {}, check=self._check_votes)
        return sum_votes([answer.arrays["counts"] for answer in answers.values()])

    def _ask(self, step: str, facts: Mapping[str, Any], arrays: Params, check: Any) -> dict[str, Answer]:
        """Ask all clients; a client without the ensemble receives it and is asked once more."""
        if not self._sent:
            self.send()
            self._sent = True
        question = self._question(step, {"aggregator": self._aggregator.name, **facts}, arrays)
        how: dict[str, Any] = {"phase": AGGREGATOR_PHASE, "patience_s": self._config.patience_s, "check": check}
        answers = self._clients.ask(question, quorum=self._quorum, **how)
        if behind := {name for name, answer in answers.items() if _misses(answer)}:
            self.send(behind)
            answers |= self._clients.ask(dict.fromkeys(sorted(behind), question), **how)
        usable = {name: answers[name] for name in sorted(answers) if not _misses(answers[name])}
        if len(usable) < self._quorum:
            raise QuorumError(
                f"{AGGREGATOR_PHASE}: {len(usable)} clients have stored the ensemble's logits, {self._quorum} are "
                f"needed; check that the state folder of {', '.join(sorted(set(answers) - set(usable)))} is writable"
            )
        return usable

    def _question(self, step: str, facts: Mapping[str, Any], arrays: Params | None = None) -> Question:
        common = {
            "step": step, "ensemble": self._ensemble, "num-classes": self._job.num_classes,
            "holdout": self._config.holdout, "per-class": self._config.holdout_per_class,
            "sees-inputs": self._aggregator.kind == "torch",
        }  # fmt: skip
        return Question("fens", {**common, **facts}, arrays or {})

    def _parcel(self, answer: Answer) -> Question:
        """Return a message with the members that one client lacks."""
        arrays: Params = {}
        facts: dict[str, Any] = dict(self._about)
        for number in answer.facts["needs"]:
            more, layers = to_wire(number, self._members[number])
            arrays |= more
            facts |= layers
        return self._question("ensemble", facts, arrays)

    def _check_ensemble(self, answer: Answer) -> None:
        if (named := answer.facts.get("ensemble")) != self._ensemble:
            raise refusals.broken_rule(f"its answer is for ensemble {str(named)[:12]!r}", repr(self._ensemble[:12])).of(
                answer.client
            )
        needs, members = answer.facts.get("needs", []), set(range(len(self._members)))
        whole = {number for number in needs if type(number) is int} if isinstance(needs, list) else set()
        if not isinstance(needs, list) or len(whole) != len(needs) or whole - members:
            raise refusals.broken_rule(
                f"it requests members {str(needs)[:80]}", f"0 to {len(members) - 1}, each once"
            ).of(answer.client)

    def _lost(self, answer: Answer) -> bool:
        """Return whether a client has lost the ensemble's logits and may receive it again."""
        self._check_ensemble(answer)
        if _misses(answer) and self._resent[answer.client] >= RESENDS:
            raise refusals.lost_logits(RESENDS + 1).of(answer.client)
        return _misses(answer)

    def _check_round(self, number: int, params: Params, answer: Answer) -> None:
        if self._lost(answer):
            return
        if answer.facts.get("round") != number:
            raise refusals.broken_rule(f"its answer is for round {answer.facts.get('round')!r}", str(number)).of(
                answer.client
            )
        examples = answer.facts.get("examples")
        if type(examples) is not int or examples < 1:
            raise refusals.bad_size("examples", examples).of(answer.client)
        try:
            check_params(params, answer.arrays)
        except ValueError as error:
            raise refusals.client_error(error).of(answer.client) from error
        if any(np.abs(array).max(initial=0) > LARGEST for array in answer.arrays.values()):
            raise refusals.broken_rule(f"its parameters exceed {LARGEST:g}", "at most that large").of(answer.client)

    def _check_votes(self, answer: Answer) -> None:
        if self._lost(answer):
            return
        shape = (len(self._members), self._job.num_classes, self._job.num_classes)
        counts = answer.arrays.get("counts")
        if counts is None or counts.shape != shape or counts.dtype != np.int64 or counts.min() < 0:
            found = "missing" if counts is None else f"{counts.dtype}{list(counts.shape)}"
            raise refusals.broken_rule(f"counts is {found}", f"int64{list(shape)} from 0").of(answer.client)
        # A member votes once on each held example, and a client holds no more than it trained on.
        most = max((u.num_examples or MOST_EXAMPLES for u in self._job.uploads if u.client == answer.client), default=0)
        votes = counts.sum((1, 2), dtype=np.float64)
        if votes.min() != votes.max() or votes.max() > (most or MOST_EXAMPLES):
            raise refusals.broken_rule(
                f"counts has {votes.min():.0f} to {votes.max():.0f} votes of a member",
                f"as many of each, and at most {most or MOST_EXAMPLES}, one per example",
            ).of(answer.client)


class ServersImages:
    """The server with its own labelled images as the only trainer, which does the steps of one client."""

    mib_per_client = 0.0

    def __init__(self, job: Job) -> None:
        self._job = job
        self.notes: list[str] = []

    def round(self, number: int, params: Params) -> list[tuple[Params, int]]:
        """Do the local steps of one round."""
        from .aggregator_steps import round_steps

        inputs, logits, labels = self._seen
        config, seed = self._job.config, self._job.seed
        sgd = Sgd(config.local_steps, config.batch_size, config.client_lr)
        trained = round_steps(
            choose_aggregator(config.aggregator, self._job.num_classes).name,
            params,
            inputs=inputs,
            logits=logits,
            labels=labels,
            sgd=sgd,
            seed=derive_seed(seed, "fens", "server", number),
        )
        return [(trained, sgd.seen(len(labels)))]

    def votes(self) -> Array:
        """Count how each member labels the images of each class [M, C, C]."""
        _, logits, labels = self._seen
        return vote_counts(logits, labels)

    @cached_property
    def _seen(self) -> tuple[Array, Array, Array]:
        """Inputs [n, ch, H, W], the members' logits [M, n, C], and labels [n]."""
        import torch

        from ..method import EnsembleSpec
        from ..teacher.augment import Standardize, dequantize
        from .outcomes import build_ensemble

        job = self._job
        images, labels = require_labelled(job)
        inputs: torch.Tensor = Standardize(job.normalization)(dequantize(images))
        ensemble = build_ensemble(job, EnsembleSpec.of(job, "mean", precision=job.config.precision))
        with torch.no_grad():
            parts = [ensemble.member_logits(part.to(job.device)).cpu() for part in torch.split(inputs, BATCH)]
        return inputs.numpy(), torch.cat(parts, dim=1).numpy(), labels.numpy()


def _misses(answer: Answer) -> bool:
    return answer.facts.get("missing") is True
