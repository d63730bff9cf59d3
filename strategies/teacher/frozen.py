"""Equal but faster forms of models that predict and are never trained.

Every rewriting needs the model's graph, which torch.fx traces from its forward pass. A model that cannot be traced
stays unchanged, and so does one whose code asks for types or changes the modes of torch: its graph could differ.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.overrides import handle_torch_function, has_torch_function_unary

# Max pooling that keeps little for its backward pass.


Size = int | tuple[int, int]


def lean_max_pool2d(
    x: Tensor,
    kernel_size: Size,
    *,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Return ``F.max_pool2d`` of x [B, ch, H, W], with values and gradients equal bit for bit.

    torch keeps the large input, of which the backward pass reads only the shape, and 64-bit indices. This version
    keeps only 16-bit indices (32-bit from 32,769 pixels on): a twelfth of the memory for 2x2 windows.
    """
    how: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    if has_torch_function_unary(x):  # a stand-in of a trace, which a pickled module runs through when it is loaded
        traced: Tensor = handle_torch_function(lean_max_pool2d, (x,), x, kernel_size, **how)
        return traced
    stride = kernel_size if stride is None else stride
    if not (torch.is_grad_enabled() and x.requires_grad):
        return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    sizes = [_pair(size) for size in (kernel_size, stride, padding, dilation)]
    pooled, _ = _LeanMaxPool.apply(x, (*sizes, ceil_mode))  # type: ignore[no-untyped-call]
    return pooled  # type: ignore[no-any-return]


def _pair(size: Size) -> list[int]:
    return [size, size] if isinstance(size, int) else list(size)


