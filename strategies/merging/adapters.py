"""Merges PEFT's folders of LoRA adapters into one folder, or into the base model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..core.checkpoints import ADAPTER_CONFIG, INDEX, is_adapter, write_tensors
from ..core.durable import atomic_write, make_empty_folder, make_folder, store_errors
from ..core.errors import OptionError, StoreError, blaming, shorten_list
from ..core.names import is_adapter_state
from ..core.places import expand_user
from ..method import Job, Outcome
from ..teacher.average import example_weights
from ..weights.adapters import (
    BASE_DIGEST,
    PREFIX,
    TOKENS,
    WEIGHTS_FILE,
    Adapter,
    add_update,
    clean_names,
    cut_adapter,
    find_weights,
    plain_config,
    read_adapter,
)
from .copies import bare_module

Base = nn.Module | Mapping[str, Tensor] | str | Path

CARD_FILE = "README.md"  # as PEFT calls it
# Input embeddings in Hugging Face's models, which tie_word_embeddings shares with the output layer.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")


class BaseWeights(Mapping[str, Tensor]):
    """A base model's tensors by name, read one at a time where they lie in files.

    Args:
        base: A module, a state dict, a file of safetensors, or a folder with such files, as Hugging Face writes it.
            Names in files may lack the model's own prefix, or have one more: they are found by their ends.

    Raises:
        OptionError: It is none of these.
    """

    def __init__(self, base: Base) -> None:
        self.folder: Path | None = None
        self._files: dict[str, Path] = {}
        self._state: dict[str, Tensor] = {}
        if isinstance(base, str | Path):
            place = expand_user(base)
            files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
            if not files:
                raise OptionError(
                    f"the base {str(base)!r} must be a folder with .safetensors files; nothing is downloaded"
                )
            self.folder = place if place.is_dir() else None
            for file in files:
                with _reading(file), safetensors.safe_open(file, "pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
        elif isinstance(base, nn.Module):
            inner: nn.Module = getattr(base, "get_base_model", lambda: base)()  # of a PeftModel
            self._state = {key.replace(".base_layer.", "."): value for key, value in inner.state_dict().items()}
        elif isinstance(base, Mapping):
            self._state = dict(base)
        else:
            raise OptionError(f"the base is {type(base).__name__}: must be a module, a state dict or a folder")

    def stored_name(self, name: str) -> str:
        """Return the name under which a tensor is stored.

        Raises:
            KeyError: There is none, or several that end so.
        """
        every = self._files or self._state
        if name in every:
            return name
        found = [key for key in every if f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")]
        if len(found) != 1:
            raise KeyError(name)
        return found[0]

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor on the CPU."""
        stored = self.stored_name(name)
        if stored in self._state:
            return self._state[stored].detach().cpu()
        with _reading(self._files[stored]), safetensors.safe_open(self._files[stored], "pt") as opened:
            tensor: Tensor = opened.get_tensor(stored)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files or self._state)

    def __len__(self) -> int:
        return len(self._files or self._state)

    def tied(self, names: Iterable[str]) -> tuple[str, str] | None:
        """Return the first of some stored weights that another layer shares, and the other's name; None if none is."""
        if self._state:
            by_place: dict[tuple[Any, ...], list[str]] = {}
            for name, value in self._state.items():
                by_place.setdefault((value.data_ptr(), value.storage_offset()), []).append(name)
            groups = [each for each in by_place.values() if len(each) > 1]
            return next(((n, next(o for o in g if o != n)) for n in names for g in groups if n in g), None)
        config = self.folder / "config.json" if self.folder else None
        tied = (
            config is not None and config.is_file() and json.loads(config.read_text()).get("tie_word_embeddings", False)
        )
        embeds = [n for n in names if tied and n.endswith(_EMBEDDINGS)]
        return (embeds[0], "the output layer") if embeds else None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what safetensors raises into a StoreError with the file's name."""
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise StoreError(f"{path}: not a readable safetensors file ({error!s:.120})") from error


