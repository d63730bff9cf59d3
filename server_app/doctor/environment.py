"""The environment of the planned processes: variables, proxies, limits, folders, and other running processes."""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from server_app.doctor.findings import Finding, Level
from strategies.core.places import existing, state_root
from strategies.run import RUNS_VARIABLE, runs_folder
from strategies.uploads.checks import MIB

INSTALLATION = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
_SUPERLINK = "in the shell, or the unit, that starts flower-superlink"
_SUPERNODE = "in the shell, or the unit, that starts flower-supernode"
# Variable, its value, the name of its check, the effect of its absence, its role (empty: every machine).
_VARIABLES = (
    (
        INSTALLATION,
        "1",
        "runtime installation",
        "Flower installs PyTorch again for every run, and without a network the run fails",
        "server",
    ),
    ("MALLOC_ARENA_MAX", "1", "memory arenas", "large blocks of memory are cleared again in every step", "server"),
    ("RAY_USAGE_STATS_ENABLED", "0", "Ray's reports", "Ray sends usage statistics to its makers", "server"),
    ("FLWR_TELEMETRY_ENABLED", "0", "Flower's reports", "Flower sends usage statistics to its makers", ""),
    (
        "FLWR_DISABLE_UPDATE_CHECK",
        "1",
        "update check",
        "Flower asks for updates, and waits for seconds without a network",
        "",
    ),
)
_PROGRAMS = (
    "flower-superlink", "superlink.py", "flower-supernode", "flower-superexec", "flwr-simulation", "raylet",
    "gcs_server",
)  # fmt: skip


