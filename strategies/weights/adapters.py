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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..core import refusals
from ..core.checkpoints import ADAPTER_CONFIG, read_checkpoint
from ..core.errors import OptionError, shorten_list
from ..core.facts import State
from ..core.fingerprint import weights_sha256
from ..core.names import LORA_A, LORA_EMBEDDING_A
from .lora import LowRank, cut_rank, factor_matrix, merge_aligned, stack_updates
from .rules import widest_dtype
from .states import Rule, Updates, mean

WEIGHTS_FILE = "adapter_model.safetensors"
BASE_DIGEST = "base_sha256"  # in the header of the weights
PREFIX = "base_model.model."  # of every tensor's name
_LONGEST = 2**20  # bytes of a config

_B, _EMBEDDING_B = ".lora_B.weight", ".lora_embedding_B"
TOKENS = ".token_adapter.trainable_tokens_delta"
_SUFFIXES = {LORA_A: _B, LORA_EMBEDDING_A: _EMBEDDING_B}

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
        tensors: By PEFT's names, as :func:`clean_names` returns them.
        config: The content of ``adapter_config.json``; None where only tensors travel: then all clients have one
            config, whose scale every merge keeps.
        base_sha256: The digest of the base's weights that it changes; empty if it is unknown.
        lost_share: Of a merged adapter, what the cut of its rank lost: the norm of the lost update as a share of the
            update's norm, from 0 to 1.
    """

    client: str
    tensors: State = field(repr=False)
    config: Mapping[str, Any] | None = None
    base_sha256: str = ""
    lost_share: float = 0.0

    @classmethod
    def of_state(cls, client: str, state: Mapping[str, Tensor]) -> Adapter:
        """Return the adapter of a state, with a config if the state holds one; see :meth:`to_state`.

        Raises:
            UploadError: It is damaged, or of a form that cannot be merged.
        """
        tensors = {key: state[key] for key in state if key != ADAPTER_CONFIG}
        if ADAPTER_CONFIG not in state:
            return cls(client, clean_names(tensors))
        try:
            facts = json.loads(bytes(state[ADAPTER_CONFIG].to(torch.uint8).flatten().tolist()))
            return cls(client, clean_names(tensors), **facts)
        except (ValueError, TypeError, RecursionError) as error:
            raise refusals.bad_adapter(ADAPTER_CONFIG, "damaged", "be what PEFT wrote").of(client) from error

    def to_state(self) -> State:
        """Return the tensors, and the config as one of them, as an upload travels and is stored: JSON in uint8."""
        if self.config is None:
            return dict(self.tensors)
        facts = {"config": self.config, "base_sha256": self.base_sha256, "lost_share": self.lost_share}
        text = json.dumps(facts, separators=(",", ":")).encode()
        return {**self.tensors, ADAPTER_CONFIG: torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def __post_init__(self) -> None:
        for key, value in self.tensors.items():
            if not bool(torch.isfinite(value).all()):
                raise refusals.not_finite(f"tensor {key!r}").of(self.client)
        if self.config is not None:
            _check_config(self.config, self.client)
        for layer, suffix in self.layers.items():
            if PREFIX + layer + _SUFFIXES[suffix] not in self.tensors:
                raise refusals.bad_adapter(f"layer {layer!r}", "A without B", "have both").of(self.client)
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
                f"{ADAPTER_CONFIG}'s rank of {layer!r}", f"{rank} and its A has {rows} rows", "be equal"
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
        return LowRank(left, self.scale(layer) * right)

    def stored(self, layer: str, update: LowRank, scale: float = 1.0) -> State:
        """Return an update of a layer as this adapter would store it, for a scale s, in float32."""
        a, b = self.factors(layer)
        left, right = update.left, update.right / scale
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

    def scale(self, layer: str) -> float:
        """Return s of a layer: alpha / r, or alpha / sqrt(r)."""
        if self.config is None:
            return 1.0
        rank = len(self.factors(layer)[0]) // self.experts(layer)
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
                f"{ADAPTER_CONFIG}'s trainable_token_indices",
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


def plain_config(config: Any) -> dict[str, Any]:
    """Return a ``LoraConfig``, or its dict, as its file holds it."""
    given = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    plain: dict[str, Any] = json.loads(json.dumps(given, default=_plain))
    return plain


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))


def read_adapter(folder: Path, client: str) -> Adapter:
    """Read an adapter's folder; nothing is downloaded.

    Args:
        folder: Holds ``adapter_config.json``, and ``adapter_model.safetensors`` or the ``.bin`` of older versions.

    Raises:
        UploadError: A file is missing or damaged, or the adapter is of a form that cannot be merged.
    """
    path = folder / ADAPTER_CONFIG
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_LONGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise refusals.no_checkpoint(path, f"cannot be read: {error!s:.80}", "must be what PEFT wrote").of(
            client
        ) from error
    if not isinstance(config, dict):
        raise refusals.bad_adapter(ADAPTER_CONFIG, type(config).__name__, "hold an object").of(client)
    weights = folder / WEIGHTS_FILE
    old = weights.with_suffix(".bin")
    weights = old if old.is_file() and not weights.is_file() else weights
    return Adapter(client, clean_names(read_checkpoint(weights)), config, _recorded_digest(weights))


def _recorded_digest(weights: Path) -> str:
    """Return the digest of the base that the header of a file of safetensors names."""
    if weights.suffix != ".safetensors":
        return ""
    with safe_open(weights, "pt") as opened:
        return str((opened.metadata() or {}).get(BASE_DIGEST, ""))


def _check_config(config: Mapping[str, Any], client: str) -> None:
    """Refuse a config of another form of adapter, or with values that PEFT does not write."""

    def bad(key: str, rule: str) -> Exception:
        return refusals.bad_adapter(f"{ADAPTER_CONFIG}'s {key}", f"{config.get(key)!r:.80}", rule).of(client)

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
class Aligned:
    """A rule in the common basis of a layer's updates (KnOTS); of tensors that are no matrices, the rule itself."""

    rule: Rule

    def __call__(self, one: Updates) -> Tensor:
        """Return the merged update of one tensor; of kernels as matrices."""
        shape = one.updates[0].shape
        if len(shape) < 2 or not one.updates[0].numel():
            return self.rule(one)
        return (
            self.merge(one, [factor_matrix(update.flatten(1).double()) for update in one.updates])
            .dense()
            .reshape(shape)
        )

    def merge(self, one: Updates, updates: Sequence[LowRank]) -> LowRank:
        """Return the merged update of matrices that are held as factors."""
        return merge_aligned(updates, lambda parts: self.rule(replace(one, updates=parts)))