@dataclass(frozen=True)
class MergedAdapter:
    """The result of merging LoRA adapters.

    Attributes:
        method: The method's key.
        weights: Client -> its weight; they sum to 1.
        ranks: Client -> the ranks of its layers.
        adapter: The merged adapter.
        base: The base model; None if no base was given.
    """

    method: str
    weights: Mapping[str, float]
    ranks: Mapping[str, Sequence[int]] = field(repr=False)
    adapter: Adapter = field(repr=False)
    base: BaseWeights | None = field(repr=False, default=None)

    @property
    def lost_share(self) -> float:
        """What the cut of the rank loses: the norm of the lost update as a share of the update's norm, 0 to 1."""
        return self.adapter.lost_share

    def cut(self, rank: int) -> MergedAdapter:
        """Return the best approximation with layers of a lower rank; see :attr:`lost_share`.

        Raises:
            OptionError: The rank is not a whole number above 0.
        """
        if type(rank) is not int or rank < 1:
            raise OptionError(f"rank is {rank!r}: must be a whole number above 0")
        return replace(self, adapter=cut_adapter(self.adapter, rank))

    def save(self, folder: str | Path) -> None:
        """Write the folder that ``PeftModel.from_pretrained(base, folder)`` loads, with a model card.

        Args:
            folder: New or not; an adapter in it is replaced.

        Raises:
            OptionError: The adapters had no config, which PEFT needs.
            StoreError: The disk refuses.
        """
        if self.adapter.config is None:
            raise OptionError("the adapters were given without a config: must be PEFT's folders, to save one")
        place = expand_user(folder)
        digest = self.adapter.base_sha256
        header = {"format": "pt"} | ({BASE_DIGEST: digest} if digest else {})
        with store_errors(place):
            make_folder(place)
            atomic_write(place / WEIGHTS_FILE, save({**self.adapter.tensors}, header))
            atomic_write(place / ADAPTER_CONFIG, json.dumps(self.adapter.config, indent=2).encode() + b"\n")
            atomic_write(place / CARD_FILE, self._card().encode())

    def added_to_base(self, dtype: torch.dtype | None = None) -> tuple[dict[str, Tensor], float]:
        """Return the base's tensors with the update added, and the share of the update's norm that rounding loses.

        Args:
            dtype: Of the changed weights; None for the base's own. In bfloat16 an update of a thousandth of the weights
                loses half of its norm; ``torch.float32`` keeps it.

        Raises:
            OptionError: No base was given, or its weights are quantised, tied, or of a grouped convolution.
        """
        loss = _Loss()
        return dict(self._merged(dtype, loss)), loss.share

    def save_model(self, folder: str | Path, dtype: torch.dtype | None = None) -> float:
        """Write the base with the update added, tensor by tensor, beside the config and tokenizer of a base's folder.

        Args:
            folder: New or empty.
            dtype: As for :meth:`added_to_base`.

        Returns:
            The share of the update's norm that rounding loses.

        Raises:
            OptionError: As for :meth:`added_to_base`.
            StoreError: The folder holds files, or the disk refuses.
        """
        place = expand_user(folder)
        make_empty_folder(place)
        loss = _Loss()
        with store_errors(place):
            write_tensors(place, self._merged(dtype, loss), self.base or ())
            if self.base is not None and self.base.folder is not None:
                for file in self.base.folder.iterdir():
                    kept = file.suffix in (".json", ".txt", ".model", ".jinja") and not file.name.endswith(INDEX)
                    if file.is_file() and kept:
                        shutil.copyfile(file, place / file.name)
        return loss.share

    def _merged(self, dtype: torch.dtype | None, loss: _Loss) -> Iterator[tuple[str, Tensor]]:
        base = self.base
        if base is None:
            raise OptionError("the merged adapter has no base to be added to: give start=, the base model")
        own = self.adapter
        if rows := [key for key in own.tensors if key.endswith(TOKENS)]:
            raise OptionError(f"{rows[0]!r} holds rows of tokens: must be kept as an adapter")
        places = {base.stored_name(name): (layer, turned) for layer, (name, turned) in find_weights(own, base).items()}
        _refuse_tied(base, places)
        beside = {key.removeprefix(PREFIX).replace(".base_layer.", "."): value for key, value in own.beside.items()}
        if lacking := [name for name in beside if name not in base]:
            raise OptionError(
                f"the base has no {lacking[0]!r}, which the clients trained: start= must be the base with its head, as "
                "the clients loaded it; or keep the adapter"
            )
        whole = {base.stored_name(name): value for name, value in beside.items()}
        for name, value in base.items():
            if name in whole:
                value = whole[name].to(value.dtype)
            if name in places:
                layer, turned = places[name]
                if not value.is_floating_point() or value.element_size() < 2:
                    raise OptionError(f"the base's {name!r} is {value.dtype}: must be unquantised to add to it")
                value, *norms = add_update(value, own.update(layer), transposed=turned, dtype=dtype or value.dtype)
                loss.add(*norms)
            yield name, value

    def _card(self) -> str:
        config = self.adapter.config or {}
        base, cut = config.get("base_model_name_or_path") or "unknown", self.lost_share
        digest = self.adapter.base_sha256
        rows = [
            f"| {client} | {weight:.4f} | {_spelled(self.ranks[client])} |" for client, weight in self.weights.items()
        ]
        found = [self.adapter.update(layer).rank for layer in self.adapter.layers]
        return "\n".join(
            [
                "---", f"base_model: {json.dumps(base)}", "library_name: peft", "---", "",
                f"# {len(self.weights)} adapters merged", "",
                f"Merged by `{self.method}` from LoRA adapters of {base}.",
                f"Rank of the result: {_spelled(found)}; {cut:.2%} of the update's norm lost by the cut of the rank.",
                *([f"sha256 of the base's weights that it changes: {digest}"] if digest else []),
                "", "| adapter | weight | ranks |", "|---|---|---|", *rows, "",
                "```python", "from peft import PeftModel", "",
                "model = PeftModel.from_pretrained(base, folder)", "```", "",
            ]
        )  # fmt: skip


