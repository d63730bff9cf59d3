"""The steps of one trainer in one round of FENS, for every form of aggregator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.seeds import derive_seed, seeded_torch
from .aggregators import AGGREGATORS, TORCH_ONLY, Params, check_params

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sgd:
    """The schedule of a client's steps.

    Attributes:
        steps: K per round, from 1.
        batch_size: B examples per step, from 1.
        lr: The learning rate eta_l; there is no momentum and no weight decay.
    """

    steps: int
    batch_size: int
    lr: float

    def seen(self, count: int) -> int:
        """Return ``min(n_i, K B)``, the number of examples that a client sees in a round: the weight of its update."""
        return min(count, self.steps * self.batch_size)

    def batches(self, count: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the examples of each of K steps: shuffled, without replacement, reshuffled after each epoch.

        The last batch of an epoch holds the remainder, so that it can be smaller.

        Args:
            count: n_i, from 1.
        """
        rng = np.random.default_rng(derive_seed(seed, "batches"))
        per_epoch = -(-count // self.batch_size)
        for step in range(self.steps):
            if step % per_epoch == 0:
                order = rng.permutation(count)
            first = step % per_epoch * self.batch_size
            yield order[first : first + self.batch_size]


def local_steps(
    aggregator: str, params: Mapping[str, Array], *, logits: Array, labels: Array, sgd: Sgd, seed: int
) -> dict[str, Array]:
    """Return the parameters after K steps ``lambda_i <- lambda_i - eta_l grad CE(agg(lambda_i, Z), y)``.

    Allouah et al., NeurIPS 2024, Algorithm 1, the clients' part of phase 2.

    Args:
        params: lambda, float32; not changed.
        logits: Z, of every member on every held example, float32 [M, n_i, C].
        labels: y, int64 [n_i], in [0, C).

    Raises:
        KeyError: There is no such aggregator.
        ValueError: There are no examples, or the aggregator is not trained in numpy.
    """
    if len(labels) == 0:
        raise ValueError("no examples to train the aggregator on")
    trained, lr = dict(params), np.float32(sgd.lr)
    for batch in sgd.batches(len(labels), seed):
        _, gradients = AGGREGATORS[aggregator].gradient(trained, logits[:, batch], labels[batch])
        trained = {name: value - lr * gradients[name] for name, value in trained.items()}
    return trained


def round_steps(
    aggregator: str, params: Mapping[str, Array], *, inputs: Array, logits: Array, labels: Array, sgd: Sgd, seed: int
) -> Params:
    """Return the parameters after the K steps of one trainer.

    Args:
        params: lambda, float32.
        inputs: The members' input, float32 [n, ...]; only an aggregator with a gate reads it, and needs torch.
        logits: Of the members, float32 [M, n, C].
        labels: int64 [n].

    Raises:
        KeyError: There is no such aggregator.
        OptionError: It has a gate, and the inputs are no images.
        ValueError: It is not trained, its parameters do not fit the logits, or there are no examples.
    """
    check_params(_fit_to_logits(aggregator, params, inputs, logits), params)
    if aggregator in TORCH_ONLY:
        return gate_steps(params, inputs=inputs, logits=logits, labels=labels, sgd=sgd, seed=seed)
    return local_steps(aggregator, params, logits=logits, labels=labels, sgd=sgd, seed=seed)


def hidden_units(params: Mapping[str, Array]) -> int:
    """Return the hidden units k of an aggregator's parameters; 0 if they have no hidden layer."""
    return params["bias1"].size if "bias1" in params else 0


def _fit_to_logits(aggregator: str, given: Mapping[str, Array], inputs: Array, logits: Array) -> Params:
    """Return parameters of the names and shapes that fit the logits; hidden units and the gate's form are as given."""
    entry, (members, _, classes) = AGGREGATORS[aggregator], logits.shape
    if entry.kind == "trained":
        return entry.start(None, members=members, classes=classes, hidden=hidden_units(given))
    if entry.kind != "torch":
        raise ValueError("it is not trained by gradients")
    from .gate import start_gate

    per_class = "layer3_bias" in given and given["layer3_bias"].size == members * classes
    return start_gate(None, members=members, classes=classes, input_shape=inputs.shape[1:], per_class=per_class)


def gate_steps(
    params: Mapping[str, Array], *, inputs: Array, logits: Array, labels: Array, sgd: Sgd, seed: int
) -> dict[str, Array]:
    """Return the gate's parameters after K steps; :func:`local_steps` trains the other forms.

    Args:
        params: lambda, float32; not changed.
        inputs: x, the members' normalised input, float32 [n_i, ch, H, W].
        logits: Z, of every member on every held example, float32 [M, n_i, C].
        labels: y, int64 [n_i], in [0, C).

    Raises:
        ValueError: There are no examples.
    """
    import torch  # the other aggregators are trained on clients without torch
    import torch.nn.functional as F

    from .gate import mixture

    if len(labels) == 0:
        raise ValueError("no examples to train the aggregator on")
    weights = {name: torch.tensor(value).requires_grad_() for name, value in params.items()}
    with seeded_torch(seed, "dropout"):
        for batch in sgd.batches(len(labels), seed):
            z, x, y = (torch.from_numpy(part) for part in (logits[:, batch], inputs[batch], labels[batch]))
            loss = F.cross_entropy(mixture(weights, z, x, dropout=True), y)
            gradients = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for value, gradient in zip(weights.values(), gradients, strict=True):
                    value -= sgd.lr * gradient
    return {name: value.detach().numpy() for name, value in weights.items()}
