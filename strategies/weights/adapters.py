"""LoRA adapters in PEFT's form: what their config and tensors mean, and many of them as one.

The update of a weight is ``Delta = s B A`` with s = alpha / r, or alpha / sqrt(r) where the config has ``use_rslora``.
The average of adapters is that of the updates, held as stacked factors; averaging A and B apart is another matrix.
Rules that look at single entries (:mod:`.rules`) see one layer's updates as matrices.

What travels beside A and B, such as the head of a classifier (``modules_to_save``), biases and the rows of trained
tokens, is whole tensors, of which a rule sees the difference to the start.

Sources: as :mod:`.lora`; PEFT's files as its version 0.21 writes them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import refusals
from ..core.checkpoints import read_checkpoint
from ..core.errors import OptionError, shorten_list
from .lora import LowRank, cut_rank, factor_matrix, merge_aligned, stack_updates

if TYPE_CHECKING:
    from ..core.facts import State

    # Takes a tensor's name and the clients' updates of it, and returns the merged update.
    Rule = Callable[[str, list[Tensor]], Tensor]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of every tensor's name
_LONGEST = 2**20  # bytes of a config

_A, _B = ".lora_A.weight", ".lora_B.weight"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
TOKENS = ".token_adapter.trainable_tokens_delta"
_SUFFIXES = {_A: _B, _EMBEDDING_A: _EMBEDDING_B}

# Fields of the config that make another function of A and B, and why they cannot be merged.
_OTHER_FUNCTIONS = {
    "use_dora": "DoRA scales the merged weight's columns",
    "lora_bias": "biases of B are no part of a low-rank update",
    "layer_replication": "replicated layers share one weight",
    "ensure_weight_tying": "tied weights would get the update twice",
    "alora_invocation_tokens": "activated LoRA depends on the tokens",
    "use_qalora": "QALoRA pools the inputs of A",
    "use_bdlora": "block-diagonal factors have another form",
    "arrow_config": "Arrow chooses among adapters for each token",
    "kasa_config": "KaSA changes the base",
    "monteclora_config": "MonteCLoRA draws its factors",
    "megatron_config": "Megatron's layers are shards",
}
# Initialisations that subtract the adapter from the base, or quantise it.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Fields that all adapters must share, for their tensors mean something else otherwise.
_SHARED = ("peft_type", "task_type", "fan_in_fan_out", "target_parameters")
# The names in a pattern come from outside: what takes long to match is refused.
_PATTERN = re.compile(r"(?:[\w^$|.-]|\\[.d-]|\.\*){1,256}")


@dataclass(frozen=True)
class Adapter:
    """One client's adapter.

    Attributes:
        client: Its name in messages.
        tensors: By PEFT's names, as :func:`clean_names` returns them.
        config: The content of ``adapter_config.json``; None where only tensors travel: then all clients have one
            config, whose scale every merge keeps.
    """

    client: str
    tensors: State = field(repr=False)
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for key, value in self.tensors.items():
            if not bool(torch.isfinite(value).all()):
                raise refusals.not_finite(f"tensor {key!r}").of(self.client)
        if self.config is not None:
            _check_config(self.config, self.client)
        for key in self.tensors:
            if "lora_magnitude_vector" in key or key.endswith(".lora_B.bias"):
                raise refusals.bad_adapter(
                    f"tensor {key!r}", "no low-rank update", "be saved without DoRA and lora_bias"
                ).of(self.client)

    @property
    def layers(self) -> dict[str, str]:
        """The layers with a low-rank update, by name without :data:`PREFIX`: the suffix of their A."""
        found = {}
        for key in self.tensors:
            for suffix in _SUFFIXES:
                if key.endswith(suffix):
                    found[key.removeprefix(PREFIX).removesuffix(suffix)] = suffix
        return found

    @property
    def beside(self) -> dict[str, Tensor]:
        """The tensors beside A and B, but rows of trained tokens."""
        parts = (*_SUFFIXES, *_SUFFIXES.values(), TOKENS)
        return {key: value for key, value in self.tensors.items() if not key.endswith(parts)}

    def factors(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a layer as they are stored."""
        suffix = self.layers[layer]
        return self.tensors[PREFIX + layer + suffix], self.tensors[PREFIX + layer + _SUFFIXES[suffix]]

    def experts(self, layer: str) -> int:
        """Return the number of matrices that A and B of a layer hold: 1, or the experts of a parameter [E, in, out]."""
        rank = self._rank(layer)
        rows = len(self.factors(layer)[0])
        if rank is None or rows == rank:
            return 1
        if rows % rank or not (self.config or {}).get("target_parameters"):
            raise refusals.bad_adapter(
                f"{CONFIG_FILE}'s rank of {layer!r}", f"{rank} and its A has {rows} rows", "be equal"
            ).of(self.client)
        return rows // rank

    def size(self, layer: str) -> list[int]:
        """Return the size of a layer's update, beginning with its outputs; of experts with their number."""
        a, b = self.factors(layer)
        experts = self.experts(layer)
        return [*([experts] if experts > 1 else []), len(b), *a.shape[1:]]

    def update(self, layer: str) -> LowRank:
        """Return Delta of a layer in double precision, its scale in ``right``; of experts a stack [E, ...]."""
        a, b = (factor.double() for factor in self.factors(layer))
        experts = self.experts(layer)
        rank = len(a) // experts
        if b.ndim < 2 or a.ndim < 2 or b.shape[1] != len(a) or b[0, 0].numel() != 1:
            raise refusals.bad_adapter(
                f"layer {layer!r}", f"A {list(a.shape)} and B {list(b.shape)}",
                "be factors of one matrix; a grouped convolution has none",
            ).of(self.client)  # fmt: skip
        left, right = b.flatten(1), a.flatten(1)
        if experts > 1:
            left, right = left.reshape(len(left), rank, experts).permute(2, 0, 1), right.reshape(experts, rank, -1)
        return LowRank(left, self._scale(layer, rank) * right)

    def stored(self, layer: str, update: LowRank) -> State:
        """Return an update of a layer as this adapter would store it, with s = 1, in float32."""
        a, b = self.factors(layer)
        left, right = update.left, update.right
        if left.ndim == 3:  # experts: their rows lie one after another in A, side by side in B
            left, right = left.permute(1, 2, 0), right
        left, right = left.reshape(len(b), -1), right.reshape(-1, math.prod(a.shape[1:]))
        suffix = self.layers[layer]
        return {
            PREFIX + layer + suffix: right.reshape(-1, *a.shape[1:]).float().contiguous(),
            PREFIX + layer + _SUFFIXES[suffix]: left.reshape(len(b), -1, *b.shape[2:]).float().contiguous(),
        }

    def _rank(self, layer: str) -> int | None:
        if self.config is None:
            return None
        return int(_by_pattern(self.config.get("rank_pattern"), layer, self.config["r"]))

    def _scale(self, layer: str, rank: int) -> float:
        if self.config is None:
            return 1.0
        alpha = float(_by_pattern(self.config.get("alpha_pattern"), layer, self.config["lora_alpha"]))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def token_rows(self, key: str) -> list[int]:
        """Return the token of each row of a tensor of trained tokens, of which there are as many."""
        given = (self.config or {}).get("trainable_token_indices")
        if isinstance(given, Mapping):
            name = key.removeprefix(PREFIX).removesuffix(TOKENS)
            given = next((rows for part, rows in given.items() if f".{name}".endswith(f".{part}")), None)
        if given is None or len(given) != len(self.tensors[key]):
            raise refusals.bad_adapter(
                f"{CONFIG_FILE}'s trainable_token_indices",
                repr(given),
                f"name the {len(self.tensors[key])} tokens of {key!r}",
            ).of(self.client)
        return [int(row) for row in given]


