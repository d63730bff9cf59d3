"""A node's limits on a run's settings, from the node's own config; loads no torch.

The person who starts a run chooses its settings, and a deployed node cannot know that person. So the node's own config
decides which paths are read and written, how much privacy is given up over all runs, and which models are taken.
Without these keys a simulated node permits everything, because the run and the node have one user. A deployed node with
a config of its own reads and writes no path that a run's settings name.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.core import refusals
from strategies.core.errors import DataError, OptionError, UploadError
from strategies.core.facts import backbone_in
from strategies.core.options import listed
from strategies.core.places import expand_user
from strategies.core.scan import LOG

LABEL_COUNTS = ("numbers", "presence", "none")
SHARES = ("sums", "confusion", "accuracy")  # of an evaluation, most first
LARGEST = sys.float_info.max  # of a whole number that a float can hold
CACHE_MIB = 1024.0  # the default of features.cache-mib
DELTA = 1e-4  # the sum of ten runs with the default of privacy.delta
# The keys that end the free choice of paths.
_GUARDING = ("read", "state-dir", "max-epsilon", "max-delta")


@dataclass(frozen=True)
class NodePolicy:
    """A node's limits for the settings of every run.

    Attributes:
        deployed: Whether the node has a config of its own: then no path of a run's settings is free.
        read: Folders that ``data.root`` and ``client.checkpoint`` may name; nothing else of a run's paths is read.
        state: The node's own folder for trained models and the privacy ledger; empty for the default place.
        max_epsilon: Largest sum of epsilon over all runs; None permits training without privacy.
        max_delta: Largest sum of delta over all runs.
        label_counts: The most that is sent of the label counts, one of :data:`LABEL_COUNTS`.
        architectures: The architectures that are trained and built; empty for all of the zoo.
        sources: The data sources of own code, ``module:attribute``, that ``data.name`` may name.
        max_cache_mib: The most features that are kept on the disk, MiB, over all runs.
        may_evaluate: Whether results are scored on the node's own test examples.
        min_test_examples: Fewer test examples are not scored on.
        share: What is sent of the scores' sums, one of :data:`SHARES`.
    """

    deployed: bool = False
    read: tuple[Path, ...] = ()
    state: str = ""
    max_epsilon: float | None = None
    max_delta: float = DELTA
    label_counts: str = "numbers"
    architectures: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    max_cache_mib: float = math.inf
    may_evaluate: bool = True
    min_test_examples: int = 1
    share: str = "sums"

    @classmethod
    def of(cls, facts: Mapping[str, Any], *, deployed: bool = False, where: str = "the node's config") -> NodePolicy:
        """Read a node's config, whose keys and types were checked; ``where`` names it in an error.

        Raises:
            OptionError: A value is out of range.
        """
        _check(facts, where)
        deployed = deployed or any(key in facts for key in _GUARDING)
        return cls(
            deployed=deployed,
            read=tuple(expand_user(each).resolve() for each in listed(facts.get("read", ""))),
            state=str(facts.get("state-dir", "")),
            max_epsilon=float(facts["max-epsilon"]) if "max-epsilon" in facts else None,
            max_delta=float(facts.get("max-delta", DELTA)),
            label_counts=str(facts.get("label-counts", "numbers")),
            architectures=tuple(listed(facts.get("architectures", ""))),
            sources=tuple(listed(facts.get("data-sources", ""))),
            max_cache_mib=float(facts.get("max-cache-mib", CACHE_MIB if deployed else math.inf)),
            may_evaluate=bool(facts.get("may-evaluate", True)),
            min_test_examples=int(facts.get("min-test-examples", 1)),
            share=str(facts.get("share", "sums")),
        )

    @property
    def tells_counts(self) -> bool:
        """Whether any label counts are sent; they carry no noise, so a privacy budget excludes them."""
        return self.label_counts != "none" and self.max_epsilon is None

    @property
    def tells_numbers(self) -> bool:
        """Whether exact label counts are sent, and what they can be computed from."""
        return self.label_counts == "numbers" and self.tells_counts

    def permits(self, path: Path) -> bool:
        """Return whether a path of a run's settings may be read; links and ".." are resolved first.

        A "~" is not: whose home folder it is, and whether it exists, would tell of the node's accounts.
        """
        if not self.deployed:
            return True
        resolved = path.resolve()
        return not str(path).startswith("~") and any(resolved.is_relative_to(folder) for folder in self.read)

    def check_readable(self, key: str, path: Path) -> None:
        """Refuse a path of a run's settings; the answer is the same whether the path exists or not.

        Raises:
            UploadError: The node's config does not permit it.
        """
        if not self.permits(path):
            raise refusals.not_permitted(key, repr(str(path)[:200]), "in a folder of this node's 'read'")

    def state_dir(self, given: str) -> str:
        """Return the folder of the node's own files; ``given`` is that of the run's settings, used where it is free."""
        return self.state or ("" if self.deployed else given)

    def data_root(self, own: str, given: str) -> str:
        """Return the folder of the node's data: its own, else ``given``, the run's, if it may be read; else empty."""
        return own or (given if given and self.permits(Path(given)) else "")

    def cache_mib(self, given: float) -> float:
        """Return the most features that the node keeps, MiB: ``given``, the run's setting, as far as it permits."""
        return min(given, self.max_cache_mib)

    def check_attack(self, kind: str) -> None:
        """Refuse to play an attacker: what it sends could tell more of the examples than the node permits.

        Raises:
            UploadError: It is asked of a deployed node.
        """
        if self.deployed and kind != "none":
            raise refusals.not_permitted(
                "attack.kind",
                f"{kind!r}, and 'attack.clients' names this client",
                "'none' for a node with a config of its own",
            )

    def check_architecture(self, name: str) -> None:
        """Refuse an architecture that the node neither trains nor builds.

        Raises:
            UploadError: Names the permitted ones.
        """
        if self.architectures and name not in self.architectures:
            raise refusals.architecture_not_permitted(name, f"one of {', '.join(self.architectures)}")
        if self.deployed and ":" in name and not self.architectures:
            raise refusals.architecture_not_permitted(
                name, "among this node's 'architectures', because it is a module of the run's choice"
            )

    def check_source(self, name: str) -> None:
        """Refuse a data source that is code of the run's choice, which a deployed node does not run.

        Raises:
            UploadError: Names the setting.
        """
        if self.deployed and ":" in name and name not in self.sources:
            raise refusals.not_permitted(
                "data.name",
                repr(name[:80]),
                "among this node's 'data-sources', because it is a module of the run's choice",
            )

    def check_code(self, key: str, name: str) -> None:
        """Refuse a function of the run's choice that trains or scores models, which a deployed node does not run.

        Raises:
            UploadError: Names the setting.
        """
        if self.deployed and name not in self.architectures:
            raise refusals.not_permitted(
                key, repr(name[:80]), "among this node's 'architectures', because it is a module of the run's choice"
            )

    def check_backbone(self, name: str, weights: str) -> None:
        """Refuse a backbone that is code or a file of the run's choice, which a deployed node does not run or read.

        Raises:
            UploadError: Names the setting.
        """
        if weights:
            self.check_readable("features.weights", Path(weights))
        permitted = {*self.architectures, *map(backbone_in, self.architectures)}
        if self.deployed and ":" in name and not name.startswith("torchvision:") and name not in permitted:
            raise refusals.not_permitted(
                "features.backbone",
                repr(name[:80]),
                "among this node's 'architectures', because it is a module of the run's choice",
            )

    def check_private(self, epsilon: float) -> None:
        """Refuse an answer without differential privacy where the node has a privacy budget.

        Raises:
            UploadError: The run is not private.
        """
        if self.max_epsilon is not None and not epsilon:
            raise refusals.not_permitted(
                "privacy.epsilon", 0, f"above 0 on this node, whose max-epsilon is {self.max_epsilon:g} over all runs"
            )

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Give a deployed node's server one line for everything that cannot be read; the node's log has the reason.

        Raises:
            UploadError: Reading failed on a deployed node; on others the error itself is raised.
        """
        try:
            yield
        except (DataError, OptionError, UploadError, OSError) as error:
            if not self.deployed:
                raise
            LOG.warning("%s cannot be read: %s", what, error)
            raise refusals.unreadable_on_node(what) from None


# A simulated node, whose run has the same user.
FREE = NodePolicy()


def _check(facts: Mapping[str, Any], where: str) -> None:
    """Check the values that a node's config has of the policy."""
    for key, most in {"max-epsilon": LARGEST, "max-delta": 1.0}.items():
        if key in facts and not 0 < facts[key] < most:
            raise OptionError(
                f"{where}: {key} is {facts[key]!r:.80}: must be a number greater than 0 and below {most:g}"
            )
    if "max-delta" in facts and "max-epsilon" not in facts:
        raise OptionError(f"{where} has max-delta and no max-epsilon: must have both, or max-epsilon alone")
    for key in ("max-ensemble-mib", "max-cache-mib"):
        if not 0 <= facts.get(key, 0.0) < LARGEST:
            raise OptionError(f"{where}: {key} is {facts[key]!r:.80}: must be at least 0 and below {LARGEST:g}")
    _check_shared(facts, where)
    for folder in listed(facts.get("read", "")):
        if not expand_user(folder).is_absolute():
            raise OptionError(f"{where}: read has {folder[:200]!r}: must be absolute paths, divided by commas")


def _check_shared(facts: Mapping[str, Any], where: str) -> None:
    """Check what the config says of label counts and evaluations; see :func:`_check`."""
    if facts.get("label-counts", "numbers") not in LABEL_COUNTS:
        raise OptionError(
            f"{where}: label-counts is {facts['label-counts'][:80]!r}: must be one of {', '.join(LABEL_COUNTS)}"
        )
    if facts.get("share", "sums") not in SHARES:
        raise OptionError(f"{where}: share is {facts['share'][:80]!r}: must be one of {', '.join(SHARES)}")
    if not 1 <= facts.get("min-test-examples", 1) < 2**31:
        raise OptionError(
            f"{where}: min-test-examples is {facts['min-test-examples']}: must be at least 1 and below 2**31"
        )
