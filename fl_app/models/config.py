"""The settings of the architectures."""

from __future__ import annotations

from strategies.core.errors import OptionError
from strategies.core.facts import HEAD, STATISTICS, backbone_in, is_head, kind_of
from strategies.core.options import ANYWHERE, OWN_FORM, REPLAY, config_class, is_own, listed, meant, option

from . import ARCHITECTURES, HEAD_FORM, USERS_FORM, is_users, known_name


@config_class("model")
class ModelConfig:
    """Which architectures the clients and the server use."""

    name: str = option("lenet5", f"architecture of the clients: of the zoo, {HEAD_FORM}, {USERS_FORM}")
    per_client: str = option(
        "",
        "comma-separated architectures, assigned to the clients in turn; statistics or statistics+<backbone> sends "
        "sums of features; empty: model.name",
    )
    student: str = option("", "architecture of the server's result; empty: model.name", free=(REPLAY,))
    accepted: str = option(
        "", "comma-separated architectures that uploads may have; empty: the zoo and those that these settings name"
    )

    train: str = option(
        "", f"{OWN_FORM} that trains a client's model of any kind, in place of the app's training of classifiers"
    )
    evaluate: str = option(
        "", f"with model.train: {OWN_FORM} that scores a model of any kind; empty: no scores", free=ANYWHERE
    )

    def __post_init__(self) -> None:
        """Check every value, the listed names too."""
        for key, name in (("model.train", self.train), ("model.evaluate", self.evaluate)):
            if name and not is_own(name):
                raise OptionError(f"setting {key!r} is {name[:200]!r}: must be {OWN_FORM}")
        if self.evaluate and not self.train:
            raise OptionError(f"setting 'model.evaluate' is {self.evaluate!r}: must be '' unless 'model.train' is set")
        accepted = listed(self.accepted)
        if accepted and (missing := sorted(set(self.mix()) - set(accepted))):
            raise OptionError(
                f"setting 'model.accepted' is {self.accepted!r}: must be '', or name {', '.join(missing)} too"
            )
        for key, name in [*self.named(), *(("model.accepted", name) for name in accepted)]:
            if not known_name(name, sums=key in ("model.per-client", "model.accepted")):
                forms = f"{HEAD_FORM}, {USERS_FORM}"
                raise OptionError(
                    f"setting {key!r} names {name!r}: must be one of {', '.join(ARCHITECTURES)}, {forms}"
                    f"{meant(name, ARCHITECTURES)}"
                )

    def mix(self) -> tuple[str, ...]:
        """Return the architectures that the clients get in turn."""
        return tuple(listed(self.per_client)) or (self.name,)

    def all_named(self) -> tuple[str, ...]:
        """Return every architecture that these settings name: the clients', the result's, and accepted ones."""
        return tuple(dict.fromkeys([*self.mix(), self.of_student(), *listed(self.accepted)]))

    def own(self) -> tuple[str, ...]:
        """Return the user's own architectures, code and folders."""
        return tuple(filter(is_users, self.all_named()))

    def on_features(self) -> tuple[str, ...]:
        """Return the heads on backbones, and the sums of features, that these settings name."""
        return tuple(name for name in self.all_named() if is_head(name) or kind_of(name) == STATISTICS)

    def heads(self, backbone: str) -> tuple[str, ...]:
        """Return :meth:`on_features`, and the heads that the sums among them lead to."""
        names = self.on_features()
        solved = [f"{HEAD}{backbone_in(name) or backbone}" for name in names if kind_of(name) == STATISTICS]
        return tuple(dict.fromkeys((*names, *solved)))

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
