"""Classifiers that share one base model: each holds a LoRA adapter, and predicts with the base and the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ..core.errors import OptionError
from ..core.outputs import logits_of
from ..uploads.forms import attention_mask
from ..weights.adapters import Adapter, clean_names, cut_adapter, plain_config

Inputs = Callable[[Tensor], Mapping[str, Tensor]]


class SharedBase:
    """Builds classifiers of one base in memory, for ensembles of adapters: ``merge(folders, "fedens", model=...)``.

    A classifier's weights are its adapter's tensors, by PEFT's names. In a forward pass they stand in for those of the
    base's adapter; nothing is copied, and the base stays as it is.

    Args:
        model: A PEFT model of the base, with one adapter, whose layers, scales and head the clients' adapters have. It
            is frozen and used in eval mode.
        inputs: Examples [B, ...] -> the model's keyword arguments. None: tokens [B, 1, 1, L] of whole numbers are
            ``input_ids`` [B, L], with an ``attention_mask`` where they are not the model's ``pad_token_id``; others are
            the argument that the model names as its main input, else its only argument.

    Raises:
        OptionError: The model is no PEFT model, or PEFT is not installed.
    """

    def __init__(self, model: nn.Module, inputs: Inputs | None = None) -> None:
        try:
            from peft import PeftModel, get_peft_model_state_dict
        except ImportError as error:
            raise OptionError("SharedBase needs PEFT: pip install 'oneshot-fl[adapters]'") from error
        if not isinstance(model, PeftModel):
            raise OptionError(f"model is {type(model).__name__}: must be a PeftModel, as get_peft_model returns it")
        self._model = model.eval().requires_grad_(False)
        self._inputs = inputs
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
        own = {value.data_ptr(): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
        # PEFT's name -> the model's own.
        self._names = {key: own[value.data_ptr()] for key, value in state.items()}
        self.adapter = Adapter("the model", clean_names(state), plain_config(model.peft_config[model.active_adapter]))

    def __call__(self) -> nn.Module:
        """Return a classifier with the weights of the model's own adapter."""
        return _OnBase(self, self.adapter.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBase:
        """Return the same base: copies of classifiers share it too."""
        return self

    def fitted(self, adapter: Adapter) -> dict[str, Tensor]:
        """Return an adapter's tensors with the ranks and scales of the model's own.

        Raises:
            OptionError: Its ranks are higher.
        """
        for layer in adapter.layers:
            own, other = (each.update(layer).rank for each in (self.adapter, adapter))
            if other > own:
                raise OptionError(
                    f"{adapter.client} has rank {other} in {layer!r}: model must have this rank, and has {own}"
                )
        return cut_adapter(adapter, like=self.adapter).tensors

    def with_adapter(self, adapter: Adapter) -> nn.Module:
        """Return the classifier with an adapter of the model's layers, of whatever ranks and scales."""
        tensors = self.adapter.tensors | adapter.beside
        for layer in adapter.layers:
            tensors |= self.adapter.stored(layer, adapter.update(layer), self.adapter.scale(layer))
        return _OnBase(self, tensors).eval()

    def answer(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits [B, C] of the base with some adapter's tensors, by PEFT's names."""
        model = self._model
        if next(model.parameters()).device != x.device:
            model.to(x.device)
        given = {self._names[key]: value for key, value in weights.items()}
        named = self._inputs(x) if self._inputs is not None else self._named(x)
        return logits_of(functional_call(model, given, *(((), named) if isinstance(named, Mapping) else (named,))))

    def _named(self, x: Tensor) -> Any:
        base: Any = self._model.get_base_model()
        if not (x.is_floating_point() or x.ndim != 4):
            tokens = x.flatten(1)
            return {"input_ids": tokens, "attention_mask": attention_mask(tokens, base)}
        main = getattr(base, "main_input_name", None)
        return (x,) if main is None else {main: x}


class _OnBase(nn.Module):
    """An adapter's tensors as a module, by their names; the base is no part of it."""

    def __init__(self, base: SharedBase, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.shared = base
        for key, value in tensors.items():
            *path, last = key.split(".")
            holder: nn.Module = self
            for name in path:
                if name not in dict(holder.named_children()):
                    holder.add_module(name, nn.Module())
                holder = holder.get_submodule(name)
            holder.register_parameter(last, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of examples [B, ...]."""
        return self.shared.answer(dict(self.named_parameters()), x)
