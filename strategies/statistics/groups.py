"""Mixed federations: the sums of all clients with one feature function become one member of an ensemble, a head.

The head is ridge regression's, with lambda chosen by leaving its clients out. Scores of a regression are smaller than a
net's logits, and an ensemble adds up both. So they are centred over the classes and scaled to the size of a net's. The
other members see the head as one upload, with the summed examples of its clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..core.errors import OptionError
from ..core.facts import GRAM, STATISTICS, Upload, UploadFacts, backbone_in, is_head, kind_of
from ..core.fingerprint import short_fingerprint
from ..core.seeds import seeded_torch
from .choice import choose_penalty
from .heads import Head, Ridge
from .sums import Statistics
from .uploaded import ClientSumsOnServer

if TYPE_CHECKING:
    from ..core.facts import State
    from ..method import Job, ModelBuilder

# Root mean square of centred logits over a member's own examples: nets of 30 epochs have 5 to 7 on held-out digits.
SIZE = 5.0


def with_heads(job: Job, log: Callable[[str], None] = lambda _: None) -> Job:
    """Return the job in which the sums of each feature function are one upload, the head that they lead to.

    Args:
        job: With its uploads; without sums it is returned as it is.
        log: Takes a line for the user per group.

    Raises:
        OptionError: Sums carry noise or have no Gram matrix, or no architecture is the head of their function.
    """
    groups: dict[bytes, list[Upload]] = {}
    for upload in job.uploads:
        if kind_of(upload.architecture) == STATISTICS:
            groups.setdefault(bytes(upload.read()["fingerprint"].tolist()), []).append(upload)
    if not groups:
        return job
    rest = [upload for upload in job.uploads if kind_of(upload.architecture) != STATISTICS]
    heads, taken = _heads_of(job.builders), {upload.client for upload in rest}
    for fingerprint, group in groups.items():
        if fingerprint not in heads:
            reported = short_fingerprint(torch.tensor(list(fingerprint), dtype=torch.uint8))
            raise OptionError(
                f"the sums of {group[0].client} have fingerprint {reported}: must be that of a head among the "
                "architectures"
            )
        member = _solve_group(group, heads[fingerprint], taken, seed=job.seed)
        taken.add(member.client)
        rest.append(member)
        log(f"{member.client} is one member of the ensemble, from the sums of {', '.join(one.client for one in group)}")
    return replace(job, uploads=tuple(sorted(rest, key=lambda upload: upload.client)))


def _heads_of(builders: Mapping[str, ModelBuilder]) -> dict[bytes, str]:
    """Return fingerprint -> the head's architecture."""
    found = {}
    for name in filter(is_head, builders):
        with seeded_torch(0, "fingerprint"):
            state = builders[name]().state_dict()
        found[bytes(state["fingerprint"].tolist())] = name
    return found


def _solve_group(group: list[Upload], architecture: str, taken: set[str], *, seed: int) -> Upload:
    clients = ClientSumsOnServer(group)
    if any(clients.noises()):
        raise OptionError(f"the sums of {group[0].client} carry noise: must be exact where they join an ensemble")
    if GRAM not in group[0].read():
        raise OptionError(f"the sums of {group[0].client} have no {GRAM!r}: must have it where they join an ensemble")
    total = Statistics.total(clients.values())
    head = _scale_head(Ridge(total).head(choose_penalty(clients, seed=seed).value), total)
    fingerprint = group[0].read()["fingerprint"]
    state = {"head.weight": head.weight.float(), "head.bias": head.bias.float(), "fingerprint": fingerprint}
    counts = tuple(int(count) for count in total.counts.round().tolist())
    facts = UploadFacts(_name(architecture, taken), architecture, sum(counts), counts)
    return Upload(facts, partial(_state, state))


def _scale_head(head: Head, total: Statistics) -> Head:
    """Return a head whose logits sum to 0 over the classes and have root mean square :data:`SIZE` on its examples."""
    weight, bias = head.weight - head.weight.mean(0), head.bias - head.bias.mean()
    square = ((weight @ total.gram) * weight).sum() + 2.0 * bias @ (weight @ total.sums.sum(0))
    square = (square + total.examples * bias @ bias) / (total.examples * total.classes)
    factor = SIZE / float(square.clamp_min(1e-12).sqrt())
    return Head(factor * weight, factor * bias)


def _name(architecture: str, taken: set[str]) -> str:
    """Return a client's name that no client has."""
    base = "sums-" + re.sub(r"[^A-Za-z0-9._-]+", "-", backbone_in(architecture))[:48]
    names = (base, *(f"{base}-{number}" for number in range(2, 3 + len(taken))))
    return next(name for name in names if name not in taken)


def _state(state: State) -> State:
    return {key: value.clone() for key, value in state.items()}
