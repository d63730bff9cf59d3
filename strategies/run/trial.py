"""The cost of a server stage before it starts: a trial of seconds on untrained models, and the memory it holds.

The trial runs the method in the calling thread, on one thread of torch, and is ended as soon as its reports show how
long the whole takes. It knows the machine, the method and the models; what clients train, it does not know.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic, process_time
from typing import Any

from ..compute.in_process import InProcess
from ..core.errors import OneShotError
from ..core.facts import CLASSIFIER, UploadFacts, kind_of
from ..core.options import LENGTHS, QUICK, preset_of
from ..core.seeds import seeded_torch
from ..method import Job, Method, Part, Silent, Upload
from .journal import Pace, duration

TRIAL_S = 3.0  # the processor's seconds of a trial
LIMIT_S = 8.0  # of the clock, if the reports do not show the time before
LOOK_S = 0.05
# A stage of so few epochs with a student of so few parameters takes about as long as a trial.
FEW, SMALL = 5, 10_000


class _TimeUp(BaseException):
    """Ends a trial; no handler of errors stops it."""


class _Watch(Silent):
    """Follows a trial's reports."""

    def __init__(self) -> None:
        self._began = process_time()
        self.pace, self.total = Pace(0, self._began), 0

    @property
    def seconds(self) -> float:
        """Seconds since the begin."""
        return process_time() - self._began

    def report(self, step: int, total: int, values: Mapping[str, float] | None = None, part: Part = (0, 0)) -> None:  # noqa: ARG002
        """Take a report."""
        self.total = total
        self.pace.note(process_time(), step, total, part)
        if self.seconds >= TRIAL_S and self.pace.left(process_time()) is not None:
            raise _TimeUp


def trial_stage(method: Method, job: Job) -> tuple[float | None, int]:
    """Return the seconds of a server stage, None if a trial does not show them, and its number of epochs.

    Args:
        job: Its job, with uploads; its observer is not called.
    """
    watch = _Watch()
    try:
        with _at_most(LIMIT_S):
            InProcess().run(method, replace(job, threads=1, observer=None), watch)
    except _TimeUp:
        left = watch.pace.left(process_time())
        return (None if left is None else watch.seconds + left), watch.total
    except OneShotError:  # a method may refuse models that know nothing
        return None, watch.total
    return watch.seconds, watch.total


def untrained_uploads(job: Job, label_counts: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[Upload, ...]:
    """Return uploads of fresh models."""
    with seeded_torch(0, "trial"):
        states = {name: job.builders[name]().state_dict() for name in set(names)}
    found = []
    for number, counts in enumerate(label_counts):
        name = names[number % len(names)]
        facts = UploadFacts(f"client-{number:03d}", name, sum(counts), tuple(counts))
        found.append(Upload(facts, partial(dict, states[name])))
    return tuple(found)


def describe_cost(method: Method, job: Job, clients: int) -> str:
    """Return in a line what the server stage of a method that trains will cost; empty for one that costs little.

    Args:
        job: Its job, without uploads.
    """
    names = [name for name in job.builders if kind_of(name) == CLASSIFIER]
    if method.kind != "student" or method.any_model or method.uploads != CLASSIFIER or method.client_phase or not names:
        return ""
    counts = [[100] * job.num_classes] * clients
    uploads = untrained_uploads(job, counts, names)
    sizes = [sum(value.nbytes for value in upload.read().values()) for upload in uploads]
    student = job.builders[job.student]()
    few = all(getattr(job.config, name, 0) <= FEW for name in LENGTHS)
    if few and sum(value.numel() for value in student.parameters()) < SMALL:
        return ""
    images = getattr(job.config, "images", 0)
    held = int(images) * math.prod(job.input_shape) if isinstance(images, int) else 0
    # The students' gradients and an optimizer's two moments beside its weights.
    memory = sum(sizes) + 4 * sum(value.nbytes for value in student.state_dict().values()) + held
    seconds, epochs = trial_stage(method, replace(job, uploads=uploads))
    parts = [f"{epochs} epochs" if epochs else "", f"at least {memory / 2**30:.1f} GiB of memory"]
    parts.insert(1, f"about {duration(seconds)} on one thread" if seconds is not None else "a time not known before")
    return f"the server stage will take {', '.join(filter(None, parts))}; {what_is_shorter(method, job)}"


def what_is_shorter(method: Method, job: Job) -> str:
    """Return in words what makes a server stage shorter."""
    quick: Any = preset_of(method.config, QUICK)
    lengths = [name for name in LENGTHS if hasattr(job.config, name)]
    if any(getattr(quick, name) < getattr(job.config, name) for name in lengths):
        return f"preset={QUICK!r} is shorter, with {', '.join(f'{getattr(quick, name)} {name}' for name in lengths)}"
    least = [*lengths, *(["images"] if getattr(job.config, "images", 0) else [])]
    make = f".preset({QUICK!r}, ...)" if hasattr(method.config, "preset") else "(...)"
    return f"shorter with fewer {' or '.join(least)} in config={method.config.__name__}{make}"


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End a block after some time of the clock by :class:`_TimeUp`, in whatever thread it runs."""
    thread, over, lock = ctypes.c_ulong(threading.get_ident()), threading.Event(), threading.Lock()
    began, raise_in = monotonic(), ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        while not over.wait(LOOK_S):
            with lock:
                if not over.is_set() and monotonic() - began >= seconds:
                    raise_in(thread, ctypes.py_object(_TimeUp))
                    return

    watcher = threading.Thread(target=watch, name="trial-limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        with lock:
            over.set()
            raise_in(thread, None)  # one that is on its way has nothing left to end
        watcher.join()