class _LeanMaxPool(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, window: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        pooled, index = torch.ops.aten.max_pool2d_with_indices(x, *window)
        return pooled, index.to(torch.int16 if x.shape[-1] * x.shape[-2] <= 2**15 else torch.int32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, tuple[Any, ...]], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.window = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.shape, ctx.channels_last = x.shape, x.is_contiguous(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # Neither written nor read: only its shape and layout matter.
        layout = torch.channels_last if ctx.channels_last else torch.contiguous_format
        like = torch.empty(ctx.shape, dtype=grads[0].dtype, device=grads[0].device, memory_format=layout)
        pooled_back = torch.ops.aten.max_pool2d_with_indices_backward
        return pooled_back(grads[0], like, *ctx.window, index.to(torch.int64)), None


# Tracing runs the model's own code on stand-ins for tensors, which may raise any of these.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
_NORMS: dict[type, type] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_POOL_OPTIONS = ("stride", "padding", "dilation", "ceil_mode", "return_indices")
_UPDATES = (
    "iadd", "iand", "ifloordiv", "ilshift", "imod", "imul", "ior", "ipow", "irshift", "isub", "itruediv", "ixor",
)  # fmt: skip


@dataclass(frozen=True)
class Rewriting:
    """An equal but faster form of an architecture's models, which needs less memory too; see :func:`rewriting_of`.

    It depends on no weight and no buffer, so it holds for every model of the architecture.
    """

    _graph: fx.Graph
    _folded: tuple[tuple[str, str], ...]  # convolutions, and the normalisations that they take in

    def __call__(self, model: nn.Module) -> fx.GraphModule:
        """Return a model of the architecture in its faster form, set to eval mode; it may share the model's layers."""
        faster = fx.GraphModule(model.eval(), self._graph, type(model).__name__)
        for names in self._folded:
            conv, norm = map(model.get_submodule, names)
            faster.set_submodule(names[0], fuse_conv_bn_eval(conv, norm))  # type: ignore[type-var,arg-type]
        return faster.eval()


def rewriting_of(model: nn.Module) -> Rewriting | None:
    """Return the faster form of a model's architecture, for eval mode without gradients of weights.

    - Batch normalisation is folded into the convolution before it: equal up to rounding, about 1e-6 relative.
    - ReLU moves behind the max pooling that follows it, where fewer values are left: equal bit for bit.
    - Max pooling keeps little for the backward pass: equal bit for bit.

    Args:
        model: Set to eval mode.

    Returns:
        None if no rewriting applies, the model has hooks, or it cannot be traced, as when a buffer's value decides
        what it computes.
    """
    graph_module = _read(model.eval())
    if graph_module is None:
        return None
    folded, pools = _fold_batchnorm(graph_module), _lean_pooling(graph_module)
    if not (folded or pools):
        return None
    _pool_before_relu(graph_module, pools)
    _spare_image(graph_module)
    return Rewriting(graph_module.graph, folded)


def simplify(model: nn.Module) -> nn.Module:
    """Return an equal model in its faster form (:func:`rewriting_of`), or the model itself where it has none."""
    rewriting = rewriting_of(model)
    return model if rewriting is None else rewriting(model)


class _StandIn(fx.Proxy):
    """A stand-in for a tensor that records updates in place as such, and tells the model's code no type."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # ``isinstance`` reads this. Of the code that asks, only torch.fx expects a stand-in.
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.fx"):
            raise fx.proxy.TraceError("the model's code asks for the type of a tensor")
        return _StandIn

    def _record(self, update: str, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", _apply_update, (update, self, other), {})


for _update in _UPDATES:
    setattr(_StandIn, f"__{_update}__", partialmethod(_StandIn._record, _update))


def _apply_update(update: str, left: Any, right: Any) -> Any:
    """Return ``left`` after an update such as ``left += right``.

    The code that torch.fx makes of :func:`operator.iadd` would change a number under its other names too.
    """
    return getattr(operator, update)(left, right)


class _Tracer(fx.Tracer):
    """Reads a model into a graph; refuses one that switches gradients or automatic precision, which a graph loses."""

    proxy_buffer_attributes = True  # code that asks for a buffer's value ends the trace: others may hold another

    def __init__(self) -> None:
        super().__init__()
        self._modes = _modes()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if _modes() != self._modes:
            raise fx.proxy.TraceError("the model's code changes a mode of torch")
        return _StandIn(node, self)

    def create_arg(self, a: Any) -> Any:
        # The original asks whether this is a parameter first.
        return a.node if isinstance(a, _StandIn) else super().create_arg(a)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


def _read(model: nn.Module) -> fx.GraphModule | None:
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in model.modules()):
        return None
    try:
        tracer = _Tracer()
        graph_module = fx.GraphModule(model, tracer.trace(model), type(model).__name__)
    except _UNREADABLE:
        return None
    # A tensor made during the forward pass, such as noise, would become a constant of the graph.
    own = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers(remove_duplicate=False))}
    made = any(node.op == "get_attr" and node.target not in own for node in graph_module.graph.nodes)
    return None if made else graph_module


def _fold_batchnorm(model: fx.GraphModule) -> tuple[tuple[str, str], ...]:
    """Leave out every batch normalisation behind a convolution that nothing else uses; return the names of both."""
    calls = Counter(node.target for node in model.graph.nodes if node.op == "call_module")
    # Layers whose tensors the model also reads directly.
    opened = {node.target.rpartition(".")[0] for node in model.graph.nodes if node.op == "get_attr"}
    found = []
    for node in list(model.graph.nodes):
        before = node.all_input_nodes[0] if node.all_input_nodes else node
        conv = _layer(model, before, *_NORMS)
        norm = _layer(model, node, _NORMS[type(conv)]) if conv is not None else None
        if norm is None:
            continue
        alone = len(before.users) == calls[before.target] == calls[node.target] == 1
        if alone and not {before.target, node.target} & opened and norm.running_var is not None and not norm.training:
            node.replace_all_uses_with(before)
            model.graph.erase_node(node)
            found.append((before.target, node.target))
    return tuple(found)


def _lean_pooling(model: fx.GraphModule) -> list[fx.Node]:
    """Replace every two-dimensional max pooling by :func:`.pooling.lean_max_pool2d`; return the new nodes."""
    new = []
    for node in list(model.graph.nodes):
        pool = _layer(model, node, nn.MaxPool2d)
        if pool is not None:
            size, options = pool.kernel_size, {name: getattr(pool, name) for name in _POOL_OPTIONS}
        elif node.target is F.max_pool2d:
            size, options = node.args[1], dict(node.kwargs)  # torch normalises the arguments of every call
        else:
            continue
        if not options.pop("return_indices"):
            with model.graph.inserting_after(node):
                new.append(model.graph.call_function(lean_max_pool2d, (node.args[0], size), options))
            node.replace_all_uses_with(new[-1])
            model.graph.erase_node(node)
    return new


def _pool_before_relu(model: fx.GraphModule, pools: list[fx.Node]) -> None:
    """Swap every ReLU with the pooling that is its only user."""
    for pool in pools:
        relu = pool.all_input_nodes[0]
        function = relu.target if relu.op in ("call_function", "call_method") else None
        # An in-place ReLU also changes its input for the input's other users.
        if (function in _RELUS or _layer(model, relu, nn.ReLU)) and len(relu.users) == 1:
            source = relu.all_input_nodes[0]
            if len(source.users) == 1 and _stays(model, relu, pool):
                pool.replace_all_uses_with(relu)
                pool.replace_input_with(relu, source)
                relu.replace_input_with(source, pool)
                pool.append(relu)


def _stays(model: fx.GraphModule, relu: fx.Node, pool: fx.Node) -> bool:
    """Return whether nothing is changed in place from the ReLU on to the pooling, nor the pooling's value later."""
    order = [*model.graph.nodes]
    between = order[order.index(relu) + 1 : order.index(pool)]
    return not any(_in_place(model, node) for node in between) and not _may_be_overwritten(model, pool)


def _spare_image(model: fx.GraphModule) -> None:
    """Copy images that the model would change in place: other members read them too."""
    for image in (node for node in model.graph.nodes if node.op == "placeholder" and _may_be_overwritten(model, node)):
        with model.graph.inserting_after(image):
            own = model.graph.call_method("clone", (image,))
        image.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)


def _may_be_overwritten(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a later step may change a node's value in place, itself or through a view of it."""
    seen: set[fx.Node] = set()
    aliases = [node]
    for alias in aliases:
        for user in alias.users:
            if user in seen or user.all_input_nodes[0] is not alias:
                continue
            seen.add(user)
            if _in_place(model, user):
                return True
            # A layer with weights returns new memory; any other step may return a view of its first input.
            if user.op != "call_module" or not [*model.get_submodule(str(user.target)).parameters()]:
                aliases.append(user)
    return False


def _in_place(model: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node may change its first input."""
    if node.op == "call_module":
        return bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.target is _apply_update or name.endswith("_") or bool(node.kwargs.get("inplace"))


def _layer(model: fx.GraphModule, node: fx.Node, *kinds: type[nn.Module]) -> Any:
    """Return the layer that a node calls on one input if its type is exactly one of these, else None."""
    if node.op != "call_module" or len(node.all_input_nodes) != 1:
        return None
    layer = model.get_submodule(str(node.target))
    return layer if type(layer) in kinds else None


def forget_statistics(members: Iterable[nn.Module]) -> None:
    """Drop members' batch-normalisation statistics, in place: in eval mode too they then use those of their batch."""
    for layer in (layer for member in members for layer in member.modules() if isinstance(layer, _BatchNorm)):
        layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