def merge_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    rule: Rule = mean,
    *,
    scale: float = 1.0,
    start: Adapter | None = None,
    base: Mapping[str, Tensor] | None = None,
    label_counts: Sequence[Sequence[int]] | None = None,
) -> Adapter:
    """Merge adapters of one base, layer by layer.

    With tau_k the update of client k less that of the start, a layer's result is ``Delta_0 + s rule(tau_1 ... tau_K)``.
    Its rank is the sum of the ranks that enter, which loses nothing of a mean, and not above the smaller side of the
    matrix. Adapters without a config get one of their own rank, the only one that their model can load.

    Args:
        adapters: At least one, with the same layers; ranks and scales may differ.
        weights: w_k >= 0, not all 0; they are divided by their sum.
        rule: The rule for one tensor; :func:`.states.mean` needs no matrices.
        start: The adapter that all clients started from; None if they started from the base, with B = 0.
        base: The base's tensors by name; needed where a client lacks a tensor that others trained, and by a rule for
            whole tensors that the start does not hold.
        label_counts: Each client's training examples per class [K][C]. With them a mean weighs each class's row of the
            head, a tensor [C, ...] of ``modules_to_save``, by the clients' examples of that class.

    Raises:
        UploadError: Adapters differ in more than their values, ranks and scales.
        OptionError: A tensor of the start is needed and was not given.
    """
    one = adapters[0]
    shares = [weight / math.fsum(weights) for weight in weights]
    _check_alike([*adapters, *([start] if start is not None else [])], base is not None)
    digest = _check_base(adapters, base)
    job = _Merging(adapters, shares, rule, scale, start, base, label_counts)
    found, entered = dict[str, LowRank](), dict[str, int]()
    for layer in one.layers:
        found[layer], entered[layer] = job.merge_layer(layer)
    rows = job.merge_rows()
    beside = job.merge_beside() | {key: value for key, (_, value) in rows.items()}
    ranks = {layer: min(entered[layer], update.full_rank) for layer, update in found.items()}
    if one.config is None:
        ranks = {layer: one.update(layer).rank for layer in found}
    tokens = {key: numbers for key, (numbers, _) in rows.items()}
    return _cut(
        found, ranks, one, beside, _merged_config(adapters, tokens), digest, like=one if one.config is None else None
    )


