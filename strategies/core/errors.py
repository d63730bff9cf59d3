"""The errors that a user can meet: each is one line with the key or file, the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

LONGEST = 4000  # characters of a line, which may quote text from outside


def printable(text: str) -> str:
    """Return a text whose control characters are written out, because a terminal would obey them."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def one_line(text: str) -> str:
    """Return a text as one line without control characters, at most :data:`LONGEST` long: it loses its middle."""
    shorter = _without_middle(text)  # before each control character becomes four
    return _without_middle(printable(" ".join(shorter.split())))


def _without_middle(text: str) -> str:
    half = LONGEST // 2 - 3
    return text if len(text) <= LONGEST else f"{text[:half]} ... {text[-half:]}"


def shorten_list(names: Sequence[str], width: int = 80) -> str:
    """Return the first four names for a message, each cut to ``width`` letters, and how many more there are."""
    shown = ", ".join(name[:width] for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return shown + more if names else "nothing"


# What Flower, Ray, torch and the system write -> what to do. The first that is found holds.
_REMEDIES: Mapping[str, str] = {
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED": "the GPU has "
    "too little free memory: end other programs on it (nvidia-smi), use smaller batches, or the device 'cpu'",
    r"no kernel image is available|CUDA driver version is insufficient|NVIDIA driver on your system is too old": "this "
    "torch does not fit the GPU or its driver: install the torch for it, or use the device 'cpu'",
    r"DefaultCPUAllocator|MemoryError|[Cc]annot allocate memory|OutOfMemoryError|running low on memory": "the machine "
    "has too little free memory: end other programs, run fewer clients at once, or use smaller batches",
    r"received 0 items of ancdata|Too many open files": "raise the limit of open files: ulimit -n 8192",
    # A path in /dev/shm may be that of a run, too.
    r"unable to open shared memory|No space left on device.*/dev/shm|/dev/shm(?![/\w])": "the shared "
    "memory is full: enlarge /dev/shm (docker run --shm-size=2g)",
    r"No space left on device|Disk quota exceeded|OutOfDiskError": "the disk is full: make room, or choose other "
    "folders by ONESHOT_RUNS and TMPDIR",
    r"[Aa]ddress already in use": "another program listens there: end it, or choose another port",
    r"Read-only file system|Permission denied": "choose a folder in which this user may write: ONESHOT_RUNS for runs, "
    "ONESHOT_CLIENT_STATE for clients' models, TMPDIR for temporary files",
    r"unsupported ScalarType BFloat16": "messages carry numpy's numbers, which have no bfloat16: send weights by "
    ".float() or .half()",
    r"FAB ID or version mismatch": "the node has another version of the app: restart its SuperNode",
    r"code: 1001|RUNTIME_VERSION_INCOMPATIBLE|Exit Code: 606|version mismatch": "SuperLink, SuperNodes and their "
    "commands must be of one version of Flower: pip install the same flwr on all machines",
    r"CERTIFICATE_VERIFY_FAILED": "use the ca.crt that signed the server's certificate, which `oneshot doctor node` "
    "checks",
    r"(?:ActorDied|WorkerCrashed|RayActor|ActorUnavailable)Error|worker died unexpectedly|SYSTEM_ERROR": "its process "
    "was killed, mostly for lack of memory: run fewer clients at once, or end other programs",
    r"socksio|Unknown scheme for proxy URL": "unset the proxy variables (ALL_PROXY, HTTP_PROXY), or add this machine's "
    "addresses to NO_PROXY: 127.0.0.1,localhost,::1",
}
# An error's line in a traceback, and what Flower raises because of an earlier error.
_ERROR_LINE = re.compile(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit)\b(?:\(.*\))?(?:: .*)?$")
_CONSEQUENCES = ("Ending simulation", "Simulation Engine crashed", "ClientAppException", "Simulation failed")


def with_remedy(text: str) -> str:
    """Return an error's text in one line, and what to do if it is a known one of Flower, Ray, torch or the system."""
    found = next((remedy for sign, remedy in _REMEDIES.items() if re.search(sign, text)), "")
    line, advice = one_line(text), found[:1].upper() + found[1:]
    return line if advice in line else f"{line.rstrip('.')}. {advice}"


def has_remedy(error: BaseException) -> bool:
    """Return whether an error comes from the machine or its libraries, not from a program's fault."""
    return with_remedy(text := describe(error)) != one_line(text)


def describe(error: BaseException) -> str:
    """Return an error's type and text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def causing_error(lines: Sequence[str]) -> str:
    """Return the last error in the lines of a log that is no consequence of an earlier one; empty if there is none."""
    found = (line.strip() for line in reversed(lines) if _ERROR_LINE.match(line.strip()))
    return next((line for line in found if not any(sign in line for sign in _CONSEQUENCES)), "")


class OneShotError(Exception):
    """An error whose text is meant for the user.

    Its message is one line without control characters, and a very long one loses its middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class OptionError(OneShotError):
    """A setting is unknown, missing or out of range; the message names its key, its value and its range."""


class UploadError(OneShotError):
    """An upload cannot be accepted; the message names the client, the field and the reason.

    Args:
        client: The sender, with which the message begins; empty while it is unknown.

    Attributes:
        reason: As given, in one line as a message: it reaches logs by itself.
    """

    def __init__(self, reason: str, client: str = "") -> None:
        super().__init__(f"{client}: {reason}" if client else reason)
        self.reason, self.client = one_line(reason), client

    def __reduce__(self) -> tuple[type[UploadError], tuple[str, str]]:
        """Keep the fields when the error is pickled between processes."""
        return UploadError, (self.reason, self.client)

    def of(self, client: str) -> UploadError:
        """Return this error with a client's name, unless it has one."""
        return self if self.client else UploadError(self.reason, client)


@contextmanager
def blaming(client: str) -> Iterator[None]:
    """Add a client's name to every upload error of a block that has none."""
    try:
        yield
    except UploadError as error:
        raise error.of(client) from error.__cause__


class QuorumError(OneShotError):
    """Fewer uploads arrived than a run needs; the message names the missing clients and the reasons."""


class StoreError(OneShotError):
    """A run folder cannot be created, read or written; the message names the file."""


class ComputeError(OneShotError):
    """The server stage cannot run where the settings place it; the message names the missing resource."""


class DataError(OneShotError):
    """A data set is absent or cannot be divided as requested; the message names the remedy."""