@dataclass
class _Loss:
    """Sums of squares of what rounding loses, and of the update."""

    lost: float = 0.0
    total: float = 0.0

    def add(self, lost: float, norm: float) -> None:
        """Add the norms of one layer."""
        self.lost, self.total = self.lost + lost**2, self.total + norm**2

    @property
    def share(self) -> float:
        return math.sqrt(self.lost / self.total) if self.total else 0.0


def _spelled(numbers: Sequence[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}" if found else "none"


def _refuse_tied(base: BaseWeights, places: Mapping[str, object]) -> None:
    """Refuse to add to a weight that another layer shares: an adapter changes one of the two."""
    shared = base.tied(places)
    if shared:
        raise OptionError(
            f"the base's {shared[0]!r} is shared with {shared[1]!r}, and the adapter changes one of the two: untie "
            "them (tie_word_embeddings=false), or keep the adapter"
        )


def adapter_state(client: str, model: Any) -> Any:
    """Return the LoRA adapter of a PEFT model in memory as a state; anything else as it is.

    Raises:
        OptionError: The model holds several adapters.
    """
    configs = getattr(bare_module(model), "peft_config", None) if isinstance(model, nn.Module) else None
    if not configs or {each.peft_type for each in configs.values()} != {"LORA"}:
        return model
    if len(configs) > 1:
        raise OptionError(
            f"it holds the adapters {shorten_list(list(configs))}: must hold one, as delete_adapter leaves"
        )
    from peft import get_peft_model_state_dict

    (name, config), whole = next(iter(configs.items())), bare_module(model)
    state = get_peft_model_state_dict(whole, adapter_name=name, save_embedding_layers=False)
    return Adapter(f"model {client!r}", clean_names(state), plain_config(config)).to_state()


def open_adapters(named: Mapping[str, Any]) -> dict[str, Adapter]:
    """Return client -> its LoRA adapter, by client; empty if no model is one.

    Args:
        named: Client -> PEFT's folder, or an adapter's tensors; or models of any other form.

    Raises:
        OptionError: Some are adapters and others are not.
        UploadError: An adapter is damaged, or of a form that cannot be merged.
    """
    folders = {client for client, one in named.items() if is_adapter(one)}
    states = {client for client, one in named.items() if isinstance(one, Mapping) and is_adapter_state(one)}
    if not folders | states:
        return {}
    if others := sorted(set(named) - folders - states):
        raise OptionError(f"model {others[0]!r} is not an adapter, and others are: must all be PEFT's folders")
    found = {}
    for client in sorted(named):
        with blaming(f"adapter {client!r}"):
            one = named[client]
            found[client] = (
                read_adapter(expand_user(one), f"adapter {client!r}")
                if client in folders
                else Adapter.of_state(f"adapter {client!r}", one)
            )
    return found


def open_start(start: Any) -> Mapping[str, Tensor]:
    """Return the tensors of what adapters started from: the base, or an adapter."""
    if is_adapter(start):
        return read_adapter(expand_user(start), "start").to_state()
    return start if isinstance(start, Mapping) and is_adapter_state(start) else BaseWeights(start)


def describe_merge(method: str, job: Job, outcome: Outcome) -> MergedAdapter | None:
    """Return a result that is an adapter, with its clients; None if it is none."""
    if outcome.student is None or not is_adapter_state(outcome.student):
        return None
    adapters = {upload.client: Adapter.of_state(upload.client, upload.read()) for upload in job.uploads}
    ranks = {client: [one.update(layer).rank for layer in one.layers] for client, one in adapters.items()}
    counts = example_weights([upload.num_examples for upload in job.uploads]) or [1.0] * len(adapters)
    weights = {client: count / math.fsum(counts) for client, count in zip(adapters, counts, strict=True)}
    base = job.start if isinstance(job.start, BaseWeights) else None
    return MergedAdapter(method, weights, ranks, Adapter.of_state("the merged adapter", outcome.student), base)