def _by_pattern(pattern: Any, layer: str, default: Any) -> Any:
    """Return the value whose key, a regular expression, ends a layer's name; the first, as PEFT takes it."""
    return next((v for key, v in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", layer)), default)


def clean_names(tensors: Mapping[str, Tensor]) -> State:
    """Return copies of an adapter's tensors under the names that PEFT loads them by.

    Names may carry the marks of ``torch.compile`` and DataParallel, and those of a model outside of a ``PeftModel``
    lack its prefix: PEFT would ignore such tensors.

    Raises:
        UploadError: Two names become one.
    """
    cleaned: State = {}
    for key, value in tensors.items():
        name = key.replace("_orig_mod.", "").removeprefix("module.")
        name = name if name.startswith(PREFIX) else PREFIX + name
        if name in cleaned:
            raise refusals.bad_adapter(f"tensor {key!r}", f"{name!r} as another one", "have a name of its own")
        cleaned[name] = value.detach().to("cpu", copy=True)
    return cleaned


def is_adapter(path: object) -> bool:
    """Say whether a path is a folder with an adapter's config."""
    return isinstance(path, str | Path) and (Path(path) / CONFIG_FILE).is_file()


def read_adapter(folder: Path, client: str) -> Adapter:
    """Read an adapter's folder; nothing is downloaded.

    Args:
        folder: Holds ``adapter_config.json``, and ``adapter_model.safetensors`` or the ``.bin`` of older versions.
        client: Its owner's name in messages.

    Raises:
        UploadError: A file is missing or damaged, or the adapter is of a form that cannot be merged.
    """
    path = folder / CONFIG_FILE
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_LONGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise refusals.no_checkpoint(path, f"cannot be read: {error!s:.80}", "must be what PEFT wrote").of(
            client
        ) from error
    if not isinstance(config, dict):
        raise refusals.bad_adapter(CONFIG_FILE, type(config).__name__, "hold an object").of(client)
    weights = folder / WEIGHTS_FILE
    old = weights.with_suffix(".bin")
    return Adapter(
        client, clean_names(read_checkpoint(old if old.is_file() and not weights.is_file() else weights)), config
    )


def _check_config(config: Mapping[str, Any], client: str) -> None:
    """Refuse a config of another form of adapter, or with values that PEFT does not write."""

    def bad(key: str, rule: str) -> Exception:
        return refusals.bad_adapter(f"{CONFIG_FILE}'s {key}", f"{config.get(key)!r:.80}", rule).of(client)

    if config.get("peft_type") != "LORA":
        raise bad("peft_type", "be 'LORA'")
    for key in filter(config.get, _OTHER_FUNCTIONS):
        raise bad(key, f"be off: {_OTHER_FUNCTIONS[key]}, which no merge of adapters keeps")
    if str(config.get("init_lora_weights", True)).startswith(_CHANGES_BASE):
        raise bad(
            "init_lora_weights",
            "leave the base as it is: save with path_initial_model_for_weight_conversion, as PEFT's pages show",
        )
    for key, kind in (("r", int), ("lora_alpha", int | float)):
        if not (_is_number(config.get(key)) and isinstance(config[key], kind)):
            raise bad(key, "be a number above 0, and r a whole one")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if pattern and config.get("target_parameters"):
            raise bad(key, "be empty beside target_parameters, whose layers its names do not tell apart")
        if not (
            isinstance(pattern, Mapping) and all(map(_is_pattern, pattern)) and all(map(_is_number, pattern.values()))
        ):
            raise bad(key, "map names of layers to numbers above 0")


def _is_pattern(name: str) -> bool:
    return bool(_PATTERN.fullmatch(name)) and name.count(".*") <= 3


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


# Merging.


@dataclass(frozen=True)
class Merged:
    """One adapter of many.

    Attributes:
        tensors: By PEFT's names, float32 where they are factors.
        config: A config for them; None if the adapters had none.
        lost: Layer -> the norm of what the cut of the rank loses, as a share of the update's norm.
        lost_share: The same over all layers.
    """

    tensors: State = field(repr=False)
    config: dict[str, Any] | None
    lost: Mapping[str, float] = field(repr=False)
    lost_share: float


@dataclass(frozen=True)
class Merging:
    """How adapters become one.

    Attributes:
        rule: The rule for one tensor's updates; None for their weighted mean, which needs no matrices.
        scale: The factor s of the merged update.
        aligned: Whether the rule sees the updates of a layer in their common basis (KnOTS).
        rank: The rank of the result; 0 for the sum of the ranks of the clients and of their start.
        same_shapes: Whether the result has the shapes of the first adapter, whatever ``rank`` says.
    """

    rule: Rule | None = None
    scale: float = 1.0
    aligned: bool = False
    rank: int = 0
    same_shapes: bool = False


def merge_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    merging: Merging,
    *,
    start: Adapter | None = None,
    base: Mapping[str, Tensor] | None = None,
) -> Merged:
    """Merge adapters of one base, layer by layer.

    With tau_k the update of client k less that of the start, a layer's result is ``Delta_0 + s rule(tau_1 ... tau_K)``.
    No rank above the smaller side of a matrix is kept; such a cut loses nothing.

    Args:
        adapters: At least one, with the same layers; ranks and scales may differ.
        weights: w_k >= 0, not all 0; they are divided by their sum.
        merging: The rule.
        start: The adapter that all clients started from; None if they started from the base, with B = 0.
        base: The base's tensors by name; needed where a client lacks a tensor that others trained, and by a rule for
            whole tensors that the start does not hold.

    Raises:
        UploadError: Adapters differ in more than their values, ranks and scales.
        OptionError: A tensor of the start is needed and was not given.
    """
    shares = [weight / math.fsum(weights) for weight in weights]
    _check_alike([*adapters, *([start] if start is not None else [])], base is not None)
    found: dict[str, LowRank] = {}
    lost, norms = dict[str, float](), dict[str, float]()
    for layer in adapters[0].layers:
        updates = [adapter.update(layer) for adapter in adapters]
        first = start.update(layer) if start is not None else None
        whole = _merge_layer(PREFIX + layer, updates, first, shares, merging)
        norms[layer] = whole.norm()
        found[layer], lost[layer] = _fit_rank(whole, [*updates, *([first] if first else [])], merging)
    if (adapters[0].config or {}).get("target_parameters"):  # whose ranks no pattern can tell apart
        common = max(update.rank for update in found.values())
        found = {layer: update.padded(common) for layer, update in found.items()}
    tensors: State = {}
    for layer, update in found.items():
        tensors |= adapters[0].stored(layer, update)
    beside = _Beside(adapters, shares, merging, start, base)
    tensors |= beside.merge_tensors()
    rows = beside.merge_rows()
    tensors |= {key: value for key, (_, value) in rows.items()}
    total = math.fsum(norm**2 for norm in norms.values())
    share = math.sqrt(math.fsum((lost[each] * norms[each]) ** 2 for each in lost) / total) if total else 0.0
    ranks = {layer: update.rank for layer, update in found.items()}
    return Merged(
        tensors, _merged_config(adapters, ranks, {key: tokens for key, (tokens, _) in rows.items()}), lost, share
    )


def _merge_layer(
    name: str, updates: list[LowRank], first: LowRank | None, shares: Sequence[float], merging: Merging
) -> LowRank:
    """Return ``Delta_0 + s rule(tau)`` of one layer."""
    rule, s = merging.rule, merging.scale
    if rule is None:  # s sum w Delta + (1 - s) Delta_0, without a term for each difference
        kept = 0.0 if first is None else 1.0 - s
        return stack_updates(
            [*updates, *([first] if first and kept else [])], [s * w for w in shares] + [kept] * bool(first and kept)
        )
    changes = updates if first is None else [stack_updates([each, first], [1.0, -1.0]) for each in updates]
    if merging.aligned:
        change = merge_aligned(changes, lambda parts: _by_matrix(rule, name, parts))
    else:
        change = factor_matrix(_by_matrix(rule, name, [each.dense() for each in changes]))
    return stack_updates([change, *([first] if first else [])], [s, *([1.0] if first else [])])


def _by_matrix(rule: Rule, name: str, updates: list[Tensor]) -> Tensor:
    """Return the merged update; of experts each by itself."""
    if updates[0].ndim == 2:
        return rule(name, updates)
    parts = zip(*updates, strict=True)
    return torch.stack([rule(f"{name}.{expert}", list(part)) for expert, part in enumerate(parts)])


def _fit_rank(whole: LowRank, entering: Sequence[LowRank], merging: Merging) -> tuple[LowRank, float]:
    """Return an update of the wanted rank, and the share of its norm that is lost."""
    wanted = entering[0].rank if merging.same_shapes else merging.rank or sum(each.rank for each in entering)
    kept = min(wanted, whole.full_rank)
    cut, lost = (whole, 0.0) if whole.rank <= kept else cut_rank(whole, kept)
    return cut.padded(wanted) if merging.same_shapes else cut, lost


def _check_alike(adapters: Sequence[Adapter], base_known: bool) -> None:
    """Refuse adapters that differ in their layers, or in what their tensors mean."""
    one = adapters[0]
    for other in adapters[1:]:
        who = f"{one.client!r} and {other.client!r}"
        if missing := sorted(set(one.layers) ^ set(other.layers)):
            raise refusals.bad_adapter(f"the layers of {who}", f"different in {shorten_list(missing)}", "be the same")
        for key in _SHARED if one.config is not None and other.config is not None else ():
            mine, theirs = (each.config.get(key) or None for each in (one, other))  # type: ignore[union-attr]
            if mine != theirs:
                raise refusals.bad_adapter(f"{key} of {who}", f"{mine!r} and {theirs!r}", "be the same")
        names = [_base_name(each) for each in (one, other)]
        if names[0] != names[1] and all(names) and not base_known:
            raise refusals.bad_adapter(
                f"the base of {who}", f"{names[0]!r} and {names[1]!r}", "be the same; if it is, give start=, the base"
            )
        for layer in one.layers:
            sizes = [each.size(layer) for each in (one, other)]
            if sizes[0] != sizes[1]:
                raise refusals.bad_adapter(f"layer {layer!r} of {who}", f"{sizes[0]} and {sizes[1]}", "have one size")
            ranks = [len(each.factors(layer)[0]) for each in (one, other)]
            if one.config is None and ranks[0] != ranks[1]:
                raise refusals.bad_adapter(
                    f"the rank of {layer!r} of {who}", f"{ranks[0]} and {ranks[1]}", "be one where no config says alpha"
                )


def find_weights(adapter: Adapter, base: Mapping[str, Tensor]) -> dict[str, tuple[str, bool]]:
    """Return layer -> the base's weight that its update belongs to, and whether the update is transposed there.

    Transposed are embeddings, and the linear layers of GPT-2's kind (Conv1D). A square weight is taken as the other
    linear layers of the adapter are, or as the config's ``fan_in_fan_out`` says where all are square.

    Args:
        adapter: One of the adapters.
        base: The base's tensors by name.

    Raises:
        UploadError: The base has no such weight, or one of another size, or it is not clear which one is meant.
    """
    found, square = dict[str, tuple[str, bool]](), list[str]()
    seen = set[bool]()
    for layer, suffix in adapter.layers.items():
        size = adapter.size(layer)
        experts = adapter.experts(layer) > 1
        turned = [*size[:-2], size[-1], size[-2]] if len(size) == 2 or experts else None
        fits = {}
        for name in _candidates(adapter, layer):
            shape = list(base[name].shape) if name in base else None
            if shape in (size, turned):
                fits[name] = shape != size
        if len(fits) != 1 or (experts and size == turned):
            shapes = {name: list(base[name].shape) for name in _candidates(adapter, layer) if name in base}
            raise refusals.bad_adapter(
                f"layer {layer!r}",
                f"of size {size} and the base has {shapes or 'no such layer'}",
                "fit one weight of the base",
            ).of(adapter.client)
        name, is_turned = next(iter(fits.items()))
        if suffix == _EMBEDDING_A:
            is_turned = True
        elif size == turned:
            square.append(layer)
        elif turned is not None and not experts:
            seen.add(is_turned)
        found[layer] = name, is_turned
    if square and len(seen) > 1:
        raise refusals.bad_adapter(
            f"the square layer {square[0]!r}", "beside layers of both orientations", "be merged as an adapter"
        ).of(adapter.client)
    way = next(iter(seen), bool((adapter.config or {}).get("fan_in_fan_out")))
    return found | {layer: (found[layer][0], way) for layer in square}


def _candidates(adapter: Adapter, layer: str) -> list[str]:
    module = layer.replace(".base_layer", "")
    parameters = [each.rpartition(".") for each in (adapter.config or {}).get("target_parameters") or []]
    own = [f"{module}.{name}" for part, _, name in parameters if f".{module}".endswith(f".{part}")]
    return own or [f"{module}.weight"]


def add_update(weight: Tensor, update: LowRank, *, transposed: bool, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """Return ``W + Delta``, summed in double precision and rounded once.

    Args:
        weight: W, of any floating-point dtype.
        update: Delta, of as many entries.
        transposed: Whether W lies as [in, out].
        dtype: Of the result.

    Returns:
        The sum; the norm of what rounding loses; the norm of Delta.
    """
    matrix = update.dense()
    change = (matrix.mT if transposed else matrix).reshape(weight.shape)
    exact = weight.double() + change
    rounded = exact.to(dtype)
    return rounded, float((rounded.double() - exact).norm()), float(change.norm())


def _base_name(adapter: Adapter) -> str:
    """Return the last part of the base's name: its folder's place differs from client to client."""
    return str((adapter.config or {}).get("base_model_name_or_path") or "").rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class _Beside:
    """The whole tensors of adapters: heads, biases, rows of tokens. A client without one has the start's."""

    adapters: Sequence[Adapter]
    shares: Sequence[float]
    merging: Merging
    start: Adapter | None
    base: Mapping[str, Tensor] | None

    def merge_tensors(self) -> State:
        """Return the merged tensors beside A and B, less those that are the base's own."""
        found: State = {}
        for key in dict.fromkeys(key for adapter in self.adapters for key in adapter.beside):
            if key.endswith(".base_layer.weight"):
                found |= self._frozen(key)
                continue
            for adapter in self.adapters:
                if key in adapter.tensors and not _is_trained(adapter, key):
                    raise refusals.bad_adapter(
                        f"tensor {key!r}", "neither a factor nor of modules_to_save or bias", "be named in the config"
                    ).of(adapter.client)
            found[key] = self._merge(key, [adapter.tensors.get(key) for adapter in self.adapters], self._start_of(key))
        return found

    def merge_rows(self) -> dict[str, tuple[list[int], Tensor]]:
        """Return, of each layer with trained tokens, the tokens of any client and their merged rows."""
        found: dict[str, tuple[list[int], Tensor]] = {}
        for key in dict.fromkeys(key for adapter in self.adapters for key in adapter.tensors if key.endswith(TOKENS)):
            holders = [adapter for adapter in self.adapters if key in adapter.tensors]
            if holders[0].config is None:
                found[key] = (
                    [],
                    self._merge(key, [each.tensors.get(key) for each in self.adapters], self._start_of(key)),
                )
                continue
            own = {each.client: dict(zip(each.token_rows(key), each.tensors[key], strict=True)) for each in holders}
            tokens = sorted({token for rows in own.values() for token in rows})
            name = key.removeprefix(PREFIX).removesuffix(TOKENS) + ".weight"
            whole = self.base.get(name) if self.base is not None else None
            begin = None if whole is None else whole[tokens]
            values = []
            for adapter in self.adapters:
                rows = own.get(adapter.client, {})
                if begin is None and set(rows) != set(tokens):
                    raise _needs_start(key, adapter.client)
                values.append(torch.stack([rows[t] if t in rows else begin[k] for k, t in enumerate(tokens)]))  # type: ignore[index]
            found[key] = (tokens, self._merge(key, values, begin))
        return found

    def _start_of(self, key: str) -> Tensor | None:
        if self.start is not None and key in self.start.tensors:
            return self.start.tensors[key]
        name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        return self.base.get(name) if self.base is not None else None

    def _frozen(self, key: str) -> State:
        """Return the base's own tensor as PEFT's files may repeat it; empty if the given base has it."""
        holders = [adapter.tensors[key] for adapter in self.adapters if key in adapter.tensors]
        if any(not _equal(holders[0], other) for other in holders[1:]):
            raise refusals.bad_adapter(
                f"tensor {key!r}", "different among the clients", "be the base's own, which is frozen"
            )
        begin = self._start_of(key)
        return {} if begin is not None and _equal(begin, holders[0]) else {key: holders[0]}

    def _merge(self, key: str, values: Sequence[Tensor | None], begin: Tensor | None) -> Tensor:
        """Return ``theta_0 + s rule(theta_k - theta_0)``, in the dtype of the first client that has the tensor."""
        for adapter, value in zip(self.adapters, values, strict=True):
            if value is None and begin is None:
                raise _needs_start(key, adapter.client)
        given = [value if value is not None else begin for value in values]
        present = [value for value in given if value is not None]
        first = present[0]
        for value in [*present, *([begin] if begin is not None else [])]:
            if value.shape != first.shape:
                raise refusals.bad_adapter(
                    f"tensor {key!r}", f"{list(first.shape)} and {list(value.shape)}", "have one size"
                )
        if not first.is_floating_point():
            if any(not torch.equal(first, value) for value in present):
                raise refusals.bad_adapter(f"tensor {key!r} of whole numbers", "different", "be equal in all adapters")
            return first
        rule, s = self.merging.rule, self.merging.scale
        if begin is None and (rule is not None or s != 1.0):
            raise OptionError(
                f"the rule works on differences, and tensor {key!r} has no start: give start=, the base model or the "
                "adapter that all clients started from"
            )
        zero = torch.zeros_like(first, dtype=torch.float64) if begin is None else begin.double()
        updates = [value.double() - zero for value in present]
        flat = rule(key, updates) if rule is not None else sum(w * u for w, u in zip(self.shares, updates, strict=True))
        return (zero + s * flat).to(first.dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.double(), other.double())


def _needs_start(key: str, client: str) -> OptionError:
    return OptionError(
        f"adapter {client!r} lacks {key!r}, which others trained: give start=, the base model, whose it is"
    )


def _is_trained(adapter: Adapter, key: str) -> bool:
    """Say whether the config names a whole tensor as trained; without a config all are."""
    if adapter.config is None:
        return True
    modules = adapter.config.get("modules_to_save") or []
    inside = any(f".{name}." in f".{key}" for name in modules)
    return inside or (key.endswith(".bias") and adapter.config.get("bias", "none") != "none")


def _merged_config(
    adapters: Sequence[Adapter], ranks: Mapping[str, int], tokens: Mapping[str, list[int]]
) -> dict[str, Any] | None:
    """Return the first config with the ranks of the result, and s = 1 for every layer."""
    configs = [adapter.config for adapter in adapters if adapter.config is not None]
    if not configs:
        return None
    usual = max(ranks.values(), key=lambda rank: (list(ranks.values()).count(rank), rank)) if ranks else 1
    # Anchored, so that the name of a layer does not match the end of another one's.
    pattern = {f"^{re.escape(layer)}": rank for layer, rank in ranks.items() if rank != usual}
    modules = dict.fromkeys(name for config in configs for name in config.get("modules_to_save") or [])
    biases = [str(config.get("bias", "none")) for config in configs]
    given = configs[0].get("trainable_token_indices")
    by_layer = {key.removeprefix(PREFIX).removesuffix(TOKENS): rows for key, rows in tokens.items()}
    return {
        **configs[0],
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": pattern,
        "alpha_pattern": dict(pattern),
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "bias": next((bias for bias in ("all", "lora_only") if bias in biases), "none"),
        "modules_to_save": [*modules] or None,
        "trainable_token_indices": next(iter(by_layer.values()), None) if isinstance(given, list) else by_layer or None,
    }