def cut_adapter(adapter: Adapter, rank: int = 0, *, like: Adapter | None = None) -> Adapter:
    """Return the best approximation of an adapter with lower ranks; its ``lost_share`` counts what is lost in all.

    Args:
        rank: The rank of every layer; 0 for those of ``like``.
        like: An adapter of the same layers, whose ranks, scales and config the result has, so that its model loads it.
    """
    updates = {layer: adapter.update(layer) for layer in adapter.layers}
    ranks = {layer: rank or (like or adapter).update(layer).rank for layer in updates}
    rows = {key: value for key, value in adapter.tensors.items() if key.endswith(TOKENS)}
    cut = _cut(updates, ranks, adapter, adapter.beside | rows, adapter.config, adapter.base_sha256, like=like)
    before = adapter.lost_share**2
    return replace(cut, lost_share=math.sqrt(before + (1.0 - before) * cut.lost_share**2))


def _cut(
    updates: Mapping[str, LowRank],
    ranks: Mapping[str, int],
    form: Adapter,
    beside: State,
    config: Mapping[str, Any] | None,
    digest: str,
    *,
    like: Adapter | None,
) -> Adapter:
    """Return updates of some ranks as an adapter of the form of another one."""
    found, lost, total = dict[str, LowRank](), 0.0, 0.0
    for layer, update in updates.items():
        rank = min(ranks[layer], update.full_rank)
        kept, share = (update, 0.0) if update.rank <= rank else cut_rank(update, rank)
        found[layer] = kept.padded(ranks[layer]) if like is not None else kept
        norm = update.norm()
        lost, total = lost + (share * norm) ** 2, total + norm**2
    if like is None and (config or {}).get("target_parameters"):  # whose ranks no pattern can tell apart
        common = max(update.rank for update in found.values())
        found = {layer: update.padded(common) for layer, update in found.items()}
    tensors: State = {}
    for layer, update in found.items():
        tensors |= form.stored(layer, update, like.scale(layer) if like is not None else 1.0)
    if like is not None:
        config = like.config
    elif config is not None:
        config = {**config, **_ranks_config({layer: update.rank for layer, update in found.items()})}
    return Adapter("the merged adapter", tensors | beside, config, digest, math.sqrt(lost / total) if total else 0.0)


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


def base_digest(adapter: Adapter, base: Mapping[str, Tensor]) -> str:
    """Return the sha256 of the base's weights that an adapter changes, by the names that the adapter has for them.

    A base in another precision, quantised or not, has another digest.
    """
    wanted = {name for name, _ in find_weights(adapter, base).values()}
    return weights_sha256({name: base[name] for name in sorted(wanted)})


def _check_base(adapters: Sequence[Adapter], base: Mapping[str, Tensor] | None) -> str:
    """Return the digest of the adapters' base; empty if it is unknown."""
    known = {adapter.client: adapter.base_sha256 for adapter in adapters if adapter.base_sha256}
    expected = base_digest(adapters[0], base) if base is not None else next(iter(known.values()), "")
    for client, digest in known.items():
        if digest != expected:
            raise refusals.bad_adapter(
                "its base", f"of sha256 {digest:.12}", f"be the others' or the given one, of sha256 {expected:.12}"
            ).of(client)
    return expected


