"""TOML in bounded memory: texts and files from outside."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from .errors import OptionError

# Dots between two signs "=" of a line. A dotted key of this many parts costs tomllib a few MiB; a thousand times as
# many parts exhaust the memory.
_MOST_DOTS = 1000
_LONG_NUMBER = re.compile(r"\b0[xob][0-9A-Fa-f_]{100}")


def read_toml(text: str) -> dict[str, Any]:
    """Return a TOML text as a dict, in bounded memory.

    Raises:
        ValueError: The text is not TOML (a TOMLDecodeError), is nested too deeply, or has too long a key or number.
    """
    if any(piece.count(".") > _MOST_DOTS for line in text.splitlines() for piece in line.split("=")):
        raise ValueError(f"a key of more than {_MOST_DOTS} parts")
    if _LONG_NUMBER.search(text):  # Python can read such a number but not print it
        raise ValueError("a number of more than a hundred digits")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_toml_file(file: Path, what: str) -> dict[str, Any]:
    """Return a TOML file as a dict; ``what`` is its name in the errors. Some editors begin it with a byte-order mark.

    Raises:
        OptionError: The file cannot be read, or is not TOML.
    """
    try:
        return read_toml(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise OptionError(f"{what} {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise OptionError(f"{what} {file} is not TOML: {error}") from error
