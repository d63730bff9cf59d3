"""The shipped server stage and the published loop, put into one identical state."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from published_loops import Settings, State, co_boosting_epoch, dense_epoch, new_state
from published_models import load_in_order
from torch import nn

from strategies import METHODS
from strategies.core.facts import UploadFacts
from strategies.core.seeds import generator
from strategies.method import Job, Normalization, Silent, Upload

MODULES = {"dense": "strategies.methods.dense", "co-boosting": "strategies.methods.co_boosting"}
# Settings that both sides call alike.
SAME = (
    "epochs", "generator_lr", "generator_clip", "latent", "kd_temperature", "student_lr", "weight_decay",
    "student_clip", "adversarial_weight", "adversarial_temperature",
)  # fmt: skip
EPOCHS = {"dense": dense_epoch, "co-boosting": co_boosting_epoch}


@dataclass(frozen=True)
class Case:
    """What both sides start from.

    Attributes:
        method: ``"dense"`` or ``"co-boosting"``.
        shape: (channels, height, width) of an image, normalised with mean and standard deviation 0.5.
        shipped: Builds a model as the shipped code gets it.
        plain: Builds the same model as it is published: its tensors have the same order and, reshaped, shapes.
        clients: n.
        settings: Of the published loop; the shipped config follows from them.
        seed: Of the weights and of every draw.
        precision: Of the shipped generator and teachers; the published loop's is float32.
    """

    method: str
    shape: tuple[int, int, int]
    shipped: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]
    clients: int
    settings: Settings
    seed: int = 0
    precision: str = "float32"


def shipped_config(case: Case) -> Any:
    """Return the shipped config that asks for what the published loop does."""
    method, settings = case.method, case.settings
    shared = {name: getattr(settings, name) for name in SAME} | {
        "generator_steps": settings.steps,
        "generator_precision": case.precision,
        "teacher_precision": case.precision,
        "synthesis_batch_size": settings.batch,
        "pool_augmentation": "crop-flip" if settings.augment else "none",
        "pool_precision": "uint8" if settings.eight_bits else "float32",
        "batch_size": settings.student_batch or settings.batch,
        "schedule": "cosine",
    }
    own: Mapping[str, Mapping[str, object]] = {
        "dense": {"bn_weight": 0.0},
        "co-boosting": {
            "perturbation_size": settings.perturbation,
            "reweighting_step": settings.mu,
            "reweighting_decay": settings.mu_decay,
        },
    }
    return METHODS[method].config(**shared, **own[method])


def shipped_job(case: Case, states: Sequence[Mapping[str, torch.Tensor]] | None = None) -> Job:
    """Return the shipped server's job, with clients' weights drawn from the seed, or the given ones."""
    if states is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(case.seed)
            states = [lively(case.shipped()).state_dict() for _ in range(case.clients)]
    uploads = tuple(
        Upload(UploadFacts(f"client-{k:03d}", "net"), partial(copy.deepcopy, dict(state)))
        for k, state in enumerate(states)
    )
    return Job(
        uploads=uploads,
        builders={"net": case.shipped},
        student="net",
        num_classes=case.settings.classes,
        input_shape=case.shape,
        normalization=Normalization((0.5,) * case.shape[0], (0.5,) * case.shape[0]),
        config=shipped_config(case),
        seed=case.seed,
    )


def lively(model: nn.Module) -> nn.Module:
    """Scale a fresh model's weights so that its logits differ from image to image, as a trained one's do."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight"):
                parameter.mul_(3)
    return model


def shipped_server(case: Case, job: Job | None = None) -> Any:
    """Return the server object of the shipped method, whose ``epoch(e)`` is one epoch."""
    module, job = importlib.import_module(MODULES[case.method]), job or shipped_job(case)
    server = module.DenseServer if case.method == "dense" else module.CoBoostingServer
    return server(job, Silent())


def plain_state(case: Case, server: Any, job: Job) -> State:
    """Return the published loop's state with the clients, student, momentum and pool of a shipped server."""
    teachers = [load_in_order(case.plain(), upload.read()) for upload in job.uploads]
    student = load_in_order(case.plain(), server.learner.student.state_dict())
    state = new_state(teachers, student, case.shape, case.settings)
    pool = server.stage.pool.columns
    if pool:
        state = replace(state, images=pool["images"].clone(), labels=pool["labels"].clone())
    for own, other in zip(student.parameters(), server.learner.student.parameters(), strict=True):
        if known := server.learner.optimizer.state.get(other):
            state.optimizer.state[own] = {"momentum_buffer": known["momentum_buffer"].reshape(own.shape).clone()}
    return state


def same_draws(case: Case) -> Callable[[str, int], torch.Generator]:
    """Return the shipped code's random numbers, for the published loop."""
    return partial(generator, case.seed)


def distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """Return ``||a - b|| / ||b||`` of all numbers of some tensors, compared one after the other in float64."""
    a, b = (torch.cat([tensor.detach().double().flatten() for tensor in side]) for side in (one, other))
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))
