"""The `oneshot` command; Ctrl-C while it loads ends it in one line, as later."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from server_app.cli import cli

        cli()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
