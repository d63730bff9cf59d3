"""The settings of the architectures."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.core.errors import OptionError
from strategies.core.options import OWN_FORM, check, is_own, meant, option

from . import ARCHITECTURES


@dataclass(frozen=True)
class ModelConfig:
    """Which architectures the clients and the server use."""

    name: str = option("lenet5", "architecture of the clients", choices=(*ARCHITECTURES, OWN_FORM))
    per_client: str = option("", "comma-separated architectures, assigned to the clients in turn; empty: model.name")
    student: str = option("", "architecture of the server's result; empty: model.name")
    accepted: str = option("", "comma-separated architectures that uploads may have; empty: all of the zoo")

    def __post_init__(self) -> None:
        """Check every value, the listed names too."""
        check(self, "model")
        accepted = _listed(self.accepted)
        if accepted and (missing := sorted(set(self.mix()) - set(accepted))):
            raise OptionError(
                f"setting 'model.accepted' is {self.accepted!r}: must be '', or name {', '.join(missing)} too"
            )
        for key, name in [*self.named(), *(("model.accepted", name) for name in accepted)]:
            if name not in ARCHITECTURES and not is_own(name):
                raise OptionError(
                    f"setting {key!r} names {name!r}: must be one of {', '.join(ARCHITECTURES)}, or {OWN_FORM}"
                    f"{meant(name, ARCHITECTURES)}"
                )

    def mix(self) -> tuple[str, ...]:
        """Return the architectures that the clients get in turn."""
        return tuple(_listed(self.per_client)) or (self.name,)

    def own(self) -> tuple[str, ...]:
        """Return the architectures of the user's own code."""
        named = [name for _, name in self.named()] + _listed(self.accepted)
        return tuple(dict.fromkeys(name for name in named if is_own(name)))

    def named(self) -> list[tuple[str, str]]:
        """Return the architectures in use, each with the setting that names it."""
        own = "model.per-client" if self.per_client else "model.name"
        result = "model.student" if self.student else "model.name"
        return [*((own, name) for name in self.mix()), (result, self.of_student())]

    def of_client(self, partition_id: int) -> str:
        """Return the architecture of one client."""
        mix = self.mix()
        return mix[partition_id % len(mix)]

    def of_student(self) -> str:
        """Return the architecture of the server's result."""
        return self.student or self.name


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]
