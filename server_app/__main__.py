"""The `oneshot` command; Ctrl-C while it loads ends it in one line, as later, and so does a full disk at its output."""

import errno
import gc
import io
import os
import sys
import warnings

# A full disk, a quota, and a reader that has gone, which needs no line.
_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE)


def _warn_only() -> None:
    """Let warnings of other people's libraries be warnings, here and in child processes, with PYTHONWARNINGS=error."""
    if not any(option.startswith("e") for option in sys.warnoptions):
        return
    for entry in list(warnings.filters):
        if entry[0] == "error":
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
    given = os.environ.get("PYTHONWARNINGS", "").split(",")
    os.environ["PYTHONWARNINGS"] = ",".join(option for option in given if not option.startswith("e"))


def main() -> None:
    """Run the command line."""
    _warn_only()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the program that starts this one
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123  for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As standard error does: a letter that the encoding lacks, in a folder's name say, is no reason to end.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()  # noqa: PTH109  pathlib is not loaded yet
    except OSError as error:
        sys.exit(f"error: the current folder cannot be read ({error.strerror}): must be one that exists, cd to another")
    try:
        from server_app.cli import cli

        try:
            cli()
        finally:
            sys.stdout.flush()
            gc.freeze()  # Python would search all of torch for garbage before it ends: a third of a second
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except OSError as error:
        if error.errno not in _OUTPUT:
            raise
        # Python writes the rest of the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"error: {error.filename or 'the output'} cannot be written: {error.strerror}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