def find_weights(adapter: Adapter, base: Mapping[str, Tensor]) -> dict[str, tuple[str, bool]]:
    """Return layer -> the base's weight that its update belongs to, and whether the update is transposed there.

    Transposed are embeddings, and the linear layers of GPT-2's kind (Conv1D). A square weight is taken as the other
    linear layers of the adapter are, or as the config's ``fan_in_fan_out`` says where all are square.

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
        if suffix == LORA_EMBEDDING_A:
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
        transposed: Whether W lies as [in, out].

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
    place = str((adapter.config or {}).get("base_model_name_or_path") or "").replace("\\", "/").rstrip("/")
    hub = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", place)  # of Hugging Face's cache
    return hub[1].rpartition("--")[2] if hub else place.rpartition("/")[2]


@dataclass(frozen=True)
class _Merging:
    """A merge of adapters, and of the whole tensors beside them. A client without a whole tensor has the start's."""

    adapters: Sequence[Adapter]
    shares: Sequence[float]
    rule: Rule
    scale: float
    start: Adapter | None
    base: Mapping[str, Tensor] | None
    label_counts: Sequence[Sequence[int]] | None

    def merge_layer(self, layer: str) -> tuple[LowRank, int]:
        """Return ``Delta_0 + s rule(tau)`` of a layer, and the sum of the ranks that enter."""
        updates, s = [adapter.update(layer) for adapter in self.adapters], self.scale
        first = [self.start.update(layer)] if self.start is not None else []
        entered = sum(each.rank for each in [*updates, *first])
        if self.rule is mean:  # s sum w Delta + (1 - s) Delta_0, without a term for each difference
            first = first if s != 1.0 else []
            return stack_updates(
                [*updates, *first], [*(s * w for w in self.shares), *(1.0 - s for _ in first)]
            ), entered
        changes = [stack_updates([each, *first], [1.0, *(-1.0 for _ in first)]) for each in updates]
        change = self._merge_factors(PREFIX + layer, changes)
        return stack_updates([change, *first], [s, *(1.0 for _ in first)]), entered

    def _merge_factors(self, name: str, changes: Sequence[LowRank]) -> LowRank:
        if changes[0].left.ndim == 3:  # experts, each by itself
            single = [[LowRank(*pair) for pair in zip(each.left, each.right, strict=True)] for each in changes]
            parts = [self._merge_factors(f"{name}.{k}", list(part)) for k, part in enumerate(zip(*single, strict=True))]
            rank = max(part.rank for part in parts)
            parts = [part.padded(rank) for part in parts]
            return LowRank(torch.stack([part.left for part in parts]), torch.stack([part.right for part in parts]))
        if isinstance(self.rule, Aligned):
            return self.rule.merge(self._updates(name, []), changes)
        return factor_matrix(self.rule(self._updates(name, [each.dense() for each in changes])))

    def _updates(self, name: str, updates: Sequence[Tensor]) -> Updates:
        return Updates(name, updates, self.shares, [adapter.client for adapter in self.adapters], _no_other)

    def merge_beside(self) -> State:
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
        """Return ``theta_0 + s rule(theta_k - theta_0)``, in the clients' widest dtype."""
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
        if self.rule is mean and self.scale == 1.0 and self._is_head(key, first):
            return self._mean_of_rows(present).to(widest_dtype(present))
        if begin is None and (self.rule is not mean or self.scale != 1.0):
            raise OptionError(
                f"the rule works on differences, and tensor {key!r} has no start: give start=, the base model or the "
                "adapter that all clients started from"
            )
        zero = torch.zeros_like(first, dtype=torch.float64) if begin is None else begin.double()
        updates = self._updates(key, [value.double() - zero for value in present])
        return (zero + self.scale * self.rule(updates)).to(widest_dtype(present))

    def _is_head(self, key: str, value: Tensor) -> bool:
        """Say whether a tensor has a row for each class of the label counts, if there are any."""
        modules = (self.adapters[0].config or {}).get("modules_to_save") or []
        saved = any(f".{name}." in f".{key}" for name in modules)
        return saved and self.label_counts is not None and value.shape[:1] == (len(self.label_counts[0]),)

    def _mean_of_rows(self, values: Sequence[Tensor]) -> Tensor:
        """Return the mean whose weights are each class's examples; of a class without any, the clients' weights."""
        counts = torch.tensor([list(each) for each in self.label_counts or ()], dtype=torch.float64)
        shares = torch.tensor(self.shares, dtype=torch.float64)[:, None].expand_as(counts)
        weights = torch.where(counts.sum(0) > 0, counts / counts.sum(0).clamp_min(1.0), shares)
        total = torch.zeros(values[0].shape, dtype=torch.float64)
        for weight, value in zip(weights, values, strict=True):
            total += weight.reshape(-1, *[1] * (value.ndim - 1)) * value.double()
        return total


def _no_other(name: str) -> Sequence[Tensor]:
    raise OptionError(f"the rule needs {name!r} of every client, which adapters do not carry: must be another rule")


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


def _merged_config(adapters: Sequence[Adapter], tokens: Mapping[str, list[int]]) -> dict[str, Any] | None:
    """Return the first config with all that any client trained; its ranks are set by :func:`_ranks_config`."""
    configs = [adapter.config for adapter in adapters if adapter.config is not None]
    if not configs:
        return None
    modules = dict.fromkeys(name for config in configs for name in config.get("modules_to_save") or [])
    biases = [str(config.get("bias", "none")) for config in configs]
    given = configs[0].get("trainable_token_indices")
    by_layer = {key.removeprefix(PREFIX).removesuffix(TOKENS): rows for key, rows in tokens.items()}
    return {
        **configs[0],
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "bias": next((bias for bias in ("all", "lora_only") if bias in biases), "none"),
        "modules_to_save": [*modules] or None,
        "trainable_token_indices": next(iter(by_layer.values()), None) if isinstance(given, list) else by_layer or None,
    }


def _ranks_config(ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the config's part for ranks by layer, with s = 1."""
    usual = max(ranks.values(), key=lambda rank: (list(ranks.values()).count(rank), rank), default=1)
    # Anchored, so that the name of a layer does not match the end of another one's.
    pattern = {f"^{re.escape(layer)}": rank for layer, rank in ranks.items() if rank != usual}
    return {"r": usual, "lora_alpha": usual, "rank_pattern": pattern, "alpha_pattern": dict(pattern)}
