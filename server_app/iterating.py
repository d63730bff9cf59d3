"""What the settings of a run in rounds must be, beyond what each key allows by itself."""

from __future__ import annotations

from fl_app.config import AppConfig
from strategies.core.errors import OptionError
from strategies.rounds.config import IterativeConfig

# They divide by how far the clients' steps went, which is known of SGD.
BY_TRAVEL = ("fednova", "scaffold")


def check_iterative(app: AppConfig, config: IterativeConfig) -> None:
    """Refuse, before any client is asked, local training that the rounds could do nothing with.

    Raises:
        OptionError: Names the setting and what is allowed.
    """
    if app.client.checkpoint:
        raise OptionError(
            f"setting 'client.checkpoint' is {app.client.checkpoint!r}: allowed with method 'iterative' is none, for "
            "its clients train in every round"
        )
    if app.teacher != "method" and config.refiner == "none":
        raise OptionError(
            f"setting 'teacher' is {app.teacher!r}: allowed with method 'iterative' where 'iterative.refiner' names a "
            "method that distils"
        )
    if config.strategy in BY_TRAVEL and app.client.optimizer != "sgd":
        raise OptionError(
            f"setting 'client.optimizer' is {app.client.optimizer!r}: allowed with 'iterative.strategy' "
            f"{config.strategy!r} is 'sgd'"
        )
