"""What a run would do, before anything starts: its settings, the bytes of a client, and how long it may take."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from server_app.launch.console import Format
from server_app.launch.run_command import PlannedRun
from server_app.launch.time_trial import times_trained, trial
from server_app.report.communication import size_text
from server_app.report.tables import setting_line
from server_app.settings.build import build_job
from server_app.settings.read import Settings, default_settings
from server_app.settings.server_data import open_half
from server_app.settings.text import to_toml
from strategies.core.durable import MIB
from strategies.core.facts import CLASSIFIER
from strategies.run.journal import duration


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

    Args:
        settings: Its settings.
        num_supernodes: Number of clients.

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
