"""Progress for people: one line that is written over, in a notebook's cell or on a terminal; else a line each time."""

from __future__ import annotations

import builtins
import sys


class OneLine:
    """Takes lines about a progress and shows the newest one.

    Attributes:
        live: Whether a line replaces the one before it; None for a notebook or a terminal.
    """

    def __init__(self, live: bool | None = None) -> None:
        self.live = sys.stdout.isatty() or hasattr(builtins, "__IPYTHON__") if live is None else live
        self._length = 0

    def __call__(self, line: str) -> None:
        """Show a line."""
        shown = f"\r{line.ljust(self._length)}" if self.live else f"{line}\n"
        self._length = len(line)
        sys.stdout.write(shown)
        sys.stdout.flush()

    def __enter__(self) -> OneLine:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line."""
        if self.live and self._length:
            sys.stdout.write("\n")
        self._length = 0
