"""A client's part of FuseFL after its upload: it trains its next block above those of all, or sends moments.

Paper: Tang, Zhang, Dong, Cheung, Zhou, Han, Chu, FuseFL: One-Shot Federated Learning through the Lens of Causality with
    Progressive Model Fusion, NeurIPS 2024, https://arxiv.org/abs/2410.20380. Read version: the abstract, and a summary
    of the repository https://github.com/wizard1203/FuseFL at 8248f54.
Symbols: s -> stage; E -> client.epochs, of every stage; K -> client.blocks; h(x) -> summed.
Where: the frozen blocks and the net above them -> strategies.client.fusefl; a stage -> _train.
Deviations: see strategies.methods.fusefl. Without augmentation the frozen blocks' outputs are computed once.

After each stage a client keeps its net, and the blocks that it has received so far. A stage that is asked for again is
trained again from those, with the same bits on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from client_app.attacking import poison
from client_app.keeping import KeptModel
from client_app.node import Node, TrainRequest, check_shares_counts, refuse
from client_app.training.local import Epoch, Training, train
from client_app.work import LocalExamples, State, augmentation_of, load_examples, reporter
from fl_app.data import ImageData, normalize
from fl_app.models import build
from fl_app.models.client_nets import cut
from strategies.client.fusefl import Frozen, above, sum_members
from strategies.core import refusals
from strategies.core.durable import MIB
from strategies.core.facts import part_of
from strategies.core.processor import flush_subnormals
from strategies.core.seeds import derive_seed, seeded_torch
from strategies.statistics.gaussians import Gaussians

if TYPE_CHECKING:
    from fl_app.config import AppConfig

BATCH = 256  # images per forward pass of the frozen blocks
MOST_KEPT = 2**30  # bytes of outputs that are kept; more are computed in every step
FROZEN = "frozen."  # before the stage and the names of received blocks, in what a client keeps


@flush_subnormals()
def answer(config: AppConfig, node: Node, said: Mapping[str, Any], sent: State, *, max_mib: float = 0.0) -> State:
    """Return a client's answer to one question.

    Args:
        said: The question: "stage" and "adapter"; "run-id" and "seed".
        sent: Of the stage below the weights of all M clients' blocks, stacked: name -> [M, ...].
        max_mib: The most of them that the client accepts, MiB; 0: any.

    Returns:
        The client's block of the stage with its adapter, and of the last one its classifier too. After the last stage
        the counts [C], means [C, F] and covariances [C, F, F] of the fused features.

    Raises:
        OneShotError: The client lacks its model of the stage below, or the question does not fit it.
    """
    refuse(config.privacy, "training block by block")
    node.policy.check_private(0.0)
    blocks, request, adapter = config.client.blocks, TrainRequest.read(said, config.seed), str(said.get("adapter"))
    stage = _stage(said, sent, blocks + 1, max_mib)
    keep = partial(KeptModel, node.state_dir, request.run_id, node.client)
    below = keep(stage - 1).load()
    if below is None:
        raise refusals.lost_state(f"the model that it trained up to block {stage - 1} of this run")
    (trained, kept), own = below, load_examples(config, node, request)
    classes = own.split.num_classes
    data = poison(own.split.take(own.train), config.attack, client=node.client, num_classes=classes, seed=request.seed)
    received = {**part_of(kept, FROZEN), **{f"{stage - 1}.{key}": value for key, value in sent.items()}}
    with seeded_torch(request.seed, "fusefl", stage):
        model = build(node.architecture, num_classes=classes, input_shape=own.split.input_shape)
        whole = cut(node.architecture, model, blocks)
        below_it = [part_of(received, f"{number}.") for number in range(1, stage)]
        frozen = Frozen([*whole][:blocks], below_it, adapter, own.split.input_shape)
        if stage > blocks:
            return _moments(config, node, own, data, frozen)
        net = above(whole, stage, frozen, adapter, kept)
    last = _train(
        net, frozen, own, data, config, node=node, seed=derive_seed(request.seed, "client", node.client, stage)
    )
    state = net.state_dict()
    try:
        done = replace(trained, loss=last.loss, accuracy=last.accuracy)
        keep(stage).save(done, {**state, **{FROZEN + key: value for key, value in received.items()}})
    except (OSError, SafetensorError) as error:
        raise refusals.not_kept("the trained block", error, "the client cannot continue") from error
    head = {f"classifier.{key}": value for key, value in part_of(state, "classifier.").items()}
    return {**part_of(state, f"{stage - 1}."), **(head if stage == blocks else {})}


def _stage(said: Mapping[str, Any], sent: State, last: int, max_mib: float) -> int:
    """Return the stage of a question, s: from 2, and K + 1 for the moments."""
    stage = said.get("stage")
    if type(stage) is not int or not 2 <= stage <= last:
        raise refusals.bad_request("stage", stage, f"2 to {last} (client.blocks)")
    if 0 < max_mib < (size := sum(value.nbytes for value in sent.values()) / MIB):
        raise refusals.beyond_limit("the clients' blocks are", size, max_mib)
    return stage


def _train(
    net: nn.Module, frozen: Frozen, own: LocalExamples, data: ImageData, config: AppConfig, *, node: Node, seed: int
) -> Epoch:
    """Train a net above frozen blocks in place, on kept outputs of theirs where images do not change."""
    kind, report = augmentation_of(config, own.split), reporter(config, node, len(data.labels))
    training = Training(data, node.training(config.client), own.split.normalization, kind, seed, report)
    if kind != "none" or len(data.labels) * _join_maps(frozen, own, data.images[:1]).nbytes > MOST_KEPT:
        return train(nn.Sequential(frozen, net), training)
    outputs = torch.cat([_join_maps(frozen, own, images) for images in torch.split(data.images, BATCH)])
    return train(net, replace(training, data=ImageData(outputs, data.labels)))


def _moments(config: AppConfig, node: Node, own: LocalExamples, data: ImageData, frozen: Frozen) -> State:
    """Return the Gaussian of the fused features of every class, in float32."""
    check_shares_counts(config.client, node.policy, what="the calibration: needs fusefl.calibrate=false")
    parts = [sum_members(_join_maps(frozen, own, images), frozen.members) for images in torch.split(data.images, BATCH)]
    found = Gaussians.of(torch.cat(parts), data.labels, own.split.num_classes)
    return {"counts": found.counts, "means": found.means.float(), "covariances": found.covariances.float()}


def _join_maps(frozen: Frozen, own: LocalExamples, images: torch.Tensor) -> torch.Tensor:
    joined: torch.Tensor = frozen(normalize(images, *own.split.normalization))
    return joined
