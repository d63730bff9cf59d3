"""One rule for the names of a model's tensors, wherever they come from: files, dicts, modules, messages.

What wraps a model changes the names of its tensors, and what trains it adds others. :func:`match_names` finds a model's
own tensors under such names, and says in a line for each what it took for the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from . import refusals
from .errors import shorten_list

COUNTER = "num_batches_tracked"
# The names that DataParallel, DistributedDataParallel, an averaged model and torch.compile put before a module's own.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Names of tensors that belong to no model: an average's counter, buffers that older versions of a library stored, and
# what a profiler counts.
_NO_WEIGHTS = ("n_averaged", "position_ids", "inv_freq", "total_ops", "total_params")
# Words in the name of what holds a model's average over its training.
_AVERAGES = frozenset({"ema", "swa", "avg", "average", "averaged", "polyak"})
# The two factors of a weight norm as torch.nn.utils.parametrizations names them; older versions say weight_g, weight_v.
_FACTOR = re.compile(r"parametrizations\.(\w+)\.original([01])$")
# The tensors of a metric or a loss that a training module holds beside its model.
_METRIC = frozenset({
    "tp", "fp", "tn", "fn", "confmat", "correct", "total", "preds", "target", "num_updates", "sum_value", "mean_value",
    "value", "measures", "n_observations", "n_total",
})  # fmt: skip
_LOSSES = ("criterion", "loss", "loss_fn", "loss_func", "loss_function", "train_loss", "val_loss")
_CANDIDATES = 16
# LoRA's first factors, of a matrix and of an embedding, as PEFT names them.
LORA_A, LORA_EMBEDDING_A = ".lora_A.weight", ".lora_embedding_A"
# The factors of an update whose product is not linear in them, in the forms of PEFT and other libraries.
_FACTORS = re.compile(
    r"\.(lora_(embedding_)?[abe]|vera_lambda_[bd]|hada_(w[12]_[ab]|t[12])|lokr_(w[12](_[ab])?|t2))(\.|$)", re.I
)


@dataclass(frozen=True)
class MatchedNames:
    """A model's tensors among some names.

    Attributes:
        sources: A tensor's name in the model -> its name where it was found.
        counters: Counters of batch normalisation that were not found, which are 0 in models that lack them.
        extra: Names that are no tensors of the model, nor known to belong beside one.
        notes: What was taken for the same, and what was left out, a line for each.
    """

    sources: Mapping[str, str]
    counters: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def match_names(found: Collection[str], wanted: Collection[str], ties: Mapping[str, str] | None = None) -> MatchedNames:
    """Find the tensors of a model among the names of some tensors.

    The rule, in this order:

    1. :data:`WRAPPERS` count nowhere in a name.
    2. A single prefix before all of the model's names, such as Lightning's ``model.``, does not count, nor one that the
       model has and the found names lack.
    3. A tensor that is tied to another, and missing, is the other.
    4. ``num_batches_tracked`` may be missing.
    5. An average's ``n_averaged``, states of metrics, constants of losses, a profiler's counts, and positions that a
       library no longer stores are left out; so is the model's average beside the model, as under ``ema.``.
    6. The factors of a weight norm have the names of either version of PyTorch.

    Args:
        ties: Name in the model -> another name in the model of the same tensor.

    Raises:
        UploadError: Two prefixes fit, such as those of two models.
    """
    if len(found) == len(wanted) and set(found) == set(wanted):
        return MatchedNames({name: name for name in wanted})
    ties = ties or {}
    bare, own = _bare(found), _bare(wanted)
    by_bare = {own[name]: name for name in wanted}
    needed = [own[name] for name in wanted if _last(name) != COUNTER and name not in ties]
    names = {bare[name]: name for name in found}
    prefix, added = _prefix(names, needed)
    sources, inside = {}, set[str]()
    for short, name in by_bare.items():
        key = short.removeprefix(added) if added else prefix + short
        if key in names:
            sources[name] = names[key]
            inside.add(key)
    notes = [f"names were taken without {word!r}" for word in WRAPPERS if _is_left(word, sources)]
    if any(bool(_FACTOR.search(name)) != bool(_FACTOR.search(found)) for name, found in sources.items()):
        notes.append("the factors of weight norms have the names of another version of PyTorch")
    if prefix or added:
        notes.append(f"names were taken without the prefix {prefix!r}" if prefix else f"names got the prefix {added!r}")
    tied = {name: other for name, other in ties.items() if name not in sources and other in sources}
    sources |= {name: sources[other] for name, other in tied.items()}
    notes += [f"{name} is tied to {other}, and taken from there" for name, other in tied.items()]
    counters = tuple(name for name in wanted if name not in sources and _last(name) == COUNTER)
    if counters:
        notes.append(f"{COUNTER} is missing in {len(counters)} layers, and taken as 0")
    others = [name for name in names if name not in inside]
    averages = _averages(names, needed)
    if averaged := [name for name in others if name.startswith(averages)]:
        notes.append(
            f"left out are {len(averaged)} tensors of the model's average: {shorten_list([names[n] for n in averaged])}"
        )
        others = [name for name in others if not name.startswith(averages)]
    dropped = _droppable(others)
    if dropped:
        shown = shorten_list([names[name] for name in others if name in dropped])
        notes.append(f"left out are {shown}, which are not weights of the model")
    missing = tuple(name for name in wanted if name not in sources and name not in counters)
    extra = tuple(names[name] for name in others if name not in dropped)
    return MatchedNames(sources, counters, missing, extra, tuple(notes))


def own_names(found: Collection[str]) -> dict[str, str]:
    """Return the names that a model's tensors have by themselves, without what wraps it -> their names here."""
    bare = {name: without_wrappers(name) for name in found if name != "n_averaged"}
    if len(bare) < len(set(found)) or any(name != own for name, own in bare.items()):
        unlike = len(set(bare.values())) == len(bare)
        return {own: name for name, own in bare.items()} if unlike else {name: name for name in found}
    return {name: name for name in found}


