"""The errors that a user can meet: each is one line with the key or file, the value and the remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        reason: The field, its value and the remedy.
        client: The sender, with which the message begins; empty while it is unknown.

    Attributes:
        reason: As given, in one line as a message: it reaches logs by itself.
        client: As given.
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
