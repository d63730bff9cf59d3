"""A soak: runs of the app on a deployment of this machine, one after the other, and plugs pulled in each.

``make soak``, ``make soak ARGS="--seed 7 --minutes 10"``. After each run: every upload that was ever accepted is still
there, unchanged; no client has two; no client has trained again what it had kept; uploads and result have the bits
of a run without faults. Then a hostile node with a valid key answers beside honest ones, for a third of the time as
well: see adversary.py. The exit status says whether all held; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adversary import attacked
from app_copy import app_copy
from plugs import Field, plugged_in, result_of, uploads_in
from strikes import FAULTS, MOMENTS, Fault, Round

SETTINGS = {
    "method": "dense", "server.epochs": 60, "server.generator-steps": 4, "server.steps-per-epoch": 4,
    "server.synthesis-batch-size": 32, "client.epochs": 40, "data.image-size": 8, "threads": 1, "deadline-s": 300,
    "checkpoint-s": 0.0, "compute": "in-process",
}  # fmt: skip
MOST_RESUMES = 6
SMALL_DISK_MIB = 8


class BrokenPromiseError(Exception):
    """An invariant did not hold."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="make soak", description="Pull plugs in a deployment until the time is over.")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their moments")
    parser.add_argument("--minutes", type=float, default=10.0, help="no new run begins after this time")
    parser.add_argument("--clients", type=int, default=3, help="SuperNodes")
    parser.add_argument("--only-run", type=int, default=0, help="repeat this run of the seed alone")
    parser.add_argument("--fault", default="", help="draw no others but those whose names hold this text")
    parser.add_argument("--only-adversary", action="store_true", help="pull no plugs")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument("--app", type=Path, default=app_copy(), help="the app's folder")
    given = parser.parse_args()
    if not any(given.fault in fault.name for fault in FAULTS):
        parser.error(f"--fault is {given.fault!r}: must be a part of {', '.join(fault.name for fault in FAULTS)}")
    return given


def main() -> int:
    """Soak for as long as asked; return the exit status."""
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that disks are given back
    began, done, failures = time.monotonic(), 0, list[dict[str, Any]]()
    struck: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    if not given.only_adversary:
        done = pulled(folder, given, struck, failures)
    if given.only_adversary or not (given.only_run or given.fault or failures):
        minutes = given.minutes / (1 if given.only_adversary else 3)
        attacks, broken = attacked(folder / "adversary", given.seed, minutes, say)
        again = f'make soak ARGS="--seed {given.seed} --only-adversary"'
        failures += [{"run": 0, "struck": attacks, "reason": reason, "again": again} for reason in broken]
        done += len(attacks)
        struck.update(f"hostile node: {attack}" for attack in attacks)
    if left := leftovers(folder):
        failures.append({"run": 0, "struck": [], "reason": f"processes are left: {left}", "again": ""})
    if failures:
        say(f"logs and run folders are kept in {folder}")
    else:
        shutil.rmtree(folder)
    return summary(given, done, struck, failures, time.monotonic() - began)


def pulled(folder: Path, given: argparse.Namespace, struck: Counter[str], failures: list[dict[str, Any]]) -> int:
    """Pull plugs for as long as asked; count the faults, note broken promises, and return the number of runs."""
    began, number, done = time.monotonic(), given.only_run or 1, 0
    with plugged_in(folder, given.clients) as field:
        field.app = given.app.resolve()
        expected = faultless(field)
        say(f"without faults: {expected['weights'][:12]}, {time.monotonic() - began:.0f} s")
        while time.monotonic() - began < 60.0 * given.minutes:
            run, faults = planned(field, given, number)
            try:
                soaked(run, faults, given, number, expected)
            except (BrokenPromiseError, AssertionError) as error:
                again = f'make soak ARGS="--seed {given.seed} --clients {given.clients} --only-run {number}"'
                failures.append({"run": number, "struck": run.struck, "reason": str(error)[:500], "again": again})
                say(f"run {number}: FAILED: {error}\n{field.last_words()}\n  again: {again}")
            struck.update(run.struck)
            done, number = done + 1, number + 1
            if given.only_run or failures:
                break
    return done


def faultless(field: Field) -> dict[str, Any]:
    """Run once without faults; what it ends with is what all others must end with."""
    run = Round(field, field.folder / "faultless", SETTINGS | {"min-uploads": field.clients})
    run.begin()
    run.submit()
    field.until(lambda: result_of(run.folder), 600.0)
    result = result_of(run.folder) or {}
    if result.get("status") != "finished":
        raise BrokenPromiseError(f"the run without faults failed: {result}")
    return {"weights": result["weights_sha256"], "uploads": uploads_in(run.folder)}