def variables(role: str, environ: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Check the environment variables of a role.

    Args:
        role: ``"server"`` or ``"node"``; any other role has the variables of every machine.
        environ: The environment; None for this process's own.
    """
    given = os.environ if environ is None else environ
    where = _SUPERLINK if role == "server" else _SUPERNODE
    for name, value, about, without, of in _VARIABLES:
        if of not in ("", role):
            continue
        found = given.get(name)
        if found == value:
            yield Finding("ok", about, f"{name}={value}")
            continue
        level: Level = "error" if name == INSTALLATION else "warning"
        shown = f"{name} is {'not set' if found is None else repr(found)}: {without}"
        yield Finding(level, about, shown, fix=f"export {name}={value} {where}; check again there")


def proxies(host: str, found: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Check for a proxy between a node and the SuperLink; Flower's client obeys these variables.

    Args:
        host: The SuperLink's host.
        found: Scheme -> proxy; None to read this process's environment.
    """
    caught = urllib.request.getproxies() if found is None else found
    using = {scheme: proxy for scheme, proxy in caught.items() if scheme in ("http", "https", "all")}
    if not using or urllib.request.proxy_bypass(host):
        yield Finding("ok", "proxies", f"no proxy on the way to {host}")
        return
    shown = ", ".join(f"{scheme} by {_without_password(proxy)}" for scheme, proxy in sorted(using.items()))
    fix = f"export NO_PROXY={host},$NO_PROXY {_SUPERNODE}, unless the proxy is the only way out"
    yield Finding("warning", "proxies", f"a proxy is on the way to {host}: {shown}", "none", fix)


def open_files(clients: int, limit: int | None = None) -> Iterator[Finding]:
    """Check how many files and connections a process may hold.

    Args:
        clients: Number of expected nodes.
        limit: The limit; None for this process's own.
    """
    if limit is None:
        try:
            import resource
        except ImportError:  # no such limit on this system
            yield Finding("skipped", "open files", "this system reports no limit")
            return
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = 2**31 if limit == resource.RLIM_INFINITY else limit
    needed = 256 + 8 * clients
    fix = "" if limit >= needed else f"ulimit -n {needed} {_SUPERLINK}, or LimitNOFILE={needed} in its unit"
    level: Level = "ok" if limit >= needed else "warning"
    yield Finding(level, "open files", f"{limit} per process", f"at least {needed} for {clients} clients", fix)


def writable(folder: Path, what: str, fix: str) -> Iterator[Finding]:
    """Check that a file can be written to a folder, or to the parent in which it will be created.

    Args:
        folder: The folder; need not exist.
        what: The name of the check.
        fix: The remedy if nothing can be written there.
    """
    there = existing(folder)
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        yield Finding("error", what, f"{folder}: cannot be written ({there}: {error.strerror})", fix=fix)
    else:
        yield Finding("ok", what, f"{folder} can be written")


def left_overs(processes: Iterable[psutil.Process] | None = None) -> Iterator[Finding]:
    """List running SuperLinks, SuperNodes and Rays; they may belong to this deployment, so none is ended.

    Args:
        processes: The machine's processes; None to list them.
    """
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter() if processes is None else processes:
        try:
            words = [Path(word).name for word in [process.name(), *process.cmdline()[:2]]]
        except psutil.Error:
            continue
        for program in _PROGRAMS:
            if program in words:
                found.setdefault(program, []).append(process.pid)
    if not found:
        yield Finding("ok", "other runs", "no SuperLink, SuperNode or Ray runs here")
        return
    shown = "; ".join(f"{name} (process {', '.join(map(str, pids[:6]))})" for name, pids in sorted(found.items()))
    fix = "nothing if they belong to this deployment; otherwise end them by their process id"
    yield Finding("warning", "other runs", f"running here: {shown}", "no processes of other runs", fix)


def _without_password(proxy: str) -> str:
    scheme, mark, rest = proxy.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else proxy.rpartition("@")[2]


# Disk space and memory for the planned run: uploads, the server stage, and the clients' kept models.


# Beside the uploads: the student, its best weights, and checkpoints with the state of an optimizer and a generator.
_STUDENT_COPIES = 8
# torch, Ray and Flower on an idle server, and a stage's batches.
_PROCESSES_MIB = 3072
# A node keeps its trained models of this many runs, one model for a run of one round.
_RUNS_KEPT = 16
_LEAST_FREE_MIB = 256


def run_folder(run_dir: str, uploads: int, student: int, free: int | None = None) -> Iterator[Finding]:
    """Check the folder of runs: whether it can be written, and whether the uploads fit.

    Args:
        run_dir: The setting ``run-dir``.
        uploads: Bytes of all expected uploads.
        student: Bytes of the largest model.
        free: Free bytes; None to read the disk's.
    """
    folder = runs_folder(run_dir)
    fix = f"create it, and give it to the user who starts the server; or name another by {RUNS_VARIABLE}"
    yield from writable(folder, "run folder", fix)
    if not run_dir and not os.environ.get(RUNS_VARIABLE):
        fix = f"export for example {RUNS_VARIABLE}=/srv/runs in the shell or unit that starts flower-superlink"
        found = f"{RUNS_VARIABLE} is not set: runs go to the folder in which flower-superlink is started"
        yield Finding("warning", "run folder's place", found, "an absolute path", fix)
    # Flower's SuperLink also stores every upload until the server has pulled it.
    needed = 2 * uploads + _STUDENT_COPIES * student + _LEAST_FREE_MIB * MIB
    yield _disk(folder, "disk of the run folder", needed, uploads + student, free)


def client_state(state_dir: str, model: int, free: int | None = None) -> Iterator[Finding]:
    """Check the folder of a node's trained models.

    Args:
        state_dir: The setting ``client.state-dir``.
        model: Bytes of its model.
        free: Free bytes; None to read the disk's.
    """
    variable = "ONESHOT_CLIENT_STATE"
    folder = state_root(state_dir).absolute()
    fix = f"give it to the user who starts flower-supernode, or name another by {variable}"
    yield from writable(folder, "state folder", fix)
    yield _disk(folder, "disk of the state folder", _RUNS_KEPT * model + _LEAST_FREE_MIB * MIB, 2 * model, free)


def server_memory(uploads: int, student: int, available: int | None = None) -> Iterator[Finding]:
    """Check the free memory, which must hold all models of an ensemble and a student in training.

    Args:
        uploads: Bytes of all expected uploads.
        student: Bytes of the largest model.
        available: Free bytes; None to read the system's.
    """
    found = psutil.virtual_memory().available if available is None else available
    needed = uploads + _STUDENT_COPIES * student + _PROCESSES_MIB * MIB
    level: Level = "ok" if found >= needed else "warning"
    fix = "" if found >= needed else "free memory, expect fewer clients, or choose smaller architectures"
    text = f"about {_mib(needed)}: {_mib(uploads)} of models, the rest for the processes and the student"
    yield Finding(level, "memory", f"{_mib(found)} free", text, fix)


def node_memory(model: int, available: int | None = None) -> Iterator[Finding]:
    """Check the free memory of a node, which trains one model; the arguments are :func:`server_memory`'s."""
    found = psutil.virtual_memory().available if available is None else available
    needed = _STUDENT_COPIES * model + _PROCESSES_MIB // 2 * MIB
    level: Level = "ok" if found >= needed else "warning"
    fix = "" if found >= needed else "free memory, or choose a smaller architecture"
    yield Finding(level, "memory", f"{_mib(found)} free", f"about {_mib(needed)}", fix)


def upload_limit(models: Mapping[str, int], most_mib: float) -> Iterator[Finding]:
    """Compare the largest accepted upload with the sizes of the models.

    Args:
        models: Architecture -> bytes.
        most_mib: The setting ``max-upload-mib``.
    """
    largest = max(models, key=lambda name: models[name])
    size = models[largest] / MIB
    if size > most_mib:
        found = f"{most_mib:g} MiB, but an upload of {largest} is {size:.2f} MiB: the server would refuse it"
        yield Finding("error", "max-upload-mib", found, fix=f"set max-upload-mib={int(size) + 1} or more")
    else:
        yield Finding("ok", "max-upload-mib", f"{most_mib:g} MiB; the largest model, {largest}, has {size:.2f} MiB")


def _disk(folder: Path, name: str, needed: int, least: int, free: int | None) -> Finding:
    """Compare the free bytes with the comfortable and the least amount."""
    found = shutil.disk_usage(existing(folder)).free if free is None else free
    shown, text = f"{_mib(found)} free for {folder}", f"about {_mib(needed)}"
    if found >= needed:
        return Finding("ok", name, shown, text)
    level: Level = "error" if found < least else "warning"
    return Finding(level, name, shown, text, "free space on this disk, or choose a folder on another one")


def _mib(size: int) -> str:
    mib = size / MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"
