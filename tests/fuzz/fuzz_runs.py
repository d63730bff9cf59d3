"""Runs a decoder over many inputs, in this process or in one of its own with bounded memory and time."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz_decoder import MOST_S, Decoder, Tally
from hypothesis import HealthCheck, Phase, given, seed, settings

MIB = 2**20
# Of address space, beyond what the libraries take when the first input is read.
MOST_MIB = 1024
_CALM = tuple(HealthCheck)


def try_inputs(decoder: Decoder, tally: Tally, *, examples: int, number: int | None = None) -> None:
    """Try malformed inputs."""
    calm = settings(
        deadline=None,
        database=None,
        derandomize=number is None,
        max_examples=examples,
        suppress_health_check=_CALM,
        phases=(Phase.generate, Phase.shrink) if number is not None else (Phase.generate,),
        report_multiple_bugs=False,
    )

    @calm
    @given(decoder.inputs)
    def run(found: Any) -> None:
        decoder.judge(found, tally)

    (run if number is None else seed(number)(run))()


def run_here(name: str, decoder: Decoder, *, examples: int, number: int) -> dict[str, Any]:
    """Try inputs in this process, with bounded memory and time, and return the figures as JSON values."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    tally = Tally()
    with suppress(BaseException):  # loads the late imports; an error shows below
        try_inputs(decoder, Tally(), examples=3, number=0)
    before = _peak_mib()
    limit = _address_space() + MOST_MIB * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def late(*_: object) -> None:
        raise TimeoutError(f"an input takes more than {2 * MOST_S:g} s")

    signal.signal(signal.SIGPROF, late)
    read = decoder.read

    def bounded(found: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, 2 * MOST_S)
        faulthandler.dump_traceback_later(30 * MOST_S, exit=True)  # for what does not come back to Python
        try:
            return read(found)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()

    watched = Decoder(decoder.inputs, bounded, decoder.refusals, decoder.look)
    began, failure = time.monotonic(), ""
    try:
        try_inputs(watched, tally, examples=examples, number=number)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the finding
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
        notes = " ".join(getattr(error, "__notes__", []))
        failure = f"{type(error).__name__}: {str(error)[:300]} ({' > '.join(frames)}) {notes[:600]}"
    return {
        "decoder": name, "tried": tally.tried, "accepted": tally.accepted, "refused": tally.refused,
        "crashed": tally.crashed, "slowest_ms": round(1000 * tally.slowest_s, 1),
        "peak_mib": round(_peak_mib() - before, 1), "seconds": round(time.monotonic() - began, 1), "failure": failure,
    }  # fmt: skip


def run_apart(name: str, decoder: Decoder, *, examples: int, number: int) -> dict[str, Any]:
    """Try inputs in a process of their own; one that dies is a failure, too."""
    context = multiprocessing.get_context("fork")  # the child has these imports already
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        theirs.send(run_here(name, decoder, examples=examples, number=number))

    child = context.Process(target=work)
    child.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        child.join()
        nothing = dict.fromkeys(("tried", "accepted", "refused", "crashed", "slowest_ms", "peak_mib", "seconds"), 0)
        return {"decoder": name, **nothing, "failure": f"the process ended with status {child.exitcode}"}
    child.join()
    return found


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


def _address_space() -> int:
    import psutil

    return int(psutil.Process().memory_info().vms)