def without_wrappers(name: str) -> str:
    """Return a name without :data:`WRAPPERS`, wherever they are in it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_average(name: str) -> bool:
    """Say whether what has this name is a model's average over its training, such as ``model_ema``."""
    return not _AVERAGES.isdisjoint(re.split(r"[._-]", name.lower()))


def is_adapter_state(names: Iterable[object]) -> bool:
    """Say whether tensors' names are those of a LoRA adapter: averaging its tensors one by one would be wrong."""
    return any(isinstance(name, str) and name.endswith((LORA_A, LORA_EMBEDDING_A)) for name in names)


def factor_of_update(names: Iterable[object]) -> str | None:
    """Return the first name of a factor of an update, such as LoRA's in the ``state_dict`` of a whole PEFT model."""
    return next((name for name in names if isinstance(name, str) and _FACTORS.search(name)), None)


def _bare(names: Collection[str]) -> dict[str, str]:
    """Return each name -> itself without wrappers; all stay as they are where two would become one."""
    bare = {name: _FACTOR.sub(_older_name, without_wrappers(name)) for name in names}
    return bare if len(set(bare.values())) == len(bare) else {name: name for name in names}


def _is_left(word: str, sources: Mapping[str, str]) -> bool:
    return any(word in found.split(".") and word not in name.split(".") for name, found in sources.items())


def _prefix(names: Collection[str], needed: Collection[str]) -> tuple[str, str]:
    """Return the prefix of found names that the model lacks, and the model's that they lack; one is empty."""
    lacking = [name for name in needed if name not in names]
    if not lacking:
        return "", ""
    fitting = _fitting(names, needed, max(lacking, key=len))
    fitting = [prefix for prefix in fitting if not is_average(prefix)] or fitting
    if len(fitting) > 1:
        raise refusals.several_prefixes(fitting)
    if fitting:
        return fitting[0], ""
    anchor = max((name for name in names if _last(name) != COUNTER), key=len, default="")
    for prefix in _before(anchor, needed):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in names for name in needed):
            return "", prefix
    return "", ""


def _fitting(names: Collection[str], needed: Collection[str], anchor: str) -> list[str]:
    """Return the prefixes before all needed names, of which one is the anchor."""
    return [prefix for prefix in _before(anchor, names) if all(f"{prefix}{name}" in names for name in needed)]


def _averages(names: Collection[str], needed: Collection[str]) -> tuple[str, ...]:
    """Return the prefixes under which a model's average is."""
    fitting = _fitting(names, needed, max(needed, key=len, default=""))
    return tuple(prefix for prefix in fitting if is_average(prefix))


def _older_name(factor: re.Match[str]) -> str:
    return f"{factor[1]}_{'gv'[int(factor[2])]}"


def _before(anchor: str, names: Iterable[str]) -> list[str]:
    """Return what stands before a name in others that end in it."""
    return [name.removesuffix(anchor) for name in names if name.endswith(f".{anchor}")][:_CANDIDATES]


def _droppable(names: Collection[str]) -> set[str]:
    """Return those of some names that belong to no model's weights."""
    states: dict[str, set[str]] = {}
    for name in names:
        states.setdefault(name.rpartition(".")[0], set()).add(_last(name))
    metrics = {owner for owner, parts in states.items() if parts <= _METRIC and owner}
    return {
        name
        for name in names
        if _last(name) in _NO_WEIGHTS or name.rpartition(".")[0] in metrics or name.partition(".")[0] in _LOSSES
    }


def _last(name: str) -> str:
    return name.rpartition(".")[2]
