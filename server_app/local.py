"""`oneshot run --local`: the ServerApp and the ClientApp in this process, over a grid in memory."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from client_app.app import app as client_app
from server_app.app import app as server_app
from server_app.launch.guard import sigterm_as_interrupt
from server_app.launch.superlink import Launched
from server_app.settings.read import default_settings
from strategies.core.errors import OneShotError, describe, with_remedy
from strategies.core.options import Scalar
from strategies.flower.local_grid import run_locally

# The packages whose modules keep what they have read.
_HOME = __name__.rpartition(".")[0].removesuffix("server_app")  # "oneshot_fl." where it is installed
_KEEPING = tuple(f"{_HOME}{package}." for package in ("client_app", "fl_app"))
STARTING = "running in this process: one client after another"


def launch_local(
    app_dir: Path,  # noqa: ARG001  the apps are those of this installation
    *,
    settings: Mapping[str, Scalar],
    num_supernodes: int,
    echo: Callable[[str], None],
) -> Launched:
    """Run the app in this process; arguments and result are those of :func:`server_app.launch.superlink.launch`.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came; what the app has written can be resumed.
    """
    forget_data()
    config = {**default_settings(), **settings}
    device = config["client.device"]
    # As in a simulation, where "auto" gives clients no GPU.
    of_clients = {**config, "client.device": "cpu" if device == "auto" else device}
    echo(STARTING)
    with sigterm_as_interrupt(), _log_to(echo):
        try:
            run_locally(server_app, client_app, clients=num_supernodes, server_config=config, client_config=of_clients)
        except OneShotError as error:
            return Launched(1, "finished:failed", str(error))
        except Exception as error:  # noqa: BLE001  of the user's code, say: reported as a simulation's is
            for line in traceback.format_exception(error):
                echo(line.rstrip("\n"))
            return Launched(1, "finished:failed", with_remedy(describe(error)))
    return Launched(0, "finished:completed", "")


def forget_data() -> None:
    """Let a new run in this process read data sets, models of a project and their features anew.

    The app's processes keep what they have read, for the messages to come.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_KEEPING):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


@contextmanager
def _log_to(echo: Callable[[str], None]) -> Iterator[None]:
    """Send the log of Flower, the apps and the library to ``echo`` during a block, line by line."""
    logger, handler = logging.getLogger("flwr"), _Lines(echo)
    before, logger.handlers = logger.handlers, [handler]
    try:
        yield
    finally:
        logger.handlers = before


class _Lines(logging.Handler):
    def __init__(self, echo: Callable[[str], None]) -> None:
        super().__init__()
        self._echo = echo
        self.setFormatter(logging.Formatter("%(levelname)s : %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._echo(line)
