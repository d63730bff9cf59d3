"""The time of a run before it starts: a trial of seconds, scaled by what the run does.

The trial trains one client's model for some batches, and the server's method on untrained models, each in this process
and for a moment. So it knows the machine, the method and the model, and neither the start of Flower and Ray nor the
scores at the end. It has one thread, and its clock is the processor's time: what the work takes where nothing else is
at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import process_time

import torch
from torch import Tensor

from client_app.tasks import Wanted, task_of
from client_app.training.local import Training, epoch_lengths
from client_app.work import augmentation_of
from fl_app.data import Split
from fl_app.division import own_positions
from server_app.settings.build import build_job, held_out
from server_app.settings.read import Settings
from server_app.settings.server_data import open_half
from strategies.compute.in_process import torch_as_usual
from strategies.core.facts import CLASSIFIER, is_head, kind_of
from strategies.core.processor import all_cores
from strategies.core.seeds import seeded_torch
from strategies.method import Method
from strategies.run.trial import trial_stage, untrained_uploads

CLIENT_S = 0.7  # the processor's seconds of the clients' trial
BATCHES = 4  # a pass of the trial's client


def trial(settings: Settings, num_supernodes: int) -> dict[str, float]:
    """Return the expected seconds of the phases ``"clients"`` and ``"server"``; a phase that no trial shows is absent.

    Args:
        settings: The run's settings, already checked.
        num_supernodes: Number of clients.

    Raises:
        DataError: The data set is missing or damaged.
    """
    if _untold(settings):
        return {}
    split, app = open_half(settings, "train"), settings.app
    parts = [
        own_positions(split, app, partition_id=number, num_partitions=num_supernodes)
        for number in range(num_supernodes)
    ]
    found = {"clients": _clients(settings, split, parts)}
    server = None if settings.method is None else _server(settings.method, settings, split, parts)
    return {**found, **({} if server is None else {"server": server})}


def times_trained(settings: Settings) -> float:
    """Return how often a client trains and uploads, on average."""
    config = settings.method_config
    return float(config.rounds * config.fraction if settings.method is None else settings.plan.rounds)


def _untold(settings: Settings) -> bool:
    """Whether clients do something else than to train a classifier on their share of the data, on a CPU."""
    app, names = settings.app, settings.app.model.mix()
    elsewhere = app.client.nodes or app.client.checkpoint or app.resume or app.uploads or app.privacy.on
    on_gpu = app.client.device not in ("auto", "cpu")
    other = any(is_head(name) or kind_of(name) != CLASSIFIER for name in names)
    return bool(elsewhere) or on_gpu or other or settings.choice.uploads != CLASSIFIER


def _clients(settings: Settings, split: Split, parts: Sequence[Tensor]) -> float:
    """Return the seconds until all clients have trained, as many at once as there are cores."""
    app, names = settings.app, settings.app.model.mix()
    with torch_as_usual(1):
        step = {name: _seconds_per_step(settings, split, name, parts[0]) for name in set(names)}
    each = [
        sum(epoch_lengths(app.client, len(part))) * step[names[number % len(names)]]
        for number, part in enumerate(parts)
    ]
    return float(times_trained(settings) * max(sum(each) / min(all_cores(), len(parts)), *each))


def _seconds_per_step(settings: Settings, split: Split, name: str, positions: Tensor) -> float:
    config, task = settings.app.client, task_of(CLASSIFIER, name)
    with seeded_torch(0, "trial"):
        model = task.build(Wanted(name, split.num_classes, split.input_shape, split.normalization, settings.app))
    data = split.take(positions[: BATCHES * config.batch_size])
    once = replace(config, epochs=1, steps=0, device="cpu")  # which is where "auto" trains in a simulation
    training = Training(data, once, split.normalization, augmentation_of(settings.app, split))
    run = partial(task.train, model, training)
    run()  # the first pass is slower
    began, passes = process_time(), 0
    while process_time() - began < CLIENT_S:
        run()
        passes += 1
    return (process_time() - began) / (passes * sum(epoch_lengths(once, len(data.labels))))


def _server(method: Method, settings: Settings, split: Split, parts: Sequence[Tensor]) -> float | None:
    """Return the seconds of the server stage; None if the trial does not show them."""
    names, times = settings.app.model.mix(), settings.plan.rounds
    if settings.choice.asks_again:
        return None  # the clients answer again
    images, tested = held_out(settings)
    job = build_job(settings, tested, images)
    counts = [torch.bincount(split.labels[part], minlength=split.num_classes).tolist() for part in parts]
    seconds, _ = trial_stage(method, replace(job, uploads=untrained_uploads(job, counts, names)))
    return None if seconds is None else times * seconds