def planned(field: Field, given: argparse.Namespace, number: int) -> tuple[Round, list[tuple[Fault, int]]]:
    """Draw what happens to a run: one to three faults, from the seed and its number alone."""
    rng = random.Random(f"{given.seed} {number}")
    known = [fault for fault in FAULTS if given.fault in fault.name]
    drawn = rng.sample(known, min(len(known), rng.randint(1, 3)))
    faults = [(fault, rng.randrange(given.clients)) for fault in drawn]
    settings = SETTINGS | {"min-uploads": given.clients}
    for fault in drawn:
        settings |= fault.settings
    return Round(field, field.folder / f"run-{number}" / "run", settings), faults


def soaked(
    run: Round, faults: list[tuple[Fault, int]], given: argparse.Namespace, number: int, expected: dict[str, Any]
) -> None:
    """Run once under faults, and check what must hold.

    Raises:
        BrokenPromiseError: It does not.
    """
    began, rng = time.monotonic(), random.Random(f"{given.seed} {number} moments")
    say(f"run {number}: {', '.join(f'{fault.name} ({partition})' for fault, partition in faults)}")
    with small_disk(run, any(fault.small_disk for fault, _ in faults)):
        run.begin()
        for fault, partition in faults:
            if fault.before:
                strike(run, fault, partition, rng)
        run.submit()
        waiting = [(fault, partition) for fault, partition in faults if not fault.before]
        while (result_of(run.folder) or {}).get("status") != "finished":
            run.look()
            for fault, partition in list(waiting):
                if MOMENTS[fault.moment](run, partition):
                    waiting.remove((fault, partition))
                    strike(run, fault, partition, rng)
            if (result_of(run.folder) or {}).get("status") == "failed" or run.is_over():
                go_on(run)
            if time.monotonic() - began > given.patience:
                raise BrokenPromiseError(f"no result within {given.patience:.0f} s, {len(run.seen)} uploads are here")
            time.sleep(0.1)
        check(run, expected)
        run.field.until(lambda: run.field.server_app() is None)
    say(f"  same bits after {time.monotonic() - began:.0f} s, {run.resumes} resumes, struck: {', '.join(run.struck)}")


def strike(run: Round, fault: Fault, partition: int, rng: random.Random) -> None:
    """Let a fault happen."""
    if fault.small_disk and not run.small_disk:
        return
    run.struck.append(fault.name)
    fault.strike(run, partition, rng)


def go_on(run: Round) -> None:
    """Repair the fault and resume a failed run."""
    if run.resumes >= MOST_RESUMES:
        raise BrokenPromiseError(f"it fails again and again: {result_of(run.folder)}")
    run.field.until(lambda: run.field.server_app() is None)
    while run.heal:
        run.heal.pop()()
    run.resume()


def check(run: Round, expected: dict[str, Any]) -> None:
    """Check a finished run.

    Raises:
        BrokenPromiseError: An upload is lost, changed or double, a client trained in vain, or the result is another.
    """
    run.look()
    uploads, result = uploads_in(run.folder), result_of(run.folder) or {}
    for client, sha in run.seen.items():
        file = run.folder / "uploads" / f"{client}.safetensors"
        if uploads.get(client) != sha or hashlib.sha256(file.read_bytes()).hexdigest() != sha:
            raise BrokenPromiseError(f"the accepted upload of {client} is lost or changed")
    if uploads != expected["uploads"]:
        raise BrokenPromiseError(f"uploads are {uploads}, expected are {expected['uploads']}")
    if result["weights_sha256"] != expected["weights"]:
        raise BrokenPromiseError(f"the result is {result['weights_sha256']}, expected is {expected['weights']}")
    if again := [n for n, times in run.trained().items() if times > 1]:
        raise BrokenPromiseError(f"clients {again} trained again what they had kept: {run.trained()}")


@contextlib.contextmanager
def small_disk(run: Round, wanted: bool) -> Iterator[None]:
    """Give a run a disk of its own that can be filled, where this process may mount one; else no disk fills."""
    place = run.folder.parent
    place.mkdir(parents=True, exist_ok=True)
    if wanted:
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "tmpfs", str(place)]
        run.small_disk = subprocess.run(command, capture_output=True).returncode == 0
        if not run.small_disk:
            say("  this process may not mount a small disk: no disk is filled")
    try:
        yield
    finally:
        if run.small_disk:
            subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def leftovers(folder: Path) -> list[str]:
    """Return the processes that are still at work for a soak."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            alive = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
            if alive and str(folder).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " ")[:120])
    return found


def summary(
    given: argparse.Namespace, runs: int, struck: Counter[str], failures: list[dict[str, Any]], seconds: float
) -> int:
    """Print the faults and their cost; return the exit status."""
    say(f"\n{runs} runs, {sum(struck.values())} faults, {seconds:.0f} s, seed {given.seed}")
    for name in dict.fromkeys([*(fault.name for fault in FAULTS), *struck]):
        say(f"  {struck[name]:3d}  {name}")
    say(f"failures: {len(failures)}")
    facts = {"seed": given.seed, "runs": runs, "faults": dict(struck), "failures": failures, "seconds": round(seconds)}
    say(json.dumps(facts))
    return 1 if failures or not runs else 0


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
