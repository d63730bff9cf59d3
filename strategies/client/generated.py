"""FedGen's local training: two terms on the outputs of the server's generator, beside the loss of a batch.

Paper: Zhu, Hong, Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021,
    https://arxiv.org/abs/2105.10056; FedGen* is its form in the input space by Zhang et al., CVPR 2022. See
    :mod:`strategies.methods.fed_gen` for the read version and the server's part.
Where: b_g/b gamma_t mean NLL(f(G(y~)), y~) + gamma_t KL(sm f(G(y)) || sm f(x)) -> GeneratedExamples.penalty.
Deviations: on generated images (FedGen*) batch normalisation normalises by the batch, as on real ones. Its running
    statistics stay those of the real images, which the model is tested on. The published code draws y~ from the union
    of all clients' labels; here the draw includes classes without any example at any client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..core import refusals
from ..core.clients import read_int
from ..core.errors import OptionError
from ..core.seeds import generator, seeded_torch
from ..distillation.generator_spec import GeneratorSpec, draw_noise
from ..distillation.losses import cross_entropy, soft_kl
from ..teacher.heads import last_linear


class GeneratedExamples:
    """FedGen's terms: they bring the generator's knowledge of the other clients' classes into this client's loss.

    The generator stays as the server sent it. Its examples need labels. The first term draws them uniformly from all
    classes, so that it teaches those that this client lacks; the second takes the batch's own.

    Args:
        client: The client's name; with the round and the request's ``seed`` it determines all draws.
        server_round: The round, from 1.
        label_counts: The client's examples per class [C], whose sum ends the generator's epochs; None: the terms last
            for the whole round.

    Raises:
        UploadError: The request holds no valid generator, or one that does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        said: Mapping[str, Any],
        sent: Mapping[str, Tensor],
        *,
        client: str,
        server_round: int,
        label_counts: Sequence[int] | None = None,
    ) -> None:
        self.spec = GeneratorSpec.read(said)
        self._head = _head_of(model, self.spec) if self.spec.level == "features" else None
        self._generator = _generator(model, self.spec, self._head, sent)
        self._rng = generator(read_int(said, "seed", 0), "generated", client, server_round)
        counts = list(label_counts or ())
        self._most = self.spec.epochs * sum(counts) if counts else float("inf")
        self._seen, self._size, self._full = 0, 0, 0

    def penalty(self, model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        """Return both terms, a scalar; 0 once the epochs with a generator are over.

        Args:
            model: The model in training; its gradient flows through the first term and through ``logits``.
            logits: f(x) [B, C] of the batch.
            labels: Its classes [B].

        Raises:
            UploadError: The generator has another number of classes than the model.
        """
        spec = self.spec
        if self._seen >= self._most:
            return logits.new_zeros(())
        if logits.shape[1] != spec.classes:
            raise refusals.bad_generator(f"has {spec.classes} classes, this client's model has {logits.shape[1]}")
        # b is the size of a full batch: the first batch of an epoch is full, the last may be smaller.
        self._size, self._full = len(labels), self._full or len(labels)
        drawn = torch.randint(spec.classes, (spec.batch,), generator=self._rng).to(labels.device)
        with torch.no_grad():
            examples, others = self._make(drawn), self._make(labels)
            target = self._judge(model, others)
        classified = cross_entropy(self._judge(model, examples), drawn)
        return spec.weight * (spec.batch / self._full * classified + soft_kl(logits, target))

    def step(self) -> None:
        """Count the batch of the last :meth:`penalty` as trained on."""
        self._seen += self._size

    def _make(self, labels: Tensor) -> Tensor:
        noise = draw_noise(self.spec.noise, len(labels), self.spec.latent, self._rng)
        made: Tensor = self._generator(noise.to(labels.device), labels)
        return made

    def _judge(self, model: nn.Module, examples: Tensor) -> Tensor:
        """Return the model's logits of generated examples, and leave its buffers unchanged."""
        layer = model if self._head is None else model.get_submodule(self._head)
        buffers = {name: value.clone() for name, value in layer.named_buffers()}
        logits: Tensor = functional_call(layer, buffers, (examples,))
        return logits


def _head_of(model: nn.Module, spec: GeneratorSpec) -> str:
    """Return the name of the model's last linear layer."""
    try:
        name, head = last_linear(model)
    except OptionError as error:
        raise refusals.bad_generator(f"makes features, but {error}") from error
    if head.out_features != spec.classes:
        raise refusals.bad_generator(f"has {spec.classes} classes, this client's last layer has {head.out_features}")
    return name


def _generator(model: nn.Module, spec: GeneratorSpec, head: str | None, sent: Mapping[str, Tensor]) -> nn.Module:
    """Return the server's generator, frozen, on the model's device."""
    features = int(model.get_submodule(head).in_features) if head is not None else 0  # type: ignore[arg-type]
    try:
        # Shapes first, without memory: a false description could ask for gigabytes.
        with torch.device("meta"):
            wanted = _signature(spec.build(features).state_dict().items())
    except OptionError as error:
        raise refusals.bad_generator(f"cannot be built: {error}") from error
    if _signature(sent.items()) != wanted:
        raise refusals.other_shapes("generator has", "its description")
    if not all(bool(value.isfinite().all()) for value in sent.values()):
        raise refusals.not_finite("the server's generator")
    with seeded_torch(0, "generator"):  # the fresh weights are overwritten; the caller's random state must not move
        found = spec.build(features)
    found.load_state_dict(dict(sent))
    place = next(iter(model.parameters())).device
    return found.requires_grad_(False).eval().to(place)


def _signature(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors}
