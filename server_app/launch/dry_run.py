"""What a run would do, before anything starts: its settings, the bytes of a client, and how long it may take.

The time is a trial of seconds, scaled by what the run does. It trains one client's model for some batches, and the
server's method on untrained models, each in this process and for a moment. So it knows the machine, the method and the
model, and neither the start of Flower and Ray nor the scores at the end. It has one thread, and its clock is the
processor's time: what the work takes where nothing else is at work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from time import process_time
from typing import Any

import torch
from torch import Tensor

from client_app.tasks import Wanted, task_of
from client_app.training.local import Training, epoch_lengths
from client_app.work import augmentation_of
from fl_app.data import Split
from fl_app.division import own_positions
from server_app.launch.console import Format
from server_app.launch.run_command import PlannedRun, trains_elsewhere
from server_app.report.communication import size_text
from server_app.report.tables import setting_line
from server_app.settings.build import build_job, held_out
from server_app.settings.catalogue import to_toml
from server_app.settings.read import Settings, default_settings
from server_app.settings.server_data import open_half
from strategies.compute.in_process import torch_as_usual
from strategies.core.durable import MIB
from strategies.core.facts import CLASSIFIER
from strategies.core.processor import all_cores
from strategies.core.seeds import seeded_torch
from strategies.method import Method
from strategies.run.journal import duration
from strategies.run.trial import trial_stage, untrained_uploads

CLIENT_S = 0.7  # the processor's seconds of the clients' trial
BATCHES = 4  # a pass of the trial's client


def print_plan(run: PlannedRun, format: Format) -> None:  # noqa: A002
    """Check a run as before its start, and print what it would do.

    Raises:
        OneShotError: The run would be refused.
    """
    run.check()
    settings, facts = run.settings, plan(run.settings, run.num_supernodes)
    if format == "json":
        sys.stdout.write(json.dumps(facts) + "\n")
        return
    up, down = (_amount(facts[key]) for key in ("mib_up_per_client", "mib_down_per_client"))
    changed = " ".join(f"{key}={to_toml(value)}" for key, value in facts["changed"].items())
    lines = {
        "method": settings.choice.title, "setting": facts["setting"], "changed": changed or "nothing",
        "bytes": f"{up} up, {down} down per client; {facts['bytes_basis']}",
        "time": _time(facts["seconds"], facts["time_basis"]), "run folder": facts["run_dir"],
    }  # fmt: skip
    sys.stdout.write("".join(f"{name:<12} {line}\n" for name, line in lines.items()))
    sys.stdout.write("nothing was started\n")


def plan(settings: Settings, num_supernodes: int) -> dict[str, Any]:
    """Return what a run would do.

    Returns:
        The setting, the changed settings, MiB per client up and down (None: not known before), seconds per phase
        (None: no trial shows them), each with its basis.
    """
    defaults, app = default_settings(), settings.app
    changed = {key: value for key, value in settings.flat.items() if key != "run-dir" and defaults[key] != value}
    up, down, counted = _bytes(settings, num_supernodes)
    seconds = {name: round(value, 1) for name, value in trial(settings, num_supernodes).items()}
    unknown = "" if "server" in seconds else "the server stage, "
    basis = f"by a trial of seconds on one thread; without {unknown}the start of all processes and the scores"
    return {
        "status": "planned",
        "method": settings.choice.name,
        "setting": setting_line([settings.flat], [num_supernodes], [app.seed]),
        "changed": changed,
        "mib_up_per_client": up,
        "mib_down_per_client": down,
        "bytes_basis": counted,
        "seconds": seconds or None,
        "time_basis": basis if seconds else "unknown: no short trial shows it",
        "run_dir": app.run_dir,
    }


def _bytes(settings: Settings, num_supernodes: int) -> tuple[float | None, float | None, str]:
    method = settings.choice
    again = "; the method asks again, which is not counted" if method.asks_again else ""
    if settings.app.uploads:
        return 0.0, 0.0, f"the uploads are stored{again}"
    if method.uploads != CLASSIFIER:
        return None, None, "what these clients send depends on their examples"
    job = build_job(settings, open_half(settings, "test"), None)
    mix = settings.app.model.mix()
    each = [mix[number % len(mix)] for number in range(num_supernodes)]
    sizes = {
        name: sum(value.numel() * value.element_size() for value in job.builders[name]().state_dict().values())
        for name in set(each)
    }
    model, times = round(fmean(sizes[name] for name in each) / MIB, 6), times_trained(settings)
    if settings.method is None:
        return round(times * model, 6), round(times * model, 6), "a model each way in every round, before compression"
    return times * model, (times - 1) * model, f"the weights of a model, and requests of some bytes{again}"


def _time(seconds: Mapping[str, float] | None, basis: str) -> str:
    if seconds is None:
        return basis
    phases = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    return f"about {duration(sum(seconds.values()))} ({phases}), {basis}"


def _amount(mib: float | None) -> str:
    return "?" if mib is None else size_text(mib)


def trial(settings: Settings, num_supernodes: int) -> dict[str, float]:
    """Return the expected seconds of the phases ``"clients"`` and ``"server"``; a phase that no trial shows is absent.

    Raises:
        DataError: The data set is missing or damaged.
    """
    if trains_elsewhere(settings):
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
