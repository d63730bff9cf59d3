"""Flower's and Ray's log lines, as a reader wants them."""

from __future__ import annotations

import re

ANSI = re.compile(r"\x1b\[[0-9;]*m")
# "(ClientAppActor pid=18588) ": which process simulated a client means nothing to the reader, and changes every time.
ACTOR = re.compile(r"^\(\w+ pid=\d+(, ip=[\d.]+)?\)\s*")
LEVEL = re.compile(r"^(DEBUG|INFO|WARNING|ERROR)\s*:\s*")
# Advice on Flower's own command line, and its good-byes.
NOISE = (
    "default simulated SuperNodes changed",
    "To change federation size",
    "flwr federation simulation-config",
    "Manually terminating ClientAppActor",
    "Start `flwr-simulation` process",
)


def tidy(line: str, *, colour: bool) -> str | None:
    """Return a log line without process ids and empty decoration, or None if it says nothing.

    Args:
        line: The line as Flower prints it.
        colour: Whether the reader's terminal shows colours.
    """
    plain = ACTOR.sub("", ANSI.sub("", line.rstrip()))
    level = LEVEL.match(plain)
    text = LEVEL.sub("", plain)
    if not text.strip() or any(part in text for part in NOISE):
        return None
    if level is None or level[1] == "INFO":
        return text
    return f"\x1b[33m{level[1]}\x1b[0m {text}" if colour else f"{level[1]} {text}"
